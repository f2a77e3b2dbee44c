"""Prepared data: what verl needs is there, malformed input is named, and an error leaves nothing behind."""

import json
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml

from recipes.datasets import check_rows
from recipes.search_agent.corpus import read_corpus
from recipes.search_agent.index import CorpusIndex
from recipes.search_agent.prepare_data import main, parse_options, prepare
from recipes.search_agent.reward import compute_score

CORPUS = [{"id": "1", "title": "Paris", "text": "Paris is the capital of France."}]
QUESTIONS = [
    {"question": "Capital of France?", "answer": "Paris"},
    {"question": "Where is Paris?", "answers": ["France", "in France"]},
    {"question": "What is Paris?", "answer": "a capital"},
]


def write_jsonl(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def run(out, *options, num_train=2, num_val=1):
    arguments = ["--out", str(out), "--num-train", str(num_train), "--num-val", str(num_val), *options]
    prepare(parse_options(arguments))
    return {split: pyarrow.parquet.read_table(out / f"{split}.parquet").to_pylist() for split in ("train", "val")}


def own(tmp_path, corpus=CORPUS, questions=QUESTIONS):
    return (
        "--corpus", write_jsonl(tmp_path / "c.jsonl", corpus),
        "--questions", write_jsonl(tmp_path / "q.jsonl", questions),
    )  # fmt: skip


def test_generated_rows_are_what_verl_and_the_reward_read(tmp_path):
    rows = run(tmp_path / "data", "--seed", "4", num_train=40, num_val=10)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "corpus.jsonl", "tools.yaml", "train.parquet", "val.parquet",
    ]  # fmt: skip
    assert check_rows(tmp_path / "data" / "train.parquet") == 40
    assert [row["extra_info"]["index"] for row in rows["val"]] == list(range(10))
    for row in rows["train"] + rows["val"]:
        assert row["agent_name"] == "tool_agent" and [m["role"] for m in row["prompt"]] == ["system", "user"]
        (answer,) = row["reward_model"]["ground_truth"]
        scored = compute_score(row["data_source"], f"<answer>{answer}</answer>", row["reward_model"]["ground_truth"])
        assert scored["score"] == 1.0
    train, val = ({row["extra_info"]["question"] for row in rows[split]} for split in ("train", "val"))
    assert len(train) == 40 and len(val) == 10 and not train & val


@pytest.mark.parametrize(("size", "top_k"), [("demo", 3), ("small", 5)])
def test_tools_yaml_names_the_corpus_and_the_limits_of_the_size(tmp_path, monkeypatch, size, top_k):
    monkeypatch.chdir(tmp_path)
    run(Path("nested/data"), "--size", size)
    for tool in yaml.safe_load(Path("nested/data/tools.yaml").read_text())["tools"]:
        assert tool["config"]["corpus_path"] == str(tmp_path / "nested/data/corpus.jsonl")
        assert tool["config"]["top_k"] == top_k
    assert len(CorpusIndex(read_corpus(tmp_path / "nested/data/corpus.jsonl"))) > 100


def test_same_seed_same_files_and_another_seed_others(tmp_path):
    first, second, other = (run(tmp_path / name, "--seed", name[0]) for name in ("1a", "1b", "2"))
    assert first == second != other


def test_hops_choose_the_questions(tmp_path):
    rows = run(tmp_path / "data", "--hops", "1", num_train=30)["train"]
    assert all(row["prompt"][1]["content"].count(" the ") == 1 for row in rows)


def test_own_corpus_and_questions(tmp_path):
    rows = run(tmp_path / "data", *own(tmp_path))
    asked = {row["prompt"][1]["content"]: row["reward_model"]["ground_truth"] for part in rows.values() for row in part}
    assert asked["Where is Paris?"] == ["France", "in France"] and len(asked) == 3
    assert read_corpus(tmp_path / "data" / "corpus.jsonl")[0].title == "Paris"


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ([QUESTIONS[0], "{"], "q.jsonl line 2: expected a JSON object"),
        ([QUESTIONS[0], {"answer": "x"}], "q.jsonl line 2: field 'question' is missing; the row has \\['answer'\\]"),
        ([{"question": "", "answer": "x"}], "q.jsonl line 1: field 'question' is ''; expected a non-empty text"),
        ([{"question": "Q?"}], "q.jsonl line 1: expected either field 'answer' or field 'answers'"),
        ([{"question": "Q?", "answer": "x", "answers": ["x"]}], "line 1: expected either field 'answer' or field"),
        ([{"question": "Q?", "answer": 5}], "line 1: field 'answer' is 5; expected a non-empty text"),
        ([{"question": "Q?", "answer": "The"}], "line 1: field 'answer' is 'The'; expected a text with more than"),
        ([{"question": "Q?", "answers": []}], "line 1: field 'answers' is \\[\\]; expected a non-empty list"),
        ([{"question": "Q?", "answers": "x"}], "line 1: field 'answers' is 'x'; expected a non-empty list"),
        ([{"question": "Q?", "answers": ["x", None]}], "line 1: field 'answers\\[1\\]' is None; expected a text"),
        ([QUESTIONS[0], QUESTIONS[1], QUESTIONS[0]], "line 3: field 'question' is the same as in .*q.jsonl line 1"),
        (QUESTIONS[:2], "questions: 2 rows, but num_train \\+ num_val is 3; lower them or add questions"),
    ],
)
def test_malformed_questions_are_named_and_nothing_is_written(tmp_path, questions, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "sub" / "data", *own(tmp_path, questions=questions))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.jsonl", "q.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-train", "0"], "num_train is 0; expected 1 or more"),
        (["--num-val", "-1"], "num_val is -1; expected 1 or more"),
        (["--corpus", "c.jsonl"], "--corpus and --questions belong together"),
        (["--questions", "q.jsonl"], "--corpus and --questions belong together"),
        (["--corpus", "no.jsonl", "--questions", "no.jsonl"], "no.jsonl: no such file"),
    ],
)
def test_wrong_options_end_with_a_message_and_status_1(tmp_path, caplog, options, message):
    defaults = ["--out", str(tmp_path / "data"), "--num-train", "2", "--num-val", "1"]
    assert main([*defaults, *options]) == 1
    assert message in caplog.text and not list(tmp_path.iterdir())


def test_failed_run_leaves_the_earlier_data_alone(tmp_path):
    run(tmp_path / "data")
    before = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    with pytest.raises(ValueError):
        run(tmp_path / "data", *own(tmp_path, corpus=[CORPUS[0], CORPUS[0]]))
    assert {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()} == before
    assert main(["--out", str(tmp_path / "data"), "--num-train", "2", "--num-val", "1", "--seed", "9"]) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()} != before


def test_interruption_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("recipes.search_agent.prepare_data.write_corpus", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "data")
    assert not list(tmp_path.iterdir())


@pytest.mark.upstream
def test_verl_reads_the_rows(tmp_path):
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    run(tmp_path / "data", num_train=4)
    config = OmegaConf.create({"filter_overlong_prompts": False, "cache_dir": str(tmp_path / "cache")})
    dataset = RLHFDataset(str(tmp_path / "data" / "train.parquet"), tokenizer=None, config=config)
    batch = collate_fn([dataset[index] for index in range(4)])
    assert list(batch["agent_name"]) == ["tool_agent"] * 4 and list(batch["index"]) == [0, 1, 2, 3]
    assert isinstance(batch["reward_model"][0]["ground_truth"], list)
    assert batch["raw_prompt"][0][-1]["role"] == "user"
