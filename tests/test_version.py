"""Results say of which commit they are."""

import shutil
import subprocess

from verl_war import version
from verl_war.version import __version__, clone_version, package_version


def git(repo, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", str(repo), *identity, *words], check=True, capture_output=True)


def test_a_clone_is_named_by_its_commit_and_by_its_changes(tmp_path):
    assert clone_version(tmp_path) == __version__
    git(tmp_path, "init")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    number, commit = clone_version(tmp_path).split()
    assert number == __version__ and len(commit) == 10 and set(commit) <= set("0123456789abcdef")
    (tmp_path / "file").write_text("two")
    assert clone_version(tmp_path) == f"{__version__} {commit}-dirty"


def test_an_installed_package_does_not_take_the_commit_of_what_it_lies_in(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "verl_war"
    package.mkdir(parents=True)
    shutil.copy(version.__file__, package)
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    monkeypatch.setattr(version, "__file__", str(package / "version.py"))
    assert package_version() == __version__
    (package.parent / "setup.py").touch()
    assert package_version().startswith(f"{__version__} ")
