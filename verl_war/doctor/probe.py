"""Imports what a run imports and prints, as JSON, which patches are then in force: ``python -m``, by the doctor.

A process of its own, because a broken upstream package may end it.
"""

import importlib
import json
import sys

from verl_war.patches import catalog, registry
from verl_war.patches.source import split_target
from verl_war.support import Machine


def probe(machine: Machine) -> dict[str, list[str]]:
    """Imports verl, whose plugin arms the patches, and every target; returns names of expected and applied patches."""
    importlib.import_module("verl")
    wanted = [p for p in catalog.PATCHES if p.applies_to in ("any", machine) and registry.verify(p)]
    for patch in wanted:
        importlib.import_module(split_target(patch.target)[0])
    return {"expected": [patch.name for patch in wanted], "applied": list(registry.applied())}


if __name__ == "__main__":
    found = probe(sys.argv[1])  # type: ignore[arg-type]
    sys.stdout.write(json.dumps(found) + "\n")
