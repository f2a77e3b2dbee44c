"""The functions of generated packages and the ways to break one line of them.

A template is a short function or class that needs no imports, ends on every input and has no side effects; its calls
are the inputs of its tests (``{f}`` stands for the function's name in the package). Expected values are not written
down: the generator runs the correct function.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """One function or class; ``source`` has ``{f}`` for its name, ``doc`` says what it does, ``calls`` try it."""

    topic: str
    name: str
    source: str
    doc: str
    calls: tuple[str, ...]


def _function(topic: str, name: str, params: str, doc: str, body: str, *arguments: str) -> Template:
    lines = "\n".join("    " + line for line in body.split("\n"))
    calls = tuple(f"{{f}}({inputs})" for inputs in arguments)
    return Template(topic=topic, name=name, source=f"def {{f}}({params}):\n{lines}\n", doc=doc, calls=calls)


def _class(name: str, field_name: str, doc: str, methods: str, *calls: str) -> Template:
    start = f"class {{f}}:\n    def __init__(self, {field_name}):\n        self.{field_name} = {field_name}\n"
    body = "\n".join("    " + line if line else "" for line in methods.split("\n"))
    return Template(topic="classes", name=name, source=f"{start}\n{body}\n", doc=doc, calls=calls)


_ARITHMETIC = (
    _function("arithmetic", "add_tax", "price, tax", "Price with tax.", "return price + tax", "10, 2", "7, 3"),
    _function("arithmetic", "area", "width, height", "Area of a box.", "return width * height", "3, 4", "5, 6"),
    _function("arithmetic", "is_even", "number", "Whether number is even.", "return number % 2 == 0", "4", "7"),
    _function(
        "arithmetic", "to_minutes", "hours, rest", "Minutes in all.", "return hours * 60 + rest", "2, 5", "1, 30"
    ),
    _function(
        "arithmetic", "average", "total, count", "Mean, or 0 of nothing.",
        "if count == 0:\n    return 0\nreturn total // count", "12, 3", "20, 4", "5, 0",
    ),
    _function(
        "arithmetic", "clamp", "value, low, high", "Value kept in low..high.",
        "if value < low:\n    return low\nif value > high:\n    return high\nreturn value",
        "5, 1, 9", "0, 2, 9", "12, 1, 8",
    ),
    _function(
        "arithmetic", "gap", "a, b", "Distance of a and b.",
        "if a > b:\n    return a - b\nreturn b - a", "9, 4", "3, 8",
    ),
    _function(
        "arithmetic", "larger", "a, b", "The larger one.", "if a > b:\n    return a\nreturn b", "9, 4", "3, 8"
    ),
)  # fmt: skip
_LISTS = (
    _function(
        "lists", "total", "values", "Sum of values.",
        "result = 0\nfor value in values:\n    result += value\nreturn result", "[1, 2, 3]", "[4, 5]",
    ),
    _function(
        "lists", "count_above", "values, limit", "How many are above limit.",
        "count = 0\nfor value in values:\n    if value > limit:\n        count += 1\nreturn count",
        "[1, 5, 9], 4", "[2, 3, 3], 3",
    ),
    _function(
        "lists", "biggest", "values", "The biggest value.",
        "best = values[0]\nfor value in values:\n    if value > best:\n        best = value\nreturn best",
        "[2, 9, 4]", "[7, 1, 3]",
    ),
    _function(
        "lists", "find_index", "values, target", "Place of target, or -1.",
        "for index in range(len(values)):\n    if values[index] == target:\n        return index\nreturn -1",
        "[4, 6, 8], 6", "[4, 6, 8], 4", "[1, 2], 5",
    ),
    _function("lists", "first_items", "values, n", "The first n.", "return values[:n]", "[1, 2, 3, 4], 2", "[5, 6], 1"),
    _function("lists", "last_item", "values", "The last one.", "return values[-1]", "[3, 5, 8]", "[6, 2]"),
    _function("lists", "drop_first", "values", "All but the first.", "return values[1:]", "[3, 5, 8]", "[6, 2]"),
    _function(
        "lists", "pair_sums", "left, right", "Sums of pairs.",
        "return [a + b for a, b in zip(left, right)]", "[1, 2], [3, 4]", "[5], [6]",
    ),
)  # fmt: skip
_STRINGS = (
    _function("strings", "initials", "first, last", "Both initials.", "return first[0] + last[0]", "'ann', 'lee'"),
    _function("strings", "repeat", "text, times", "Text many times.", "return text * times", "'ab', 2", "'x', 3"),
    _function("strings", "is_palindrome", "text", "Same backwards.", "return text == text[::-1]", "'abba'", "'abc'"),
    _function(
        "strings", "full_name", "first, last", "First and last name.", "return first + ' ' + last", "'ann', 'lee'"
    ),
    _function(
        "strings", "has_prefix", "text, prefix", "Whether text starts with prefix.",
        "return text[:len(prefix)] == prefix", "'carbon', 'car'", "'table', 'car'",
    ),
    _function(
        "strings", "shorten", "text, size", "Text of size at most.",
        "if len(text) > size:\n    return text[:size]\nreturn text", "'window', 3", "'cat', 5",
    ),
    _function(
        "strings", "count_char", "text, char", "How often char occurs.",
        "count = 0\nfor item in text:\n    if item == char:\n        count += 1\nreturn count",
        "'banana', 'a'", "'hello', 'l'",
    ),
)  # fmt: skip
_DICTS = (
    _function(
        "dicts", "get_count", "counts, key", "Count of key, or 0.",
        "return counts.get(key, 0)", "{{'a': 3}}, 'a'", "{{'a': 3}}, 'b'",
    ),
    _function(
        "dicts", "add_item", "stock, name, amount", "Stock with more of name.",
        "stock[name] = stock.get(name, 0) + amount\nreturn stock", "{{'pen': 2}}, 'pen', 3", "{{}}, 'cup', 4",
    ),
    _function(
        "dicts", "above", "scores, limit", "Scores above limit.",
        "return {{key: score for key, score in scores.items() if score > limit}}",
        "{{'a': 3, 'b': 8}}, 5", "{{'a': 5, 'b': 6}}, 5",
    ),
    _function(
        "dicts", "count_words", "words", "How often each word occurs.",
        "counts = {{}}\nfor word in words:\n    counts[word] = counts.get(word, 0) + 1\nreturn counts",
        "['a', 'b', 'a']", "['x']",
    ),
    _function(
        "dicts", "invert", "table", "Keys by value.",
        "return {{value: key for key, value in table.items()}}", "{{'a': 1, 'b': 2}}",
    ),
    _function(
        "dicts", "cost", "prices, basket", "Price of a basket.",
        "result = 0\nfor name in basket:\n    result += prices[name] * basket[name]\nreturn result",
        "{{'pen': 2, 'cup': 5}}, {{'pen': 3, 'cup': 1}}",
    ),
)  # fmt: skip
_CLASSES = (
    _class(
        "Account", "balance", "Money that can be paid in and out.",
        "def deposit(self, amount):\n    self.balance += amount\n    return self.balance\n\n"
        "def withdraw(self, amount):\n    if amount <= self.balance:\n        self.balance -= amount\n"
        "    return self.balance",
        "{f}(10).deposit(5)", "{f}(10).withdraw(4)", "{f}(3).withdraw(8)", "{f}(6).withdraw(6)",
    ),
    _class(
        "Timer", "seconds", "Time left in seconds.",
        "def tick(self):\n    self.seconds -= 1\n    return self.seconds\n\n"
        "def is_done(self):\n    return self.seconds <= 0",
        "{f}(5).tick()", "{f}(0).is_done()", "{f}(2).is_done()",
    ),
    _class(
        "Stack", "items", "Last in, first out.",
        "def push(self, item):\n    self.items = self.items + [item]\n    return self.items\n\n"
        "def top(self):\n    return self.items[-1]\n\ndef size(self):\n    return len(self.items)",
        "{f}([1]).push(2)", "{f}([1, 5, 7]).top()", "{f}([4, 4]).size()",
    ),
    _class(
        "Level", "points", "Level reached with points.",
        "def number(self):\n    return self.points // 10 + 1\n\n"
        "def missing(self):\n    return 10 - self.points % 10",
        "{f}(25).number()", "{f}(7).missing()", "{f}(40).number()",
    ),
)  # fmt: skip
TEMPLATES = _ARITHMETIC + _LISTS + _STRINGS + _DICTS + _CLASSES

MODULE_NAMES = {
    "arithmetic": ("price", "maths", "units"),
    "lists": ("items", "rows", "cart"),
    "strings": ("text", "names", "words"),
    "dicts": ("stock", "table", "scores"),
    "classes": ("models", "state", "objects"),
}
PACKAGE_NAMES = ("shop", "bank", "game", "farm", "club")

_MUTATIONS: tuple[tuple[str, str, str], ...] = (
    ("operator", r" \+ ", " - "),
    ("operator", r" - ", " + "),
    ("operator", r" \* ", " + "),
    ("operator", r" // ", " * "),
    ("operator", r" % ", " // "),
    ("operator", r" \+= ", " -= "),
    ("operator", r" -= ", " += "),
    ("comparison", r" > ", " < "),
    ("comparison", r" > ", " >= "),
    ("comparison", r" < ", " > "),
    ("comparison", r" <= ", " < "),
    ("comparison", r" <= ", " >= "),
    ("comparison", r" == ", " != "),
    ("constant", r"\b0\b(?!\])", "1"),
    ("constant", r"\b1\b(?=$|\))", "2"),
    ("constant", r"\b60\b", "24"),
    ("constant", r"\b10\b", "100"),
    ("off_by_one", r"\[1:\]", "[2:]"),
    ("off_by_one", r"\[:(\w+)\]", r"[:\1 - 1]"),
    ("off_by_one", r"\[-1\]", "[0]"),
    ("off_by_one", r"\[0\]", "[1]"),
    ("off_by_one", r"range\(", "range(1, "),
    ("missing_return", r"^return ", ""),
)
_SWAPPABLE = r"(?<!def )(?<!for )(?<!\.)\b{}\b(?! = )(?!\(| in )"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A way to break a line; ``line`` and ``broken`` are the line before and after, without indentation."""

    family: str
    line: str
    broken: str


def mutations(source: str) -> Iterator[Mutation]:
    """Yield the single-line changes of a function's source that are likely to break it.

    Not every change breaks something; the generator runs the tests to see.
    """
    params = re.findall(r"\w+", re.search(r"def \w+\((?:self, )?([^)]*)\)", source)[1])
    for text in source.splitlines():
        line = text.strip()
        if not line.startswith(("def ", "class ")) and line != f"self.{params[0]} = {params[0]}":
            yield from _mutations_of_line(line, params)


def _mutations_of_line(line: str, params: list[str]) -> Iterator[Mutation]:
    for family, pattern, replacement in _MUTATIONS:
        yield from _apply(family, pattern, replacement, line)
    if not line.startswith("if "):
        for old, new in permutations(params, 2):
            yield from _apply("wrong_variable", _SWAPPABLE.format(old), new, line)


def _apply(family: str, pattern: str, replacement: str, line: str) -> Iterator[Mutation]:
    for match in re.finditer(pattern, line):
        broken = line[: match.start()] + match.expand(replacement) + line[match.end() :]
        if broken and broken != line:
            yield Mutation(family=family, line=line, broken=broken)
