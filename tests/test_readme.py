"""The README says what the code says."""

import re
from dataclasses import fields
from pathlib import Path

from verl_war.core import speculation_report, step_stats
from verl_war.core.config import WarConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


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
