"""Datasets: what verl reads, from generated and from own tasks; malformed rows are named and nothing is written."""

import json
import os
import tarfile

import pyarrow
import pyarrow.parquet
import pytest

from recipes.code_agent.diffs import apply_diff
from recipes.code_agent.external_tasks import read_tasks
from recipes.code_agent.prepare_data import main
from recipes.code_agent.sandbox import SandboxLimits
from recipes.code_agent.tasks import SYSTEM_PROMPT, Task
from recipes.code_agent.testing import InProcessTests, SandboxedTests
from recipes.code_agent.workspace import Workspace

FILES = {"pkg/a.py": "def add(a, b):\n    return a - b\n", "README": "text\n"}
PATCH = """diff --git a/pkg/a.py b/pkg/a.py
--- a/pkg/a.py
+++ b/pkg/a.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
TEST_PATCH = """diff --git a/tests/test_a.py b/tests/test_a.py
new file mode 100644
--- /dev/null
+++ b/tests/test_a.py
@@ -0,0 +1,5 @@
+from pkg.a import add
+
+
+def test_add():
+    assert add(1, 2) == 3
"""
ROW = {
    "instance_id": "repo-1",
    "problem_statement": "add(1, 2) should be 3",
    "files": FILES,
    "patch": PATCH,
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": ["tests/test_a.py::test_add"],
    "PASS_TO_PASS": [],
    "image_name": "ignored",
}
RUN_TEST = (
    "PYTHONPATH=tests python3 -c 'import test_a; test_a.test_add()' && echo PASSED tests/test_a.py::test_add "
    "|| echo FAILED tests/test_a.py::test_add"
)


def _row(**changes):
    row = ROW | changes
    return {key: value for key, value in row.items() if value is not ...}


def _write(folder, rows, name="tasks.jsonl"):
    path = folder / name
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _prepare(out, *options):
    return main(["--out", str(out), "--num-train", "3", "--num-val", "2", *map(str, options)])


def _rows(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def test_generated_datasets_hold_what_verl_reads(tmp_path):
    assert main(["--out", str(tmp_path / "data"), "--num-train", "20", "--num-val", "5", "--seed", "7"]) == 0
    train, val = _rows(tmp_path / "data/train.parquet"), _rows(tmp_path / "data/val.parquet")
    assert (len(train), len(val)) == (20, 5)
    for index, row in enumerate(train):
        task = Task.from_json(row["extra_info"]["task"])
        assert row["agent_name"] == row["data_source"] == "code_agent"
        assert row["extra_info"]["index"] == index
        assert row["prompt"] == [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": task.statement},
        ]
        assert row["reward_model"]["ground_truth"].split(" -> ")[1] not in task.statement
    tasks = [Task.from_json(row["extra_info"]["task"]) for row in train + val]
    assert len({json.dumps(task.files) for task in tasks}) == 25


def test_the_same_seed_gives_the_same_files(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert _prepare(tmp_path / name, "--seed", seed) == 0
    assert _rows(tmp_path / "a/train.parquet") == _rows(tmp_path / "b/train.parquet")
    assert _rows(tmp_path / "a/train.parquet") != _rows(tmp_path / "c/train.parquet")


def test_long_packages(tmp_path):
    assert _prepare(tmp_path / "data", "--size", "long") == 0
    row = _rows(tmp_path / "data/train.parquet")[0]
    assert len(row["extra_info"]["task"]) > 160_000 and len(row["prompt"][1]["content"]) < 500


@pytest.mark.parametrize("name", ["tasks.jsonl", "tasks.parquet"])
def test_own_tasks(tmp_path, name):
    rows = [_row(instance_id=f"repo-{number}", files=json.dumps(FILES)) for number in range(6)]
    assert _prepare(tmp_path / "data", "--from", _write(tmp_path, rows, name)) == 0
    written = _rows(tmp_path / "data/train.parquet") + _rows(tmp_path / "data/val.parquet")
    assert len({row["extra_info"]["task"] for row in written}) == 5
    for row in written:
        assert row["reward_model"]["ground_truth"] == PATCH
        task = Task.from_json(row["extra_info"]["task"])
        assert task.files == FILES and "tests/test_a.py" in task.hidden_files
        assert task.test_command == "python -m pytest -q -rA -p no:cacheprovider tests/test_a.py"


def test_own_tasks_are_failed_before_and_solved_after_the_fix(tmp_path):
    with tarfile.open(tmp_path / "repo.tar.gz", "w:gz") as archive:
        for path, text in FILES.items():
            (tmp_path / "repo" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "repo" / path).write_text(text)
        archive.add(tmp_path / "repo", arcname="")
    for snapshot in ("repo.tar.gz", "repo"):
        rows = [_row(files=..., snapshot=snapshot, test_command=RUN_TEST)]
        (external,) = read_tasks(_write(tmp_path, rows))
        with Workspace(external.task, SandboxedTests(SandboxLimits())) as workspace:
            assert "tests" not in workspace.list_files()
            assert workspace.score().passed["tests/test_a.py::test_add"] is False
            workspace.edit_file("pkg/a.py", "a - b", "a + b")
            assert workspace.score().passed["tests/test_a.py::test_add"] is True


def test_the_default_command_runs_pytest_in_the_sandbox(tmp_path):
    (external,) = read_tasks(_write(tmp_path, [_row()]))
    limits = SandboxLimits(wall_s=60, cpu_s=60)
    with Workspace(external.task, SandboxedTests(limits)) as workspace:
        before = workspace.score()
        assert before.passed == {"tests/test_a.py::test_add": False, "*": False}, before.text
        workspace.edit_file("pkg/a.py", "a - b", "a + b")
        after = workspace.score()
        assert after.passed == {"tests/test_a.py::test_add": True, "*": True}, after.text


def test_a_patch_that_breaks_the_snapshot_is_applied(tmp_path):
    correct = FILES | {"pkg/a.py": FILES["pkg/a.py"].replace("-", "+")}
    breaking = PATCH.replace("-    return a - b\n+    return a + b", "-    return a + b\n+    return a - b")
    (external,) = read_tasks(_write(tmp_path, [_row(files=correct, patch=breaking)]), patch_role="bug")
    assert external.task.files == FILES
    with Workspace(external.task, InProcessTests()) as workspace:
        assert workspace.score().passed == {"tests/test_a.py::test_add": False}


MALFORMED = {
    "no id": ({"instance_id": ...}, "field 'instance_id' is None"),
    "empty statement": ({"problem_statement": "  "}, "field 'problem_statement' is '  '"),
    "statement of another type": ({"problem_statement": 5}, "field 'problem_statement' is 5"),
    "statement with the fix": ({"problem_statement": f"Do this:\n{PATCH}"}, "'problem_statement' holds the patch"),
    "no files": ({"files": ...}, "'files' and 'snapshot': 0 of them given"),
    "files twice": ({"snapshot": "x"}, "'files' and 'snapshot': 2 of them given"),
    "empty files": ({"files": {}}, "field 'files' is {}"),
    "files with numbers": ({"files": {"a": 1}}, "field 'files' is"),
    "files with broken JSON": ({"files": "{"}, "field 'files': broken JSON"),
    "missing snapshot": ({"files": ..., "snapshot": "nowhere"}, "snapshot .*nowhere: no such file"),
    "no patch": ({"patch": ""}, "field 'patch' is ''"),
    "patch that is no diff": ({"patch": "fix it"}, "field 'patch': diff: it changes no file"),
    "patch that does not fit": ({"patch": PATCH.replace("a - b", "a * b")}, "hunk 1 does not fit at line 1"),
    "patch of a missing file": ({"patch": PATCH.replace("pkg/a.py", "b.py")}, "there is no file b.py"),
    "test patch cut off": ({"test_patch": TEST_PATCH[:120]}, "field 'test_patch': .*hunk 1 is cut off"),
    "no failing test": ({"FAIL_TO_PASS": []}, "'FAIL_TO_PASS' is empty"),
    "failing tests as text": ({"FAIL_TO_PASS": "tests/test_a.py"}, "'FAIL_TO_PASS': broken JSON"),
    "failing tests missing": ({"FAIL_TO_PASS": ...}, "field 'FAIL_TO_PASS' is None"),
    "passing tests of another type": ({"PASS_TO_PASS": {"a": 1}}, "field 'PASS_TO_PASS' is"),
    "empty command": ({"test_command": " "}, "field 'test_command' is ' '"),
    "no command for the exit status": ({"FAIL_TO_PASS": ["*"]}, "field 'test_command' is missing"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_rows_are_named_and_nothing_is_written(tmp_path, caplog, name):
    changes, message = MALFORMED[name]
    good = [_row(instance_id=f"repo-{number}") for number in range(5)]
    source = _write(tmp_path, [*good, _row(**changes)])
    assert _prepare(tmp_path / "data", "--from", source) == 1
    assert f"{source}: row 5: " in caplog.text
    with pytest.raises(ValueError, match=message):
        list(read_tasks(source))
    assert sorted(os.listdir(tmp_path)) == ["tasks.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tasks.jsonl", b"", "no rows"),
        ("tasks.jsonl", b"{}\n{broken\n", "row 0: field"),
        ("tasks.jsonl", b"[]\n", "row 0: expected an object, got list"),
        ("tasks.jsonl", b"{broken\n", "row 0: expected a JSON object"),
        ("tasks.jsonl", b"\xff\n", "row 0: expected a JSON object"),
        ("tasks.parquet", b"no parquet", "expected a parquet file"),
        ("tasks.csv", b"x", "ends in .parquet or .jsonl"),
        ("missing.jsonl", None, "no such file"),
    ],
)
def test_unreadable_sources(tmp_path, caplog, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert _prepare(tmp_path / "data", "--from", tmp_path / name) == 1
    assert message in caplog.text
    assert not (tmp_path / "data").exists()


def test_names_must_differ_and_rows_suffice(tmp_path, caplog):
    assert _prepare(tmp_path / "data", "--from", _write(tmp_path, [_row()] * 5)) == 1
    assert "row 1: instance_id 'repo-1' is also that of row 0" in caplog.text
    assert _prepare(tmp_path / "data", "--from", _write(tmp_path, [_row()])) == 1
    assert "1 rows, but num_train + num_val is 5" in caplog.text


def test_a_failing_run_keeps_the_earlier_data(tmp_path):
    assert _prepare(tmp_path / "data") == 0
    before = _rows(tmp_path / "data/train.parquet")
    assert _prepare(tmp_path / "data", "--from", tmp_path / "missing.jsonl") == 1
    assert _rows(tmp_path / "data/train.parquet") == before


def test_counts_must_be_positive(tmp_path, caplog):
    assert main(["--out", str(tmp_path / "data"), "--num-train", "0", "--num-val", "2"]) == 1
    assert "num_train is 0; expected 1 or more" in caplog.text


# --- diffs ------------------------------------------------------------------------------------------------------------

OLD = "".join(f"line {number}\n" for number in range(1, 21))


def test_diffs_of_several_hunks_and_files():
    diff = """--- a/x\t2024-01-01
+++ b/x\t2024-01-02
@@ -1,3 +1,3 @@
-line 1
+first
 line 2
 line 3
@@ -18,3 +18,4 @@
 line 18
 line 19
-line 20
+line 20
+last
\\ No newline at end of file
diff --git a/gone b/gone
deleted file mode 100644
--- a/gone
+++ /dev/null
@@ -1 +0,0 @@
-bye
diff --git a/old name b/new name
similarity index 100%
rename from old name
rename to new name
diff --git a/empty b/empty
new file mode 100644
"""
    files = {"x": OLD, "gone": "bye\n", "old name": "same\n"}
    changed = apply_diff(diff, files.get)
    new = OLD.replace("line 1\n", "first\n", 1) + "last"
    assert changed == {"x": new, "gone": None, "old name": None, "new name": "same\n", "empty": ""}
    back = apply_diff(diff, changed.get, reverse=True)
    assert back == {**files, "new name": None, "empty": None}


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        ("", "it changes no file"),
        ("@@ -1 +1 @@\n-a\n+b\n", "comes before any file name"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-other\n+b\n", "hunk 1 does not fit at line 1"),
        ("--- a/x\n+++ b/x\n@@ -30 +30 @@\n-line 20\n+b\n", "hunk 1 does not fit at line 30"),
        ("--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-line 1\n", "cut off or malformed"),
        ("diff --git a/x b/x\nBinary files a/x and b/x differ\n", "is binary"),
        ("--- a/y\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n", "there is no file y"),
    ],
)
def test_diffs_that_do_not_fit(diff, message):
    with pytest.raises(ValueError, match=message):
        apply_diff(diff, {"x": OLD}.get)
