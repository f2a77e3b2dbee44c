"""The rules of the tree: who may import whom, and how long things may get."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UPSTREAM = {"ray", "verl", "vllm", "torch", "hydra", "omegaconf", "numpy", "wrapt"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
PACKAGE_FILES = sorted((ROOT / "verl_war").rglob("*.py"))
RECIPE_FILES = sorted((ROOT / "recipes").rglob("*.py")) + sorted((ROOT / "scripts").rglob("*.py"))

ALLOWED = {
    "core": {"core"},
    "patches": {"patches", "core", "support", "integration"},
    "integration": {"integration", "core", "history", "patches", "support", "version"},
    "history": {"history", "core"},
    "sim": {"sim", "core", "version"},
    "replay": {"replay", "core"},
    "report": {"report", "replay", "compare", "core", "version"},
}
"""Part of the package -> parts that it may import."""


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module


def test_core_loads_nothing_but_the_standard_library():
    code = (
        "import pkgutil, importlib, sys, verl_war.core\n"
        "for m in pkgutil.walk_packages(verl_war.core.__path__, 'verl_war.core.'): importlib.import_module(m.name)\n"
        "print(' '.join(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    third_party = loaded - set(sys.stdlib_module_names) - {"verl_war", "__main__", "sitecustomize"}
    # Import machinery of editable installs and of the virtual environment itself.
    third_party = {name for name in third_party if not name.startswith(("_", "distutils"))}
    assert not third_party & UPSTREAM
    assert third_party == set()


def test_core_has_no_clock_no_io_and_no_randomness_of_its_own():
    banned = {"time", "datetime", "os", "io", "socket", "threading", "asyncio", "subprocess", "pathlib"}
    for path in sorted((ROOT / "verl_war" / "core").glob("*.py")):
        assert not banned & {name.split(".")[0] for name in imported_modules(path)}, path


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_parts_import_only_what_they_may(path):
    part = path.relative_to(ROOT / "verl_war").parts[0]
    for name in imported_modules(path):
        top, *rest = name.split(".")
        assert top not in {"recipes", "scripts", "tests"}, name
        if top == "verl_war" and rest and part in ALLOWED:
            assert rest[0] in ALLOWED[part], f"{path} imports {name}"


@pytest.mark.parametrize("path", PACKAGE_FILES + RECIPE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short(path):
    source = path.read_text()
    assert source.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, node.name


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_upstream_names_are_assigned_only_in_patches(path):
    if "patches" in path.parts:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            root = target
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(target, ast.Attribute) and isinstance(root, ast.Name):
                assert root.id not in {"verl", "vllm", "torch", "ray"}, f"{path}:{node.lineno}"
