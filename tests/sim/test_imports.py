"""The simulator needs the core and the standard library; only its command draws and shows progress."""

import sys
from pathlib import Path

import pytest

from tests.test_layout import imported_modules

SIM = Path(__file__).parents[2] / "verl_war" / "sim"
OUTSIDE = {"command.py": {"tqdm", "verl_war.version"}, "plots.py": {"matplotlib"}}


@pytest.mark.parametrize("path", sorted(SIM.rglob("*.py")), ids=lambda path: path.name)
def test_imports(path):
    for name in imported_modules(path):
        top = name.split(".")[0]
        allowed = OUTSIDE.get(path.name, set())
        inside = name.startswith(("verl_war.sim", "verl_war.core"))
        assert inside or top in sys.stdlib_module_names or {name, top} & allowed, f"{path} imports {name}"
