"""Snapshots of repositories and scratch directories: nothing is written outside, nothing stays behind."""

import os
import stat
import tarfile
import tempfile
import zipfile

import pytest

from recipes.code_agent import scratch, snapshots
from recipes.code_agent.tasks import Task
from recipes.code_agent.testing import InProcessTests
from recipes.code_agent.workspace import Workspace

FILES = {"pkg/a.py": "x = 1\n", "tests/test_a.py": "def test_a():\n    assert 1 == 1\n"}


def _task(snapshot, files=None):
    return Task(
        task_id="t",
        statement="s",
        files=files or {},
        snapshot=str(snapshot),
        test_files=("tests/test_a.py",),
        fail_to_pass=("tests/test_a.py::test_a",),
    )


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repo"
    snapshots.write_files(root, FILES | {"bin/tool": "#!/bin/sh\n", ".git/config": "secret"})
    (root / "bin/tool").chmod(0o700)
    (root / "link.py").symlink_to("pkg/a.py")
    return root


def _tar(repository, place, mode):
    with tarfile.open(place, mode) as archive:
        archive.add(repository, arcname=".")
    return place


def _zip(repository, place):
    with zipfile.ZipFile(place, "w") as archive:
        for path in repository.rglob("*"):
            if path.is_file() and not path.is_symlink():
                archive.write(path, path.relative_to(repository))
    return place


def test_snapshots_are_unpacked(repository, tmp_path):
    kinds = [
        repository,
        _tar(repository, tmp_path / "r.tar", "w"),
        _tar(repository, tmp_path / "r.tar.gz", "w:gz"),
        _zip(repository, tmp_path / "r.zip"),
    ]
    for snapshot in kinds:
        with Workspace(_task(snapshot), InProcessTests()) as workspace:
            listed = workspace.list_files().split("\n")
            assert [name for name in listed if name != "link.py"] == ["bin/tool", "pkg/a.py", "tests/test_a.py"]
            assert workspace.read_file("pkg/a.py") == FILES["pkg/a.py"]
            if "link.py" in listed:
                assert workspace.read_file("link.py") == FILES["pkg/a.py"]
            assert stat.S_IMODE(os.stat(workspace.root / "bin/tool").st_mode) == 0o755
            assert not (workspace.root / ".git").exists()
            assert workspace.run_tests() == "1 passed"
        assert snapshots.read_text(snapshot, "pkg/a.py") == FILES["pkg/a.py"]
        assert snapshots.read_text(snapshot, "pkg/b.py") is None


def test_files_are_written_over_a_snapshot(repository):
    task = _task(repository, {"pkg/a.py": "broken = True\n"})
    with Workspace(task, InProcessTests()) as workspace:
        assert workspace.read_file("pkg/a.py") == "broken = True\n"


def _member(name, kind=tarfile.REGTYPE, link=""):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([_member("../escape")], "without '..'"),
        ([_member("/tmp/escape")], "relative to the repository"),
        ([_member("a", tarfile.SYMTYPE, "/etc")], "outside of the repository"),
        ([_member("a", tarfile.SYMTYPE, "../..")], "outside of the repository"),
        ([_member("a", tarfile.SYMTYPE, "c/b/.."), _member("c/b", tarfile.SYMTYPE, ".."), _member("a/x")], "outside"),
        ([_member("device", tarfile.CHRTYPE)], "neither a file, a directory nor a link"),
        ([_member("a", tarfile.LNKTYPE, "/etc/passwd")], "neither a file, a directory nor a link"),
    ],
)
def test_archives_that_reach_outside_are_refused(tmp_path, members, message):
    place = tmp_path / "evil.tar"
    with tarfile.open(place, "w") as archive:
        for member in members:
            archive.addfile(member)
    before = set(os.listdir(tempfile.gettempdir()))
    with pytest.raises(ValueError, match=message):
        Workspace(_task(place), InProcessTests())
    assert "escape" not in set(os.listdir(tempfile.gettempdir())) - before


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("missing", None, "no such file or directory"),
        ("text.txt", b"x", "expected a directory, .tar"),
        ("broken.tar.gz", b"no archive", "can't be read"),
        ("broken.zip", b"no archive", "can't be read"),
    ],
)
def test_unreadable_snapshots_are_refused(tmp_path, name, data, message):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        Workspace(_task(tmp_path / name), InProcessTests())


def test_huge_snapshots_are_refused(repository, monkeypatch):
    monkeypatch.setattr(snapshots, "MAX_SNAPSHOT_BYTES", 10)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        Workspace(_task(repository), InProcessTests())


# --- scratch directories ----------------------------------------------------------------------------------------------


def test_directories_of_dead_processes_are_swept(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = scratch.new_directory("mine")
    child = os.fork()
    if child == 0:
        (scratch.new_directory("lost") / "file").write_text("x")
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    base = scratch.base_directory()
    assert len(list(base.glob("*/lost-*/file"))) == 1
    assert scratch.sweep(base) == 1
    assert list(base.glob("*/lost-*")) == [] and mine.exists()
    assert len(list(base.glob("*.lock"))) == 1


def test_a_foreign_base_directory_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scratch.base_directory().symlink_to(tmp_path)
    with pytest.raises(RuntimeError, match="remove it or set TMPDIR"):
        scratch.new_directory("x")


def test_links_are_removed_not_followed(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").write_text("x")
    (tmp_path / "tree/sub").mkdir(parents=True)
    (tmp_path / "tree/sub/link").symlink_to(tmp_path / "kept")
    scratch.remove_tree(tmp_path / "tree")
    assert (tmp_path / "kept/file").exists() and not (tmp_path / "tree").exists()
