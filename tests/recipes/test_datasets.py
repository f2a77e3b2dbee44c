"""Dataset check: a malformed row is named by file, index and field, whichever format it comes in."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from recipes.datasets import check_rows

GOOD = {
    "data_source": "search_agent",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}],
    "agent_name": "tool_agent",
    "reward_model": {"style": "rule", "ground_truth": ["me"]},
    "extra_info": {"index": 0},
}


def write(folder, suffix, rows):
    path = folder / f"data{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompt(*messages):
    return GOOD | {"prompt": [{"role": role, "content": content} for role, content in messages]}


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_good_rows_are_counted(tmp_path, suffix):
    assert check_rows(write(tmp_path, suffix, [GOOD] * 700)) == 700
    assert check_rows(str(write(tmp_path, suffix, [GOOD | {"note": None}]))) == 1


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        (GOOD | {"prompt": None}, "field 'prompt' is null; expected a value"),
        (GOOD | {"prompt": []}, "field 'prompt' is list \\[\\]; expected a non-empty list of chat messages"),
        (prompt(("user", "")), "field 'prompt\\[0\\].content' is str ''; expected a non-empty text"),
        (prompt(("user", " \n")), "field 'prompt\\[0\\].content' is str .*; expected a non-empty text"),
        (prompt(("user", "a"), ("user", None)), "field 'prompt\\[1\\].content' is null; expected a non-empty text"),
        (prompt(("robot", "a")), "field 'prompt\\[0\\].role' is str 'robot'; expected one of system, user, assistant"),
        (prompt((None, "a")), "field 'prompt\\[0\\].role' is null; expected one of"),
        (prompt(("user", "a"), ("assistant", "b")), "last message of 'prompt' has role 'assistant'; expected 'user'"),
        (GOOD | {"data_source": None}, "field 'data_source' is null"),
        (GOOD | {"data_source": " "}, "field 'data_source' is str ' '; expected a non-empty text"),
        (GOOD | {"agent_name": ""}, "field 'agent_name' is str ''"),
        (GOOD | {"extra_info": None}, "field 'extra_info' is null"),
        (GOOD | {"reward_model": None}, "field 'reward_model' is null"),
        (
            GOOD | {"reward_model": {"style": "rule", "ground_truth": None}},
            "field 'reward_model.ground_truth' is missing or null",
        ),
    ],
)
def test_malformed_row_is_named(tmp_path, suffix, row, message):
    # The second row group too: a row's index counts from the start of the file.
    path = write(tmp_path, suffix, [GOOD] * 300 + [row, GOOD])
    with pytest.raises(ValueError, match=f"data{suffix} row 300: .*{message}"):
        check_rows(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "row 1: found list \\[1\\]; expected an object"),
        ({"prompt": "Who?"}, "row 1: field 'data_source' is missing; the row has \\['prompt'\\]"),
        (GOOD | {"prompt": "Who?"}, "row 1: field 'prompt' is str 'Who\\?'; expected a non-empty list"),
        (GOOD | {"prompt": ["Who?"]}, "row 1: field 'prompt\\[0\\]' is str 'Who\\?'; expected an object"),
        (GOOD | {"prompt": [{"role": "user"}]}, "row 1: field 'prompt\\[0\\].content' is null"),
        (GOOD | {"prompt": [{"role": ["user"], "content": "a"}]}, "row 1: field 'prompt\\[0\\].role' is list"),
        (GOOD | {"prompt": [{"role": "user", "content": ["a"]}]}, "row 1: field 'prompt\\[0\\].content' is list"),
        (GOOD | {"agent_name": 3}, "row 1: field 'agent_name' is int 3"),
        (GOOD | {"reward_model": "x"}, "row 1: field 'reward_model' is str 'x'; expected an object"),
        (GOOD | {"extra_info": [1]}, "row 1: field 'extra_info' is list \\[1\\]; expected an object"),
    ],
)
def test_malformed_json_row_is_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        check_rows(write(tmp_path, ".jsonl", [GOOD, row]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "a.jsonl: no rows; expected one or more"),
        ("a.jsonl", b"\n", "a.jsonl row 0: expected a JSON object in UTF-8"),
        ("a.jsonl", b'{"a": "\xff"}', "a.jsonl row 0: expected a JSON object in UTF-8"),
        ("a.parquet", b"", "a.parquet: expected a parquet file"),
        ("a.parquet", b"PAR1 but not really PAR1", "a.parquet: expected a parquet file"),
        ("a.csv", b"x", "a.csv: the name ends in '.csv'; expected one of .parquet, .jsonl"),
    ],
)
def test_unreadable_file_is_an_error(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        check_rows(path)


def test_missing_file_column_and_rows_are_errors(tmp_path):
    with pytest.raises(ValueError, match="none.parquet: no such file"):
        check_rows(tmp_path / "none.parquet")
    row = {name: value for name, value in GOOD.items() if name != "agent_name"}
    with pytest.raises(ValueError, match="data.parquet: column 'agent_name' is missing; found \\['data_source'"):
        check_rows(write(tmp_path, ".parquet", [row]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([GOOD]).slice(0, 0), tmp_path / "data.parquet")
    with pytest.raises(ValueError, match="data.parquet: no rows"):
        check_rows(tmp_path / "data.parquet")


REPOSITORY = Path(__file__).parents[2]

MEASURE = """
import resource, sys
from recipes.datasets import check_rows
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
check_rows(sys.argv[1])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_memory_does_not_grow_with_the_file(tmp_path, suffix):
    rows = [GOOD | {"extra_info": {"task": random.Random(n).randbytes(10_000).hex()}} for n in range(8_000)]
    path = write(tmp_path, suffix, rows)
    assert path.stat().st_size > 100e6
    command = [sys.executable, "-c", MEASURE, str(path)]
    measured = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert int(measured.stdout) < path.stat().st_size / 2


def test_command_line_says_what_is_wrong_and_where(tmp_path):
    import subprocess
    import sys
    from pathlib import Path

    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    command = [sys.executable, "-m", "recipes.datasets", str(bad)]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.returncode == 1
    assert f"{bad} row 0" in result.stderr and "Traceback" not in result.stderr
