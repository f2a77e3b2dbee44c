"""Arming, guarding and applying patches, on a small upstream package."""

import dataclasses
import sys

import pytest

from verl_war.patches.registry import Registry
from verl_war.support import SKIP_VERSION_CHECK_ENV, UpstreamMismatchError


@pytest.fixture
def registry():
    return Registry()


def test_patch_waits_for_the_import_of_its_target(registry, upstream, make_patch):
    registry.install([make_patch()], "cpu")
    assert registry.armed() == ("triple",) and registry.applied() == ()
    assert "upstream_pkg.maths" not in sys.modules
    assert upstream("maths").double(2) == 6
    assert registry.armed() == () and registry.applied() == ("triple",)


def test_patch_reaches_copies_that_were_imported_before(registry, upstream, make_patch):
    early = upstream("copy")
    assert early.twice(2) == 4
    registry.install([make_patch()], "cpu")
    assert registry.applied() == ("triple",)
    assert early.twice(2) == 6


def test_methods_are_replaced_in_their_class(registry, upstream, make_patch):
    patch = make_patch("fast", "upstream_pkg.maths:Engine.speed", staticmethod(lambda: 9))
    registry.install([patch], "cpu")
    assert upstream("maths").Engine.speed() == 9
    assert registry.applied() == ("fast",)


def test_replacement_may_use_the_original(registry, upstream, make_patch):
    registry.install([make_patch(make=lambda original: lambda x: original(x) + 1)], "cpu")
    assert upstream("maths").double(2) == 5


def test_installing_twice_applies_once(registry, upstream, make_patch):
    calls = []
    patch = make_patch(make=lambda original: calls.append(original) or (lambda x: original(x) + 1))
    registry.install([patch], "cpu")
    registry.install([patch], "cpu")
    assert upstream("maths").double(2) == 5
    registry.install([patch], "cpu")
    assert upstream("maths").double(2) == 5
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("machine", "applies_to", "armed"),
    [("cpu", "cpu", True), ("cpu", "any", True), ("gpu", "cpu", False), ("gpu", "any", True)],
)
def test_cpu_patches_stay_away_from_gpu_machines(registry, make_patch, machine, applies_to, armed):
    registry.install([make_patch(applies_to=applies_to)], machine)
    assert registry.armed() == (("triple",) if armed else ())


def test_nothing_is_armed_for_a_distribution_that_is_not_installed(registry, upstream, make_patch):
    registry.install([make_patch(sources={"no-such-distribution==1.0": "0" * 64})], "cpu")
    assert registry.armed() == ()
    assert upstream("maths").double(2) == 4


MISFITS = {
    "other version": ({"sources": {"upstream-pkg==0.9": None}}, "found upstream-pkg==1.0; expected upstream-pkg==0.9"),
    "other source": ({"sources": {"upstream-pkg==1.0": "0" * 64}}, "in the installed upstream-pkg==1.0; expected"),
    "function gone": (
        {"target": "upstream_pkg.maths:gone", "sources": {"upstream-pkg==1.0": "0" * 64}},
        "found no such object",
    ),
    "module gone": (
        {"target": "upstream_pkg.gone:f", "sources": {"upstream-pkg==1.0": "0" * 64}},
        "found no such object",
    ),
    "guarded user changed": (
        {"guards": "upstream_pkg.maths:cached", "sources": {"upstream-pkg==1.0": "0" * 64}},
        "does not fit",
    ),
}


@pytest.mark.parametrize(("change", "message"), MISFITS.values(), ids=MISFITS)
def test_misfit_stops_before_anything_is_armed(registry, upstream, make_patch, change, message):
    with pytest.raises(UpstreamMismatchError, match=message) as error:
        registry.install([make_patch("good"), dataclasses.replace(make_patch("bad"), **change)], "cpu")
    assert "patch 'bad'" in str(error.value) and "Remedy: pip install" in str(error.value)
    assert registry.armed() == () == registry.applied()
    assert upstream("maths").double(2) == 4


def test_mismatch_is_a_warning_when_the_check_is_skipped(registry, upstream, make_patch, monkeypatch, caplog):
    monkeypatch.setenv(SKIP_VERSION_CHECK_ENV, "1")
    registry.install([make_patch(sources={"upstream-pkg==0.9": None})], "cpu")
    assert upstream("maths").double(2) == 6
    assert "not trustworthy" in caplog.text and "found upstream-pkg==1.0" in caplog.text


def test_object_replaced_by_another_plugin_before_us_is_refused(registry, upstream, make_patch):
    upstream("maths").double = lambda x: -x
    with pytest.raises(UpstreamMismatchError, match="in the imported object"):
        registry.install([make_patch()], "cpu")
    assert registry.applied() == ()


def test_patch_replaced_by_another_plugin_after_us_is_not_in_force(registry, upstream, make_patch):
    registry.install([make_patch()], "cpu")
    upstream("maths").double = lambda x: -x
    assert registry.applied() == ()
    with pytest.raises(UpstreamMismatchError, match="triple"):
        registry.check()


def test_check_accepts_armed_and_applied_patches(registry, upstream, make_patch):
    registry.install([make_patch()], "cpu")
    registry.check()
    upstream("maths")
    registry.check()


def test_check_refuses_a_process_without_patches(registry):
    with pytest.raises(UpstreamMismatchError, match="no patch was installed"):
        registry.check()
