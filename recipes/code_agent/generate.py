"""Generated code-repair tasks: a small Python package with one seeded bug, and tests that fail because of it.

Everything follows from the seed. A bug is kept only when it makes a test fail, and it is always undone by one line.
Sizes reach from a few hundred characters (``demo``, for models of a few million parameters) to packages whose files
fill tens of thousands of tokens (``long``).
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from recipes.code_agent.runner import run_tests
from recipes.code_agent.snapshots import write_files
from recipes.code_agent.tasks import Task
from recipes.code_agent.templates import MODULE_NAMES, PACKAGE_NAMES, TEMPLATES, Mutation, Template, mutations


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageSize:
    """How large a generated package is; ranges are inclusive."""

    packages: tuple[str, ...] = PACKAGE_NAMES
    """Names that a package may have."""
    num_modules: tuple[int, int] = (2, 3)
    functions_per_module: tuple[int, int] = (1, 3)
    docstrings: bool = False
    filler_lines: int = 0
    """Comment lines before each function, about 15 tokens each."""
    indirection: int = 0
    """Modules between a tested function and its test; each costs the agent a turn or two to look through."""

    def __post_init__(self) -> None:
        if not self.packages:
            raise ValueError("size: packages is empty; expected at least one name")
        for name in ("num_modules", "functions_per_module"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"size: {name} is {(low, high)}; expected 1 <= low <= high")
        for name in ("filler_lines", "indirection"):
            if getattr(self, name) < 0:
                raise ValueError(f"size: {name} is {getattr(self, name)}; expected 0 or more")


SIZES = {
    # One name: the demo policy guesses among several instead of reading the prompt.
    "demo": PackageSize(packages=PACKAGE_NAMES[:1]),
    "small": PackageSize(num_modules=(4, 6), functions_per_module=(3, 6), docstrings=True, indirection=1),
    "long": PackageSize(
        num_modules=(6, 8), functions_per_module=(40, 50), docstrings=True, filler_lines=3, indirection=3
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """The seeded bug: ``broken`` stands in ``path`` where ``line`` should.

    ``wrong_fixes`` are other broken forms of the same line.
    """

    family: str
    path: str
    function: str
    line: str
    broken: str
    wrong_fixes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTask:
    """A task together with what only scripts may know: the bug."""

    task: Task
    bug: Bug


@dataclass(frozen=True, slots=True, kw_only=True)
class _Definition:
    """A function or class of the package under its final name."""

    module: str
    name: str
    template: Template
    source: str


def generate(seed: int, index: int = 0, size: PackageSize = SIZES["demo"]) -> GeneratedTask:
    """Return task ``index`` of the endless series that belongs to ``seed``.

    The bug is known to fail a test because the calls of that test were made with it; :func:`verify` runs the tests.
    """
    rng = random.Random(f"code_agent/{seed}/{index}")
    package = rng.choice(size.packages)
    definitions = list(_define(rng, size))
    correct = _render(rng, package, definitions, size)
    broken, bug, files = _seed_bug(rng, package, definitions, correct)
    task = _as_task(f"{seed}-{index}", package, definitions, broken, files, size.indirection)
    return GeneratedTask(task=task, bug=bug)


def generate_many(num_tasks: int, seed: int, size: PackageSize = SIZES["demo"]) -> Iterator[GeneratedTask]:
    """Yield tasks 0, 1, ... of ``seed``."""
    for index in range(num_tasks):
        yield generate(seed, index, size)


_QUALIFIERS = ("daily", "weekly", "monthly", "yearly", "north", "south", "east", "west", "first", "second", "third")


def _define(rng: random.Random, size: PackageSize) -> Iterator[_Definition]:
    topics = list(MODULE_NAMES)
    rng.shuffle(topics)
    taken: set[str] = set()
    for number in range(rng.randint(*size.num_modules)):
        topic = topics[number % len(topics)]
        module = _fresh(rng.choice(MODULE_NAMES[topic]), taken, "{}_{}")
        pool = [template for template in TEMPLATES if template.topic == topic]
        num_functions = rng.randint(*size.functions_per_module)
        chosen = rng.sample(pool, min(num_functions, len(pool)))
        chosen += rng.choices(pool, k=num_functions - len(chosen))
        for template in chosen:
            name = _fresh(template.name, taken, "{1}_{0}" if template.name.islower() else "{1}{0}")
            yield _Definition(module=module, name=name, template=template, source=template.source.format(f=name))


def _fresh(name: str, taken: set[str], pattern: str) -> str:
    """Return the name, or the first qualified form of it that is not taken yet."""
    free = next(candidate for candidate in _candidates(name, pattern) if candidate not in taken)
    taken.add(free)
    return free


def _candidates(name: str, pattern: str) -> Iterator[str]:
    yield name
    for number in count(1):
        for qualifier in _QUALIFIERS:
            word = qualifier if number == 1 else f"{qualifier}{number}"
            yield pattern.format(name, word if name.islower() else word.title())


def _render(rng: random.Random, package: str, definitions: list[_Definition], size: PackageSize) -> dict[str, str]:
    files = {f"{package}/__init__.py": ""}
    modules = dict.fromkeys(definition.module for definition in definitions)
    for module in modules:
        parts = [_render_definition(rng, d, size) for d in definitions if d.module == module]
        files[f"{package}/{module}.py"] = "\n\n".join(parts)
    for level in range(size.indirection):
        for module in modules:
            own = [d for d in definitions if d.module == module]
            files[f"{package}/{_layer(module, level + 1)}.py"] = _render_layer(package, module, level, own)
    for module in modules:
        own = [d for d in definitions if d.module == module]
        files[f"tests/test_{module}.py"] = _render_tests(package, module, own, size)
    return files


_FILLER_SUBJECTS = ("The import of the month", "The report", "Every branch office", "The old system", "A new customer")
_FILLER_VERBS = ("relies on", "was checked against", "may later replace", "is described together with", "precedes")
_FILLER_OBJECTS = ("the table of units", "the yearly list", "these results", "the rounding rule", "the second index")


def _render_definition(rng: random.Random, definition: _Definition, size: PackageSize) -> str:
    notes = ""
    for _ in range(size.filler_lines):
        words = (rng.choice(_FILLER_SUBJECTS), rng.choice(_FILLER_VERBS), rng.choice(_FILLER_OBJECTS))
        notes += f"# {' '.join(words)}; see note {rng.randint(100, 999)}.\n"
    if not size.docstrings:
        return notes + definition.source
    head, body = definition.source.split("\n", 1)
    return f'{notes}{head}\n    """{definition.template.doc}"""\n\n{body}'


def _layer(module: str, level: int) -> str:
    return f"{module}_layer{level}" if level else module


def _layered(name: str, level: int) -> str:
    return f"{name.lower()}_v{level}" if level else name


def _render_layer(package: str, module: str, level: int, definitions: list[_Definition]) -> str:
    """Render the module that passes each call on to the level below."""
    names = [_layered(d.name, level) for d in definitions]
    imports = "".join(f"from {package}.{_layer(module, level)} import {name}\n" for name in names)
    functions = [
        f"def {_layered(d.name, level + 1)}(*values):\n    return {name}(*values)\n"
        for d, name in zip(definitions, names, strict=True)
    ]
    return imports + "\n\n" + "\n\n".join(functions)


def _render_tests(package: str, module: str, definitions: list[_Definition], size: PackageSize) -> str:
    names = [_layered(d.name, size.indirection) for d in definitions]
    parts = [f"from {package}.{_layer(module, size.indirection)} import {', '.join(sorted(names))}\n"]
    for definition, name in zip(definitions, names, strict=True):
        checks = [_render_check(definition, call, name) for call in definition.template.calls]
        parts.append("\n".join([f"def test_{name.lower()}():", *checks, ""]))
    return "\n\n".join(parts)


def _render_check(definition: _Definition, call: str, name: str) -> str:
    expected = _evaluate(definition.source, call.format(f=definition.name))
    return f"    assert {call.format(f=name)} == {expected!r}"


def _evaluate(source: str, call: str) -> object:
    namespace: dict[str, object] = {}
    exec(source, namespace)
    return eval(call, namespace)


def _seed_bug(
    rng: random.Random, package: str, definitions: list[_Definition], correct: dict[str, str]
) -> tuple[_Definition, Bug, dict[str, str]]:
    """Return the definition to break, the bug and the files with it."""
    for definition, mutation in _shuffled_by_family(rng, definitions):
        path = f"{package}/{definition.module}.py"
        broken = _break(correct[path], definition, mutation)
        if broken.count(mutation.broken) == 1 and _is_noticed(definition, mutation):
            return definition, _as_bug(path, definition, mutation), correct | {path: broken}
    raise AssertionError(f"package {package}: no mutation makes a test fail")


def _is_noticed(definition: _Definition, mutation: Mutation) -> bool:
    """Whether a call of the definition's test has another result with the mutation."""
    broken = definition.source.replace(mutation.line, mutation.broken, 1)
    for template_call in definition.template.calls:
        call = template_call.format(f=definition.name)
        try:
            if _evaluate(broken, call) != _evaluate(definition.source, call):
                return True
        # Whatever a broken function raises, its test fails.
        except Exception:
            return True
    return False


def _as_bug(path: str, definition: _Definition, mutation: Mutation) -> Bug:
    broken_forms = {other.broken for other in mutations(definition.source) if other.line == mutation.line}
    return Bug(
        family=mutation.family,
        path=path,
        function=definition.name,
        line=mutation.line,
        broken=mutation.broken,
        wrong_fixes=tuple(sorted(broken_forms - {mutation.broken})),
    )


def _shuffled_by_family(rng: random.Random, definitions: list[_Definition]) -> Iterator[tuple[_Definition, Mutation]]:
    """Yield every mutation of every definition, each family as likely to come first as the others."""
    by_family: dict[str, list[tuple[_Definition, Mutation]]] = {}
    for definition in definitions:
        for mutation in mutations(definition.source):
            by_family.setdefault(mutation.family, []).append((definition, mutation))
    families = sorted(by_family)
    while families:
        family = rng.choice(families)
        candidates = by_family[family]
        yield candidates.pop(rng.randrange(len(candidates)))
        if not candidates:
            families.remove(family)


def _break(text: str, definition: _Definition, mutation: Mutation) -> str:
    """Replace the first such line of the definition, leaving the other definitions of the module alone."""
    head = definition.source.split("\n", 1)[0]
    start = text.index(head)
    return text[:start] + text[start:].replace(mutation.line, mutation.broken, 1)


def _as_task(
    name: str, package: str, definitions: list[_Definition], broken: _Definition, files: dict[str, str], level: int
) -> Task:
    test_ids = {d.name: f"tests/test_{d.module}.py::test_{_layered(d.name, level).lower()}" for d in definitions}
    return Task(
        task_id=f"generated-{name}",
        statement=f"A test of package {package} fails. Find the bug, fix it with one edit and run the tests again.",
        files=files,
        test_files=tuple(path for path in files if path.startswith("tests/")),
        fail_to_pass=(test_ids.pop(broken.name),),
        pass_to_pass=tuple(test_ids.values()),
    )


def verify(generated: GeneratedTask) -> None:
    """Run the tests with the bug and without.

    Raises:
        AssertionError: other tests fail than those that the task names.
    """
    task, bug = generated.task, generated.bug
    fixed = task.files | {bug.path: task.files[bug.path].replace(bug.broken, bug.line)}
    for files, expected_failures in ((task.files, set(task.fail_to_pass)), (fixed, set())):
        with tempfile.TemporaryDirectory(prefix="code_agent_") as root:
            write_files(Path(root), files)
            passed = run_tests(root, task.test_files)[1]
        failures = {test_id for test_id, ok in passed.items() if not ok}
        assert failures == expected_failures, f"{task.task_id}: {failures} fail, expected {expected_failures}"
        assert passed.keys() == set(task.required_tests), f"{task.task_id}: {sorted(passed)} were run"
