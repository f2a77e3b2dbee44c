"""What `scripts/constraints.txt` holds back, and whether it still has to."""

from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def test_the_constraints_are_part_of_the_set_up_and_of_its_stamp():
    assert (ROOT / "scripts" / "setup_env.sh").read_text().count('"$ROOT/scripts/constraints.txt"') == 2


@pytest.mark.upstream
def test_virtualenv_is_held_back_only_while_pyvers_holds_packaging_back():
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    (bound,) = (Requirement(line) for line in lines if line.startswith("virtualenv"))
    assert bound.specifier.contains(metadata.version("virtualenv"))
    (wanted,) = (r for r in map(Requirement, metadata.requires("pyvers")) if r.name == "packaging" and not r.marker)
    assert not wanted.specifier.contains("26.3"), "pyvers allows packaging 26: take virtualenv out of constraints.txt"
