"""The history needs nothing but the standard library, numpy and the core."""

import subprocess
import sys


def test_history_loads_only_numpy():
    code = (
        "import pkgutil, importlib, sys, verl_war.history\n"
        "for module in pkgutil.iter_modules(verl_war.history.__path__, 'verl_war.history.'):\n"
        "    importlib.import_module(module.name)\n"
        "print(' '.join(sorted(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    tops = {name.split(".")[0] for name in loaded} - set(sys.stdlib_module_names) - {"__main__", "sitecustomize"}
    assert {name for name in tops if not name.startswith(("_", "distutils"))} <= {"numpy", "verl_war"}
    parts = {name.split(".")[1] for name in loaded if name.startswith("verl_war.")}
    assert parts <= {"core", "history", "version"}
