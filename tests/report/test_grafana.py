"""The dashboard asks for metrics that vLLM has, in the jobs that verl makes."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from verl_war.cli import main
from verl_war.report.command import DASHBOARD

SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
"""What the Prometheus client adds to the name of a metric of each kind."""


def dashboard():
    return json.loads(DASHBOARD.read_text())


def queries():
    found = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    return found + [
        variable["definition"] for variable in dashboard()["templating"]["list"] if "definition" in variable
    ]


def package(name):
    """Where a package lies; found without importing it, which takes seconds."""
    return Path(importlib.util.find_spec(name).origin).parent


def exported_names():
    """Names in vLLM's own Prometheus logger."""
    root = package("vllm") / "v1"
    logger = (root / "metrics" / "loggers.py").read_text()
    made = re.findall(r'_(gauge|counter|histogram)_cls\(\s*name="(vllm:\w+)"', logger)
    drafts = (root / "spec_decode" / "metrics.py").read_text()
    made += [("counter", name) for name in re.findall(r'\("(vllm:spec_decode_\w+)", "', drafts)]
    return {name + suffix for kind, name in made for suffix in SUFFIXES[kind]}


@pytest.mark.upstream
def test_every_metric_is_one_of_vllm():
    asked = {name for query in queries() for name in re.findall(r"vllm:\w+", query)}
    assert len(asked) > 12
    exported = exported_names()
    assert len(exported) > 40, "vLLM's source reads as expected"
    assert asked - exported == set()


@pytest.mark.upstream
def test_the_job_is_the_one_of_verl():
    assert '"job_name": "rollout"' in (package("verl") / "workers" / "rollout" / "utils.py").read_text()
    assert all('job="rollout"' in query for query in queries())


def test_panels_are_complete_and_do_not_overlap():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or panel["targets"]
    text = json.dumps(dashboard())
    assert set(re.findall(r"\$\{?(\w+)", text)) <= {"datasource", "model", "replica", "__rate_interval", "__all"}


def test_parentheses_match():
    for query in queries():
        for begin, end in ("()", "{}", "[]"):
            assert query.count(begin) == query.count(end), query


def test_it_is_written_out(tmp_path, capsys):
    assert main(["report", "--grafana", str(tmp_path / "war.json")]) == 0
    assert json.loads((tmp_path / "war.json").read_text()) == dashboard()
    assert main(["report", "--grafana", str(tmp_path / "no" / "war.json")]) == 2
    assert "No such file" in capsys.readouterr().err
