"""Source fingerprints taken from files equal those taken from imported objects."""

import pytest

from verl_war.patches import source


@pytest.mark.parametrize("name", ["double", "logged", "Engine", "Engine.speed", "Engine.name"])
def test_file_and_object_have_the_same_digest(upstream, name):
    expected = source.file_digest(f"upstream_pkg.maths:{name}")
    obj = upstream("maths")
    for part in name.split("."):
        obj = getattr(obj, part)
    assert source.live_digest(obj) == expected


def test_decorators_belong_to_the_source(upstream, tmp_path):
    before = source.file_digest("upstream_pkg.maths:cached")
    path = source.module_path("upstream_pkg.maths")
    path.write_text(path.read_text().replace("maxsize=None", "maxsize=8"))
    assert source.file_digest("upstream_pkg.maths:cached") != before


@pytest.mark.parametrize(
    "target",
    ["upstream_pkg.maths:missing", "upstream_pkg.maths:Engine.missing", "upstream_pkg.missing:f", "no_package:f"],
)
def test_missing_objects_have_none(upstream, target):
    assert source.file_digest(target) is None


def test_packages_are_found_as_well_as_modules(upstream):
    assert source.module_path("upstream_pkg").name == "__init__.py"
    assert source.module_path("upstream_pkg.maths").name == "maths.py"


@pytest.mark.parametrize("target", ["", "package.module", "package.module:", ":name"])
def test_malformed_targets_are_refused(target):
    with pytest.raises(ValueError, match="must have the form"):
        source.split_target(target)


def test_digest_ignores_line_ends_only():
    assert source.digest("a\r\nb\n") == source.digest("a\nb")
    assert source.digest("a\nb") != source.digest("a\n b")
