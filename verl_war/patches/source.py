"""Finding and fingerprinting the source of an upstream object without importing it.

vLLM takes seconds to import and verl pulls in Ray. A guard that must run at the start of every process, and a
``doctor`` that must survive a broken installation, can afford neither: they read the file instead.
"""

import ast
import hashlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any


def split_target(target: str) -> tuple[str, str]:
    """Splits ``package.module:Class.attribute`` into module and qualified name.

    Raises:
        ValueError: ``target`` has another form.
    """
    module, colon, qualname = target.partition(":")
    if not (module and colon and qualname):
        raise ValueError(f"target {target!r} must have the form 'package.module:qualname'")
    return module, qualname


def digest(source: str) -> str:
    """Returns the sha256 of ``source``, blind to line ends and to white space behind the last line."""
    return hashlib.sha256("\n".join(source.splitlines()).rstrip().encode()).hexdigest()


def live_digest(obj: Any) -> str:
    """Returns the digest of the source of an imported function or class.

    Raises:
        TypeError, OSError: ``obj`` has no Python source.
    """
    return digest(inspect.getsource(obj))


def file_digest(target: str) -> str | None:
    """Returns the digest of ``target`` as it stands in the installed files, or None when it is not there.

    Equal to :func:`live_digest` of the imported object, unless somebody replaced that object.
    """
    module, qualname = split_target(target)
    path = module_path(module)
    if path is None:
        return None
    text = path.read_text(encoding="utf-8")
    node = _find(ast.parse(text), qualname.split("."))
    if node is None:
        return None
    first_line = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return digest("\n".join(text.splitlines()[first_line - 1 : node.end_lineno]))


def module_path(module: str) -> Path | None:
    """Returns the file that ``import module`` would run, importing nothing, or None when there is none."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    stem = Path(spec.origin).parent.joinpath(*rest) if rest else Path(spec.origin).parent
    candidates = (stem.with_name(stem.name + ".py"), stem / "__init__.py") if rest else (Path(spec.origin),)
    return next((path for path in candidates if path.is_file()), None)


def _find(tree: ast.AST, names: list[str]) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
    """Descends from ``tree`` to the definition called ``names``, as the interpreter binds it (the last one wins)."""
    node = tree
    for name in names:
        found = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and child.name == name
        ]
        if not found:
            return None
        node = found[-1]
    return node
