"""The catalog is complete, its entries are well-formed, and they fit the supported upstream versions."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import verl_war.patches
from verl_war.patches import source
from verl_war.patches.catalog import PATCHES
from verl_war.patches.registry import Registry, verify
from verl_war.support import SUPPORT

FOLDER = Path(verl_war.patches.__file__).parent
PATCH_FILES = sorted(path for path in FOLDER.glob("*_*.py") if not path.name.startswith("__"))
IDS = [patch.name for patch in PATCHES]


def test_every_patch_file_is_listed():
    assert sorted(IDS) == [path.stem for path in PATCH_FILES]


@pytest.mark.parametrize("path", PATCH_FILES, ids=lambda path: path.stem)
def test_patch_files_are_short(path):
    assert len(path.read_text().splitlines()) < 80


def test_no_name_and_no_target_is_patched_twice():
    assert len(set(IDS)) == len(IDS)
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)


@pytest.mark.parametrize("patch", PATCHES, ids=IDS)
def test_record_is_complete(patch):
    assert patch.reason and patch.remove_when and re.search(r"\d+\.\d+\.\d+ .+\.py|github\.com", patch.link)
    source.split_target(patch.target)
    supported = {f"{row.distribution}{row.versions}" for row in SUPPORT}
    assert set(patch.sources) <= supported
    for key, digest in patch.sources.items():
        assert digest is None or re.fullmatch("[0-9a-f]{64}", digest), key


def test_nothing_heavy_is_imported_with_the_catalog():
    code = "import sys, verl_war.patches.catalog; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"verl", "vllm", "torch", "ray", "transformers"} & set(loaded)


@pytest.mark.upstream
@pytest.mark.parametrize("patch", PATCHES, ids=IDS)
def test_guards_hold_on_this_installation(patch):
    assert verify(patch)


@pytest.mark.upstream
def test_gpu_machines_get_no_cpu_patch():
    cpu_patches = [patch for patch in PATCHES if patch.applies_to == "cpu"]
    assert cpu_patches
    registry = Registry()
    registry.install(cpu_patches, "gpu")
    assert registry.armed() == () == registry.applied()
