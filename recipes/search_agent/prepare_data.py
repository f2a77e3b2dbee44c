"""Write the data of a search-agent run: train.parquet, val.parquet, corpus.jsonl and tools.yaml.

With a generated world::

    python -m recipes.search_agent.prepare_data --out data/search_agent --num-train 512 --num-val 64 --seed 0

or with a corpus and questions of one's own, where a corpus row is ``{"id", "title", "text"}`` and a question row is
``{"question", "answer"}`` or ``{"question", "answers": [...]}``::

    python -m recipes.search_agent.prepare_data --out DIR --num-train 900 --num-val 100 --seed 0 \
        --corpus corpus.jsonl --questions questions.jsonl

tools.yaml names the corpus by its absolute path; give it to verl as
``actor_rollout_ref.rollout.multi_turn.tool_config_path``. After an error nothing has been written or replaced.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml

from recipes.datasets import check_rows
from recipes.search_agent.corpus import Document, read_corpus, read_rows, text_field, write_corpus
from recipes.search_agent.demonstrations import TOOLS_YAML
from recipes.search_agent.generate import MAX_HOPS, SIZES, generate
from recipes.search_agent.prompt import prompt_messages
from recipes.search_agent.retrieval import RetrievalConfig
from recipes.search_agent.reward import normalise

logger = logging.getLogger(__name__)

DATA_SOURCE = "search_agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question and every answer that counts as right."""

    question: str
    answers: tuple[str, ...]


def read_questions(path: Path) -> list[Asked]:
    """Read a user's questions.

    Raises:
        ValueError: the file or a row is malformed, or a question occurs twice; the message names file, line and field.
    """
    asked = []
    places: dict[str, str] = {}
    for place, row in read_rows(path):
        question = text_field(row, "question", place).strip()
        if question in places:
            raise ValueError(f"{place}: field 'question' is the same as in {places[question]}; remove one of them")
        places[question] = place
        asked.append(Asked(question=question, answers=_read_answers(row, place)))
    return asked


def _read_answers(row: dict[str, Any], place: str) -> tuple[str, ...]:
    if ("answer" in row) == ("answers" in row):
        raise ValueError(f"{place}: expected either field 'answer' or field 'answers'; the row has {sorted(row)}")
    if "answer" in row:
        answers = [text_field(row, "answer", place)]
    else:
        answers = row["answers"]
        if not isinstance(answers, list) or not answers:
            raise ValueError(f"{place}: field 'answers' is {answers!r:.60}; expected a non-empty list of texts")
    for number, answer in enumerate(answers):
        if not isinstance(answer, str) or not normalise(answer):
            name = "answer" if "answer" in row else f"answers[{number}]"
            raise ValueError(f"{place}: field {name!r} is {answer!r:.60}; expected a text with more than articles")
    return tuple(answers)


def choose_questions(asked: Sequence[Asked], count: int, seed: int) -> list[Asked]:
    """Draw questions at random.

    Raises:
        ValueError: there are not so many.
    """
    if count > len(asked):
        raise ValueError(
            f"questions: {len(asked)} rows, but num_train + num_val is {count}; lower them or add questions"
        )
    return random.Random(f"search_agent/split/{seed}").sample(asked, count)


def write_dataset(
    out: Path, documents: Sequence[Document], asked: Sequence[Asked], num_train: int, limits: RetrievalConfig
) -> None:
    """Write all files of a run into ``out``: the first ``num_train`` questions to train on, the others to validate.

    Everything is written and checked next to ``out`` first and then moved there.

    Raises:
        ValueError: a row is malformed.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch_name:
        scratch = Path(scratch_name)
        for split, part in (("train", asked[:num_train]), ("val", asked[num_train:])):
            _write_rows(scratch / f"{split}.parquet", split, part)
        write_corpus(scratch / "corpus.jsonl", documents)
        _write_tools(scratch / "tools.yaml", out.resolve() / "corpus.jsonl", limits)
        out.mkdir(exist_ok=True)
        for file in sorted(scratch.iterdir()):
            os.replace(file, out / file.name)


def _write_rows(path: Path, split: str, asked: Sequence[Asked]) -> None:
    rows = [_row(split, index, item) for index, item in enumerate(asked)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    check_rows(path)


def _row(split: str, index: int, asked: Asked) -> dict[str, Any]:
    return {
        "data_source": DATA_SOURCE,
        "agent_name": "tool_agent",
        "prompt": prompt_messages(asked.question),
        "ability": "search",
        "reward_model": {"style": "rule", "ground_truth": list(asked.answers)},
        "extra_info": {"split": split, "index": index, "question": asked.question},
    }


def _write_tools(path: Path, corpus_path: Path, limits: RetrievalConfig) -> None:
    declared = yaml.safe_load(TOOLS_YAML.read_text(encoding="utf-8"))
    for tool in declared["tools"]:
        tool["config"] = {"type": "native", "corpus_path": str(corpus_path), **dataclasses.asdict(limits)}
    path.write_text(yaml.safe_dump(declared, sort_keys=False, allow_unicode=True), encoding="utf-8")


def prepare(options: argparse.Namespace) -> None:
    """Write the data that the command line asks for.

    Raises:
        ValueError: an option or an input row is wrong; nothing has been written then.
    """
    for name in ("num_train", "num_val"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} is {getattr(options, name)}; expected 1 or more")
    count = options.num_train + options.num_val
    size = SIZES[options.size]
    if (options.corpus is None) != (options.questions is None):
        raise ValueError("--corpus and --questions belong together; give both or neither")
    if options.corpus is not None:
        documents = read_corpus(options.corpus)
        asked = choose_questions(read_questions(options.questions), count, options.seed)
    else:
        documents, questions = generate(size, count, tuple(options.hops), options.seed)
        asked = [Asked(question=question.text, answers=(question.answer,)) for question in questions]
    write_dataset(options.out, documents, asked, options.num_train, size.retrieval)
    logger.info(
        "%s: %d documents, %d questions to train on and %d to validate",
        options.out, len(documents), options.num_train, options.num_val,
    )  # fmt: skip


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="prepare_data", description="Prepare the data of a search-agent run.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--num-train", type=int, required=True, metavar="N")
    parser.add_argument("--num-val", type=int, required=True, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=SIZES, default="demo", help="also sets how much the tools show at a time")
    parser.add_argument("--hops", type=int, nargs="+", choices=range(1, MAX_HOPS + 1), default=[2], metavar="1..3")
    parser.add_argument("--corpus", type=Path, metavar="FILE.jsonl", help="your own documents")
    parser.add_argument("--questions", type=Path, metavar="FILE.jsonl", help="your own questions about them")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        prepare(parse_options(arguments))
    except (ValueError, OSError) as error:
        logger.error("prepare_data: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
