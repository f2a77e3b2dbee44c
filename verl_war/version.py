"""The package's version, in the one place that states it, and the commit of a clone."""

import subprocess
from pathlib import Path

__version__ = "0.1.0"


def clone_version(repo: Path) -> str:
    """Version of this package and, where `repo` is a git clone, its commit."""
    return " ".join(filter(None, [__version__, _git_commit(repo)]))


def package_version() -> str:
    """Version of this package and, where it runs from a clone, the clone's commit."""
    repo = Path(__file__).resolve().parents[1]
    # An installed package may lie in a directory of somebody else's clone, whose commit says nothing.
    return clone_version(repo) if (repo / "setup.py").exists() else __version__


def _git_commit(repo: Path) -> str | None:
    """Short name of the clone's commit, marked when the tree has changes; None outside of git."""
    command = ["git", "-C", str(repo), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
