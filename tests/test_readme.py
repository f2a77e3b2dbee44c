"""The README says what the code says."""

import argparse
import importlib
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from verl_war.cli import COMMANDS
from verl_war.core import speculation_report, step_stats
from verl_war.core.config import WarConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMPARISON = (ROOT / "recipes" / "baseline_comparison" / "README.md").read_text()


def shell_commands(text):
    """Every `verl-war` of the blocks of code, as words."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(block for language, block in blocks if language in ("", "bash")).replace("\\\n", " ").splitlines()
    found = (re.fullmatch(r"\s*(?:\.venv/bin/)?verl-war (.*)", line) for line in lines)
    return [shlex.split(re.sub(r"\$\(.*?\)", "1", match[1]), comments=True) for match in found if match]


def parser_of(command):
    parser = argparse.ArgumentParser(prog=f"verl-war {command}", exit_on_error=False)
    importlib.import_module(COMMANDS[command][0]).add_arguments(parser)
    return parser


def plain(text):
    """A value as YAML or the README writes it."""
    try:
        return float(text)
    except ValueError:
        return {"True": True, "False": False, "null": None}.get(text, text)


def test_every_setting_is_explained():
    for field in fields(WarConfig):
        assert f"`{field.name}" in README


def test_every_path_that_is_named_exists():
    named = re.findall(r"`((?:verl_war|recipes|scripts|tests)/[\w./]+)`", README)
    named += [path for path in re.findall(r"\]\(([\w./]+)\)", README)]
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_metric_is_explained():
    explained = (ROOT / "verl_war" / "METRICS.md").read_text()
    metrics = [*step_stats.METRICS, *speculation_report.METRICS, *step_stats.TRAINER_METRICS]
    assert metrics
    assert [name for name in metrics if f"| `{name}` |" not in explained] == []


@pytest.mark.parametrize("text", [README, COMPARISON], ids=["README", "baseline_comparison"])
def test_every_command_that_is_shown_is_understood(text):
    commands = shell_commands(text)
    assert len(commands) >= 5
    for name, *words in commands:
        _, unknown = parser_of(name).parse_known_args(words)
        assert not [word for word in unknown if word.startswith("-")], (name, words)


@pytest.mark.parametrize("text", [README, COMPARISON], ids=["README", "baseline_comparison"])
def test_every_option_of_a_command_that_is_named_exists(text):
    known = {option for name in COMMANDS for option in parser_of(name)._option_string_actions}
    known |= {"--help"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    assert named and not named - known


def test_defaults_of_settings_are_those_of_the_configuration():
    yaml = pytest.importorskip("yaml")
    settings = yaml.safe_load((ROOT / "verl_war" / "config" / "rollout" / "war.yaml").read_text())["custom"]["war"]
    rows = re.findall(r"^\| (`[a-z_.`, ]+`) \| (`.+?`) \| ", README, re.MULTILINE)
    assert len(rows) > 15
    for keys, values in rows:
        names, defaults = re.findall(r"`(.+?)`", keys), re.findall(r"`(.+?)`", values)
        group = names[0].rpartition(".")[0]
        for name, default in zip(names, defaults, strict=True):
            value = settings
            for part in (group + name if name.startswith(".") else name).split("."):
                value = value[part]
            assert plain(str(value) if value is not None else "null") == plain(default), name
