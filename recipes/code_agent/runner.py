"""The small test runner of generated tasks; pytest takes longer to start than these tests take to run.

It runs every ``test_*`` function of the given files and prints one line for each failure and a summary::

    FAIL tests/test_price.py::test_add_tax: add_tax(10, 2) is 8, expected 12
    1 failed, 3 passed

The file is self-contained, and imports nothing that is slow to load, because its *text* is what a sandboxed
interpreter gets (``python -I -S -B -c TEXT``). Then stdin holds a secret word and the test files, one per line; after
the printed lines stdout has the secret word and one ``id<TAB>passed|failed`` line per test. A test that never
reported counts as failed, so code that ends the process early gains nothing.

This module is imported only by the process that starts the runner; :func:`run_tests` is the same code in both.
"""

import builtins
import os
import signal
import sys

TEST_TIMEOUT_S = 1
"""A test of a generated package takes well under a millisecond; this ends endless loops early."""
_MAX_VALUE_CHARS = 80
_AST_ONLY = 0x400
"""``ast.PyCF_ONLY_AST``; importing ``ast`` would double the start-up time."""


class _Mismatch(AssertionError):
    """Both sides of an ``assert left == right`` that failed."""


def _short(value):
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + "..."


def _check_equal(left, right, source):
    if not left == right:
        raise _Mismatch(f"{source} is {_short(left)}, expected {_short(right)}")


def _explain_asserts(tree, source):
    """Turn each ``assert left == right`` into a call that reports both sides, evaluated once."""
    import _ast

    lines = source.splitlines()
    for function in tree.body:
        if not isinstance(function, _ast.FunctionDef):
            continue
        for index, node in enumerate(function.body):
            test = getattr(node, "test", None) if isinstance(node, _ast.Assert) else None
            if not isinstance(test, _ast.Compare) or not isinstance(test.ops[0], _ast.Eq) or len(test.ops) > 1:
                continue
            left, place = test.left, _place_of(node)
            text = lines[left.lineno - 1][left.col_offset : left.end_col_offset]
            name = _ast.Name(id="_check_equal", ctx=_ast.Load(), **place)
            arguments = [left, test.comparators[0], _ast.Constant(value=text, kind=None, **place)]
            call = _ast.Call(func=name, args=arguments, keywords=[], **place)
            function.body[index] = _ast.Expr(value=call, **place)


def _place_of(node):
    return {name: getattr(node, name) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")}


def _load(root, path):
    """Execute one test file and return its namespace."""
    with open(os.path.join(root, path), encoding="utf-8") as file:
        source = file.read()
    tree = builtins.compile(source, path, "exec", _AST_ONLY)
    _explain_asserts(tree, source)
    namespace = {"__name__": path[:-3].replace("/", "."), "__file__": path, "_check_equal": _check_equal}
    exec(builtins.compile(tree, path, "exec"), namespace)
    return namespace


def _place_of_error(error, root):
    """``path:line`` of the innermost frame inside the package, or an empty text."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(root + os.sep):
            place = f" at {os.path.relpath(file, root)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _describe(error, root):
    if isinstance(error, _Mismatch):
        return str(error)
    if isinstance(error, SyntaxError):
        file = os.path.relpath(error.filename, root) if error.filename else "?"
        return f"SyntaxError at {file}:{error.lineno}: {error.msg}"
    text = str(error)[:_MAX_VALUE_CHARS]
    return f"{type(error).__name__}: {text}{_place_of_error(error, root)}"


def _on_alarm(_signum, _frame):
    raise TimeoutError(f"took more than {TEST_TIMEOUT_S} s")


def _run_one(function, root):
    """Return None when the test passes, otherwise the reason in one line."""
    signal.setitimer(signal.ITIMER_REAL, TEST_TIMEOUT_S)
    try:
        function()
    except (Exception, SystemExit) as error:
        return _describe(error, root)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def _run_file(root, path):
    """Return ``(test id, reason or None)`` pairs of one file."""
    signal.setitimer(signal.ITIMER_REAL, TEST_TIMEOUT_S)
    try:
        namespace = _load(root, path)
    except (Exception, SystemExit) as error:
        return [(path, _describe(error, root))]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    tests = [(name, value) for name, value in namespace.items() if name.startswith("test_") and callable(value)]
    return [(f"{path}::{name}", _run_one(function, root)) for name, function in tests]


def _remember_imports(root):
    """Make ``root`` importable; return the function that undoes this and all imports since.

    No bytecode is written: an edit within the same second that keeps the size would otherwise go unnoticed.
    """
    modules, path, no_bytecode = set(sys.modules), list(sys.path), sys.dont_write_bytecode
    sys.path.insert(0, root)
    sys.dont_write_bytecode = True

    def forget():
        sys.dont_write_bytecode = no_bytecode
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            del sys.modules[name]
        for place in [place for place in sys.path_importer_cache if place.startswith(root)]:
            del sys.path_importer_cache[place]

    return forget


def run_tests(root, test_files):
    """Run the tests of a package and forget the modules that they imported.

    Args:
        root: absolute path of the directory that holds the package and the tests.
        test_files: paths relative to ``root``.

    Returns:
        ``(text, passed)``: the lines to show, and for each test id whether it passed. A file that can't be imported
        has its path in place of the ids.

    Must be called in the main thread: an alarm ends tests that hang.
    """
    forget = _remember_imports(root)
    previous = signal.signal(signal.SIGALRM, _on_alarm)
    try:
        results = [result for path in test_files for result in _run_file(root, path)]
    finally:
        signal.signal(signal.SIGALRM, previous)
        forget()
    failures = [f"FAIL {test_id}: {reason}" for test_id, reason in results if reason is not None]
    num_passed = len(results) - len(failures)
    summary = f"{len(failures)} failed, {num_passed} passed" if failures else f"{num_passed} passed"
    return "\n".join([*failures, summary]), {test_id: reason is None for test_id, reason in results}


def _main():
    secret, *test_files = sys.stdin.read().splitlines()
    out, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    text, passed = run_tests(os.getcwd(), test_files)
    report = "".join(f"{test_id}\t{'passed' if ok else 'failed'}\n" for test_id, ok in passed.items())
    with os.fdopen(out, "w", encoding="utf-8", errors="replace") as file:
        file.write(f"{text}\n{secret}\n{report}")


if __name__ == "__main__":
    _main()
