"""Checks of the installed packages: versions, packages that do harm, patches."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

from packaging.specifiers import SpecifierSet

from verl_war import support
from verl_war.doctor.report import Check, check
from verl_war.patches.registry import Patch, verify

PROBE_TIMEOUT_S = 300.0
"""Importing verl and vLLM takes 15 s on one free core; a machine that other jobs use may need ten times as long."""

VersionOf = Callable[[str], str | None]


def check_versions(machine: support.Machine, version_of: VersionOf = support.installed_version) -> Iterator[Check]:
    """Compares installed versions with the support matrix."""
    for row in support.requirements_of(machine):
        found = version_of(row.distribution)
        fits = found is not None and SpecifierSet(row.versions).contains(found, prereleases=True)
        detail = f"{found or 'not installed'}, supported {row.versions} ({row.evidence})"
        yield check(f"version.{row.distribution}", fits, detail, row.remedy)


def check_conflicts(
    machine: support.Machine, try_imports: bool, version_of: VersionOf = support.installed_version
) -> Iterator[Check]:
    """Looks for packages that break runs.

    Args:
        machine: Where the runs would be.
        try_imports: Whether to import, in a process of its own, what may or may not do harm; else it is passed over.
        version_of: Look-up of installed versions.
    """
    for row in support.CONFLICTS:
        found = version_of(row.distribution)
        if found is None or machine not in row.machines or not (row.harmless or try_imports):
            continue
        harmless = SpecifierSet(row.harmless).contains(found) if row.harmless else imports(row.distribution)
        detail = f"{found} is installed" + ("" if harmless else f"; {row.reason}")
        yield check(f"conflict.{row.distribution}", harmless, detail, row.remedy)


def check_patch_guards(patches: Sequence[Patch], machine: support.Machine) -> Iterator[Check]:
    """Compares each patch that ``machine`` needs with the installed files, importing nothing."""
    for patch in patches:
        if patch.applies_to not in ("any", machine):
            continue
        name = f"patch.{patch.name}"
        try:
            present = verify(patch)
        except support.UpstreamMismatchError as error:
            found, _, remedy = str(error).partition(". Remedy: ")
            yield Check(name, "failed", found, remedy)
            continue
        yield Check(name, "ok", f"fits {patch.target}" if present else "nothing to patch: not installed")


def check_patches_apply(machine: support.Machine, command: Sequence[str] = ()) -> Check:
    """Imports verl and all patched modules in another process, and asks there which patches are in force.

    Args:
        machine: Whose patches to expect.
        command: Runs instead of the probe.
    """
    command = command or (sys.executable, "-m", "verl_war.doctor.probe", machine)
    remedy = f"run '{' '.join(command)}' to see the whole error"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Check("patches.applied", "failed", f"importing verl and vLLM took over {PROBE_TIMEOUT_S:.0f} s", remedy)
    if done.returncode != 0:
        last_line = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        return Check("patches.applied", "failed", f"verl and vLLM cannot be imported: {last_line}", remedy)
    answer = json.loads(done.stdout.splitlines()[-1])
    missing = sorted(set(answer["expected"]) - set(answer["applied"]))
    detail = f"not in force: {', '.join(missing)}" if missing else f"in force: {', '.join(answer['applied']) or 'none'}"
    return check("patches.applied", not missing, detail, remedy)


def imports(module: str) -> bool:
    """Returns whether ``import module`` works in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, timeout=PROBE_TIMEOUT_S, check=False
    )
    return done.returncode == 0
