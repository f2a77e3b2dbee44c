"""The README says what the code says."""

import re
import runpy
from dataclasses import fields
from pathlib import Path

from verl_war.core.config import WarConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_tables_are_those_of_the_code():
    rendered = runpy.run_path(str(ROOT / "scripts" / "update_readme.py"))["rendered"]
    assert rendered(README) == README, "run: python scripts/update_readme.py"


def test_every_setting_is_explained():
    for field in fields(WarConfig):
        assert f"`{field.name}" in README


def test_every_path_that_is_named_exists():
    named = re.findall(r"`((?:verl_war|recipes|scripts|tests)/[\w./]+)`", README)
    named += [path for path in re.findall(r"\]\(([\w./]+)\)", README)]
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
