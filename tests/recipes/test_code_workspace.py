"""Workspaces: nothing outside can be named, everything is bounded, nothing stays."""

import os
import resource
import subprocess
import sys
import threading
import time

import pytest

from recipes.code_agent.actions import perform
from recipes.code_agent.generate import generate
from recipes.code_agent.sandbox import SandboxLimits
from recipes.code_agent.tasks import Task
from recipes.code_agent.testing import InProcessTests, SandboxedTests, parse_statuses
from recipes.code_agent.workspace import ToolInputError, Workspace, WorkspaceLimits

FILES = {"pkg/a.py": "x = 1\ny = 2\nx = 1\n", "tests/test_a.py": "def test_a():\n    assert 1 == 1\n"}


def _task(**changes):
    fields = {
        "task_id": "t",
        "statement": "s",
        "files": FILES,
        "test_files": ("tests/test_a.py",),
        "fail_to_pass": ("tests/test_a.py::test_a",),
    }
    return Task(**(fields | changes))


@pytest.fixture
def workspace():
    with Workspace(_task(), InProcessTests()) as opened:
        yield opened


@pytest.mark.parametrize(
    "path",
    ["../secret", "/etc/passwd", "pkg/../../secret", "", "a\0b", "x" * 5000, "link/secret", "filelink", "pkg/../.."],
)
def test_paths_outside_are_refused(workspace, path, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (workspace.root / "link").symlink_to(tmp_path)
    (workspace.root / "filelink").symlink_to(tmp_path / "secret")
    for call in (
        lambda: workspace.read_file(path),
        lambda: workspace.list_files(path),
        lambda: workspace.edit_file(path, "secret", "stolen"),
        lambda: workspace.edit_file(path, "", "new"),
    ):
        with pytest.raises(ToolInputError):
            call()
    assert (tmp_path / "secret").read_text() == "secret"
    assert os.listdir(tmp_path) == ["secret"]


@pytest.mark.parametrize(
    ("tool", "arguments", "reply"),
    [
        ("list_files", {}, "pkg/a.py\ntests/test_a.py"),
        ("list_files", {"path": "pkg"}, "pkg/a.py"),
        ("list_files", {"path": "pkg/a.py"}, "Error: pkg/a.py is no directory"),
        ("read_file", {"path": "pkg/a.py"}, FILES["pkg/a.py"]),
        ("read_file", {"path": "./pkg//a.py"}, FILES["pkg/a.py"]),
        ("read_file", {"path": "pkg/a.py", "start": 3}, "x = 1\n"),
        ("read_file", {"path": "pkg/a.py", "start": 4}, "Error: start must be 1 to 3"),
        ("read_file", {"path": "pkg"}, "Error: no file pkg"),
        ("read_file", {"path": "pkg/b.py"}, "Error: no file pkg/b.py"),
        ("read_file", {}, "Error: read_file needs path"),
        ("read_file", {"path": 5}, "Error: path must be a string"),
        ("read_file", {"path": None}, "Error: path must be a string"),
        ("read_file", {"path": "pkg/a.py", "start": True}, "Error: start must be an integer"),
        ("read_file", {"path": "pkg/a.py", "colour": 1}, "Error: read_file has no argument 'colour'"),
        ("read_file", ["pkg/a.py"], "Error: arguments of read_file must be an object"),
        ("read_file", None, "Error: arguments of read_file must be an object"),
        ("edit_file", {"path": "pkg/a.py", "search": "y = 2", "replace": "y = 3"}, "edited pkg/a.py"),
        ("edit_file", {"path": "pkg/a.py", "search": "z", "replace": ""}, "Error: search text not found in pkg/a.py"),
        (
            "edit_file",
            {"path": "pkg/a.py", "search": "x = 1", "replace": ""},
            "Error: search text found 2 times in pkg/a.py",
        ),
        ("edit_file", {"path": "pkg/a.py", "search": "y", "replace": "y"}, "Error: search and replace are equal"),
        ("edit_file", {"path": "pkg/a.py", "search": "", "replace": "y"}, "Error: search is empty"),
        ("edit_file", {"path": "pkg/new.py", "search": "", "replace": "z = 1\n"}, "edited pkg/new.py"),
        ("edit_file", {"path": "pkg/a.py/b.py", "search": "", "replace": ""}, "Error: b.py: "),
        (
            "edit_file",
            {"path": "tests/test_a.py", "search": "1 == 1", "replace": "True"},
            "Error: tests/test_a.py is read-only",
        ),
        ("edit_file", {"path": "conftest.py", "search": "", "replace": "x"}, "Error: conftest.py is read-only"),
        ("edit_file", {"path": "pkg/a.py", "search": "y"}, "Error: edit_file needs replace"),
        (
            "edit_file",
            {"path": "pkg/a.py", "search": "y", "replace": "\ud800"},
            "Error: replace holds characters that are no text",
        ),
        ("run_tests", {}, "1 passed"),
        ("run_tests", {"path": "x"}, "Error: run_tests has no argument 'path'"),
    ],
)
def test_what_the_agent_is_told(workspace, tool, arguments, reply):
    told = perform(workspace, tool, arguments)
    assert told == reply if not reply.endswith(": ") else told.startswith(reply)
    assert workspace.counts["errors"] == reply.startswith("Error")


def test_edits_change_the_file_and_nothing_else(workspace):
    workspace.edit_file("pkg/a.py", "y = 2", "y = 3")
    assert workspace.read_file("pkg/a.py") == "x = 1\ny = 3\nx = 1\n"
    assert workspace.read_file("tests/test_a.py") == FILES["tests/test_a.py"]
    assert workspace.counts["edits"] == 1


def test_line_ends_stay_as_they_are():
    with Workspace(_task(files={"a.py": "x = 1\r\ny = 2\r\n"}), InProcessTests()) as workspace:
        workspace.edit_file("a.py", "y = 2", "y = 3")
        assert (workspace.root / "a.py").read_bytes() == b"x = 1\r\ny = 3\r\n"


def test_binary_files_are_no_text(workspace):
    (workspace.root / "data.bin").write_bytes(b"\xff\xfe\x00")
    assert perform(workspace, "read_file", {"path": "data.bin"}) == "Error: data.bin is not a text file"


def test_outputs_are_bounded():
    limits = WorkspaceLimits(max_output_chars=200, max_list_entries=3)
    files = {f"pkg/{number}.py": "line\n" * 1000 for number in range(10)} | {"long.py": "x" * 10_000}
    with Workspace(_task(files=files), InProcessTests(), limits) as workspace:
        assert workspace.list_files() == "long.py\npkg/0.py\npkg/1.py\n[8 more; name a directory]"
        first = workspace.read_file("pkg/0.py")
        assert first == "line\n" * 40 + "[continues at line 41 of 1000]"
        assert workspace.read_file("pkg/0.py", 41).endswith("[continues at line 81 of 1000]")
        assert len(workspace.read_file("long.py")) < 300


def test_edits_are_bounded():
    limits = WorkspaceLimits(max_file_bytes=1000, max_edited_bytes=2500)
    with Workspace(_task(), InProcessTests(), limits) as workspace:
        arguments = {"path": "big.py", "search": "", "replace": "x" * 1001}
        assert perform(workspace, "edit_file", arguments) == "Error: the edit is too large"
        replies = [
            perform(workspace, "edit_file", {"path": f"{number}.py", "search": "", "replace": "x" * 900})
            for number in range(3)
        ]
        assert replies == ["edited 0.py", "Error: the edit is too large", "Error: the edit is too large"]
        (workspace.root / "huge.py").write_text("x" * 1001)
        assert "larger than 1000 bytes" in perform(workspace, "read_file", {"path": "huge.py"})


def test_scoring_restores_the_tests_and_adds_the_hidden_ones():
    hidden = {"tests/test_hidden.py": "def test_h():\n    assert 1 == 1\n"}
    task = _task(hidden_files=hidden, test_files=("tests/test_a.py", "tests/test_hidden.py"))
    with Workspace(task, InProcessTests()) as workspace:
        assert "test_hidden" not in workspace.list_files()
        (workspace.root / "tests/test_a.py").write_text("def test_other(): pass")
        passed = workspace.score().passed
        assert passed == {"tests/test_a.py::test_a": True, "tests/test_hidden.py::test_h": True}


def test_closing_removes_everything_and_ends_the_use(workspace):
    os.mkdir(workspace.root / "deep")
    os.chmod(workspace.root / "deep", 0)
    workspace.close()
    workspace.close()
    assert not workspace.root.exists()
    assert perform(workspace, "read_file", {"path": "pkg/a.py"}) == "Error: the workspace is closed"
    assert not workspace.root.exists()


def test_closing_ends_tests_that_run():
    files = {"tests/test_a.py": "import time\n\n\ndef test_a():\n    pass\n\n\ntime.sleep(0.9)\n" * 60}
    workspace = Workspace(_task(files=files), SandboxedTests(SandboxLimits(wall_s=50)))
    thread = threading.Thread(target=perform, args=(workspace, "run_tests", {}))
    thread.start()
    time.sleep(0.3)
    start_s = time.monotonic()
    workspace.close()
    thread.join()
    assert time.monotonic() - start_s < 20
    assert not workspace.root.exists()


# --- tests of a task --------------------------------------------------------------------------------------------------


def test_sandbox_and_process_give_the_same_output():
    for seed in range(6):
        generated = generate(seed)
        bug = generated.bug
        tries = [None, bug.line, *bug.wrong_fixes[:2], "return (", "return undefined_name", "raise SystemExit(0)"]
        with (
            Workspace(generated.task, InProcessTests()) as here,
            Workspace(generated.task, SandboxedTests(SandboxLimits())) as there,
        ):
            replaced = bug.broken
            for fix in tries[: 2 + seed]:
                if fix is not None:
                    edit = {"path": bug.path, "search": replaced, "replace": fix}
                    reply = perform(here, "edit_file", edit)
                    assert reply == perform(there, "edit_file", edit)
                    replaced = replaced if reply.startswith("Error") else fix
                assert here.run_tests() == there.run_tests()
                assert here.score() == there.score()


@pytest.mark.parametrize(
    ("body", "sign"),
    [
        ("while True: pass", "TimeoutError: took more than 1 s"),
        ("import os; os._exit(0)", "tests ended early with exit code 0"),
        ("import os; os.kill(os.getpid(), 9)", "tests ended early with exit code -9"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("print('x' * 10**7); assert 1 == 2", "1 is 1, expected 2"),
        ("import socket; socket.socket()", "PermissionError"),
        ("open('pkg/a.py', 'w')", "PermissionError"),
        ("assert 'y' * 10**6 == 1", "..., expected 1"),
        ("x = [0] * 10**10", "MemoryError"),
    ],
)
def test_misbehaving_tests(body, sign):
    files = {"pkg/a.py": "", "tests/test_a.py": f"def test_a():\n    {body}\n"}
    with Workspace(_task(files=files), SandboxedTests(SandboxLimits())) as workspace:
        assert sign in workspace.run_tests()
        assert workspace.score().num_passed(workspace.task.fail_to_pass) == 0


def children_cpu_s():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_a_test_run_starts_no_interpreter_with_pytest():
    before_s = children_cpu_s()
    for _ in range(5):
        subprocess.run([sys.executable, "-c", "import pytest"], check=True)
    fresh_s, before_s = children_cpu_s() - before_s, children_cpu_s()
    with Workspace(generate(0).task, SandboxedTests(SandboxLimits())) as workspace:
        for _ in range(5):
            workspace.run_tests()
    # Processor time of both, on the same machine at the same time: a fresh interpreter alone would take as much.
    assert children_cpu_s() - before_s < fresh_s


COMMAND = "echo 'PASSED tests/test_a.py::test_a' && echo x > written && ls && exit {status}"


@pytest.mark.parametrize(("status", "expected"), [(0, True), (3, False)])
def test_tasks_with_a_command_run_in_a_copy(status, expected):
    task = _task(test_command=COMMAND.format(status=status), fail_to_pass=("tests/test_a.py::test_a", "*"))
    with Workspace(task, SandboxedTests(SandboxLimits())) as workspace:
        outcome = workspace.score()
        assert outcome.passed == {"tests/test_a.py::test_a": True, "*": expected}
        assert "written" in outcome.text
        assert workspace.list_files() == "pkg/a.py\ntests/test_a.py"


def test_a_command_that_hangs_is_ended():
    task = _task(test_command="echo started; sleep 60")
    with Workspace(task, SandboxedTests(SandboxLimits(wall_s=0.5))) as workspace:
        assert workspace.run_tests() == "started\n\ntests ended: wall time limit exceeded"


def test_status_lines_of_pytest():
    output = """
tests/a.py::test_one PASSED                      [ 50%]
tests/a.py::test_two[x y] FAILED                 [100%]
PASSED tests/b.py::test_three
FAILED tests/b.py::test_four[a - b] - assert 1 == 2
ERROR tests/b.py::test_five - ValueError
SKIPPED [1] tests/b.py:3: no
XFAIL tests/b.py::test_six - known
PASSED tests/b.py::test_eight[a - b]
PASSED tests/c.py::test_seven
FAILED tests/c.py::test_seven - teardown
"""
    assert parse_statuses(output) == {
        "tests/a.py::test_one": True,
        "tests/a.py::test_two[x y]": False,
        "tests/b.py::test_three": True,
        "tests/b.py::test_four[a": False,
        "tests/b.py::test_five": False,
        "tests/b.py::test_six": True,
        "tests/b.py::test_eight[a - b]": True,
        "tests/c.py::test_seven": False,
    }
