"""A small upstream package to patch, and processes in which the installation looks different."""

import contextlib
import importlib
import os
import subprocess
import sys

import pytest

from verl_war.patches import source
from verl_war.patches.registry import Patch
from verl_war.support import UpstreamMismatchError

MODULE = '''
"""An upstream module."""
import functools


def logged(function):
    return functools.wraps(function)(lambda *args: function(*args))


def double(x):
    return 2 * x


@functools.lru_cache(maxsize=None)
def cached(x):
    return x


class Engine:
    @staticmethod
    def speed():
        return 1

    def name(self):
        return "engine"
'''
COPY = "from upstream_pkg.maths import double as twice\n"


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """Installs the distribution ``upstream-pkg`` 1.0 for one test; nothing of it is imported yet."""
    package = tmp_path / "site" / "upstream_pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "maths.py").write_text(MODULE)
    (package / "copy.py").write_text(COPY)
    info = tmp_path / "site" / "upstream_pkg-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: upstream-pkg\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield lambda name: importlib.import_module(f"upstream_pkg.{name}")
    with contextlib.suppress(UpstreamMismatchError):  # import hooks that still wait must not meet the next test
        importlib.import_module("upstream_pkg.maths")
    for name in [name for name in sys.modules if name.partition(".")[0] == "upstream_pkg"]:
        del sys.modules[name]


@pytest.fixture
def make_patch(upstream):
    """Makes a patch of the small package that fits, except for what is overridden."""

    def make(name="triple", target="upstream_pkg.maths:double", replacement=lambda x: 3 * x, **overrides):
        values = {
            "sources": {"upstream-pkg==1.0": source.file_digest(target)},
            "make": lambda original: replacement,
            "reason": "tests",
            "link": "tests",
            "remove_when": "never",
        }
        return Patch(name=name, target=target, **{**values, **overrides})

    return make


@pytest.fixture
def run_python(tmp_path):
    """Runs code in a new process, after ``fault`` was executed at its start-up."""

    def run(code, fault="", **env):
        place = tmp_path / "fault"
        place.mkdir(exist_ok=True)
        (place / "sitecustomize.py").write_text(fault)
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("VERL_", "VLLM_"))}
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**clean, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1", **env},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
