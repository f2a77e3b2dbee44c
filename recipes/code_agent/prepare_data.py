"""Write the dataset of a code-agent run: train.parquet and val.parquet.

With generated tasks::

    python -m recipes.code_agent.prepare_data --out data/code_agent --num-train 512 --num-val 64 --seed 0 --size demo

or with tasks of one's own, of the SWE-smith / SWE-Gym shape (fields: :mod:`recipes.code_agent.external_tasks`)::

    python -m recipes.code_agent.prepare_data --out DIR --num-train 900 --num-val 100 --from tasks.jsonl

Columns: ``data_source``, ``agent_name`` (``code_agent``), ``prompt`` (chat messages), ``ability``, ``reward_model``
(``ground_truth``: the fix, for people; rewards come from tests) and ``extra_info`` with ``split``, ``index`` and
``task`` (:mod:`recipes.code_agent.tasks`). After an error nothing has been written or replaced.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from recipes.code_agent.external_tasks import PATCH_ROLES, read_tasks
from recipes.code_agent.generate import SIZES, PackageSize, generate, verify
from recipes.code_agent.tasks import Task, prompt_messages
from recipes.datasets import check_rows

logger = logging.getLogger(__name__)

DATA_SOURCE = "code_agent"
_MAX_ATTEMPTS_PER_TASK = 50
"""Generated tasks that are equal to an earlier one are left out; beyond this, there are not enough different ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A task and its fix."""

    task: Task
    fix: str


def generated_samples(num_samples: int, seed: int, size: PackageSize) -> Iterator[Sample]:
    """Yield verified tasks that differ from each other. Must be called in the main thread.

    Raises:
        ValueError: there are not so many.
    """
    seen: set[int] = set()
    for index in count():
        if len(seen) == num_samples:
            return
        if index == num_samples * _MAX_ATTEMPTS_PER_TASK:
            raise ValueError(f"num_train + num_val is {num_samples}, but only {len(seen)} different tasks were found")
        generated = generate(seed, index, size)
        key = hash(tuple(generated.task.files.items()))
        if key not in seen:
            seen.add(key)
            verify(generated)
            bug = generated.bug
            yield Sample(task=generated.task, fix=f"{bug.path}: {bug.broken} -> {bug.line}")


def external_samples(path: Path, num_samples: int, seed: int, patch_role: str) -> list[Sample]:
    """Read all tasks of a file and draw from them at random.

    Raises:
        ValueError: a row is malformed, or there are not so many rows.
    """
    samples = [Sample(task=external.task, fix=external.patch) for external in read_tasks(path, patch_role)]
    if num_samples > len(samples):
        raise ValueError(f"{path}: {len(samples)} rows, but num_train + num_val is {num_samples}; lower them")
    return random.Random(f"code_agent/split/{seed}").sample(samples, num_samples)


def write_dataset(out: Path, samples: Sequence[Sample], num_train: int) -> None:
    """Write the first ``num_train`` samples to train on and the others to validate.

    Both files are written and checked next to ``out`` first and then moved there.

    Raises:
        ValueError: a row is malformed.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch_name:
        scratch = Path(scratch_name)
        for split, part in (("train", samples[:num_train]), ("val", samples[num_train:])):
            rows = [_row(split, index, sample) for index, sample in enumerate(part)]
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), scratch / f"{split}.parquet")
            check_rows(scratch / f"{split}.parquet")
        out.mkdir(exist_ok=True)
        for file in sorted(scratch.iterdir()):
            os.replace(file, out / file.name)


def _row(split: str, index: int, sample: Sample) -> dict[str, Any]:
    return {
        "data_source": DATA_SOURCE,
        "agent_name": "code_agent",
        "prompt": prompt_messages(sample.task),
        "ability": "code",
        "reward_model": {"style": "tests", "ground_truth": sample.fix},
        "extra_info": {"split": split, "index": index, "task": sample.task.to_json()},
    }


def prepare(options: argparse.Namespace) -> None:
    """Write the data that the command line asks for.

    Raises:
        ValueError: an option or an input row is wrong; nothing has been written then.
    """
    for name in ("num_train", "num_val"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} is {getattr(options, name)}; expected 1 or more")
    num_samples = options.num_train + options.num_val
    if options.source is not None:
        samples = external_samples(options.source, num_samples, options.seed, options.patch_role)
    else:
        samples = list(generated_samples(num_samples, options.seed, SIZES[options.size]))
    write_dataset(options.out, samples, options.num_train)
    logger.info("%s: %d tasks to train on and %d to validate", options.out, options.num_train, options.num_val)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="prepare_data", description="Prepare the data of a code-agent run.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--num-train", type=int, required=True, metavar="N")
    parser.add_argument("--num-val", type=int, required=True, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=SIZES, default="demo", help="of generated packages")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="your own tasks, .parquet or .jsonl")
    parser.add_argument(
        "--patch-role", choices=PATCH_ROLES, default="fix", help="whether a patch repairs or breaks its snapshot"
    )
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
