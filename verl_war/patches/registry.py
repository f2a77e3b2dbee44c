"""Replacing upstream names: patches as data, guards, and a record of what is in force.

A patch names exactly what it replaces and in which versions it may do so. :func:`install` first compares every patch
with the installed files, then arms it: the replacement happens right behind the import of the target's module, so
nothing heavy is imported early, and before any other module can copy the old name.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import wrapt

from verl_war import support
from verl_war.patches import source

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One replacement of an upstream name.

    Attributes:
        name: Unique, as reported by :func:`applied` and ``verl-war doctor``.
        target: ``package.module:qualname`` of the name that is replaced.
        make: Gets the original object, returns the replacement. Called once, after the target's module is imported.
        sources: For each supported ``distribution==version`` the sha256 of the source the patch was written against;
            None where there is no Python source to compare.
        guards: Whose source is compared; the target itself unless the target is not defined in that module.
        applies_to: ``cpu`` for patches that only a machine without accelerator needs.
        reason: Why the patch exists.
        link: Upstream path and line, or an issue.
        remove_when: What has to happen upstream for the patch to go.
    """

    name: str
    target: str
    make: Callable[[Any], Any]
    sources: Mapping[str, str | None]
    applies_to: Literal["cpu", "any"] = "any"
    guards: str = ""
    reason: str
    link: str
    remove_when: str

    @property
    def guarded(self) -> str:
        """``package.module:qualname`` of the object whose source is compared."""
        return self.guards or self.target

    @property
    def distributions(self) -> tuple[str, ...]:
        """Names of the distributions that may provide the target."""
        return tuple(dict.fromkeys(key.partition("==")[0] for key in self.sources))


@dataclass(slots=True)
class _Applied:
    """Where a replacement was put, to tell later whether it is still there."""

    holder: Any
    attribute: str
    replacement: Any

    def in_force(self) -> bool:
        return vars(self.holder).get(self.attribute) is self.replacement


@dataclass(slots=True)
class Registry:
    """The patches of this process. The module-level functions use one instance; tests make their own."""

    _armed: dict[str, Patch] = field(default_factory=dict)
    _applied: dict[str, _Applied] = field(default_factory=dict)

    def install(self, patches: Iterable[Patch], machine: support.Machine) -> None:
        """Checks the patches that ``machine`` needs and arms them. Calling it again changes nothing.

        Raises:
            UpstreamMismatchError: A patch does not fit the installed version or source; none is armed then.
        """
        wanted = [p for p in patches if p.applies_to in ("any", machine) and p.name not in self._known()]
        fitting = [patch for patch in wanted if verify(patch)]
        for patch in fitting:
            self._armed[patch.name] = patch
        for patch in fitting:
            module, _ = source.split_target(patch.target)
            wrapt.register_post_import_hook(self._hook(patch), module)

    def armed(self) -> tuple[str, ...]:
        """Returns the names of the patches that wait for the import of their target."""
        return tuple(self._armed)

    def applied(self) -> tuple[str, ...]:
        """Returns the names of the patches that are in force: applied, and not replaced by somebody else since."""
        return tuple(name for name, where in self._applied.items() if where.in_force())

    def check(self) -> None:
        """Makes sure that every patch whose target is imported is in force.

        Raises:
            UpstreamMismatchError: A patch is not in force, or none was ever installed in this process.
        """
        if not self._known():
            support.mismatch("no patch was installed in this process", "the plugins of verl_war loaded", "reinstall it")
        imported = (p.name for p in self._armed.values() if source.split_target(p.target)[0] in sys.modules)
        missing = sorted({*imported, *self._applied} - set(self.applied()))
        if missing:
            support.mismatch(
                f"patches {missing} are not in force in this process",
                "all patches applied",
                "uninstall other plugins that replace the same functions, or report the versions you run",
            )

    def _known(self) -> set[str]:
        return {*self._armed, *self._applied}

    def _hook(self, patch: Patch) -> Callable[[ModuleType], None]:
        return lambda module: self._apply(patch, module)

    def _apply(self, patch: Patch, module: ModuleType) -> None:
        """Replaces the target in ``module``, once."""
        if patch.name in self._applied:
            return
        holder, attribute, original = _resolve(patch, module)
        _check_live(patch, original)
        replacement = patch.make(original)
        setattr(holder, attribute, replacement)
        _rebind_copies(module, original, replacement)
        self._applied[patch.name] = _Applied(holder, attribute, replacement)
        self._armed.pop(patch.name, None)
        logger.debug("patch %s applied to %s", patch.name, patch.target)


_PROCESS = Registry()
install = _PROCESS.install
armed = _PROCESS.armed
applied = _PROCESS.applied
check = _PROCESS.check


def verify(patch: Patch) -> bool:
    """Compares ``patch`` with the installed files, importing nothing.

    Returns:
        Whether there is anything to patch: False when no distribution that it supports is installed.

    Raises:
        UpstreamMismatchError: States patch, found, expected and remedy, see :func:`support.mismatch`.
    """
    installed = {name: support.installed_version(name) for name in patch.distributions}
    present = {name: version for name, version in installed.items() if version is not None}
    for name, version in present.items():
        key = f"{name}=={version}"
        if key not in patch.sources:
            _mismatch(patch, key, " or ".join(patch.sources))
        elif (expected := patch.sources[key]) is not None:
            _compare(patch, source.file_digest(patch.guarded), expected, f"installed {key}")
    return bool(present)


def _check_live(patch: Patch, original: Any) -> None:
    """Refuses an object that another plugin replaced before us: the file is right then, the object is not."""
    keys = (f"{name}=={support.installed_version(name)}" for name in patch.distributions)
    expected = next((patch.sources[key] for key in keys if key in patch.sources), None)
    if expected is not None and not patch.guards:
        _compare(patch, source.live_digest(original), expected, f"imported object (from {original.__module__})")


def _compare(patch: Patch, found: str | None, expected: str, where: str) -> None:
    if found != expected:
        what = "no such object" if found is None else f"source {found[:12]}"
        _mismatch(patch, f"{what} in the {where}", f"source {expected[:12]}")


def _mismatch(patch: Patch, found: str, expected: str) -> None:
    supported = " or ".join(f'"{key}"' for key in patch.sources)
    support.mismatch(
        f"patch {patch.name!r} of {patch.target} does not fit: found {found}",
        expected,
        f"pip install --force-reinstall --no-deps {supported}, and uninstall other packages that patch it",
    )


def _resolve(patch: Patch, module: ModuleType) -> tuple[Any, str, Any]:
    """Returns the object that holds the target, the attribute's name and its present value."""
    _, qualname = source.split_target(patch.target)
    *parents, attribute = qualname.split(".")
    holder: Any = module
    for name in parents:
        holder = vars(holder)[name]
    return holder, attribute, vars(holder)[attribute]


def _rebind_copies(module: ModuleType, original: Any, replacement: Any) -> None:
    """Also replaces what ``from module import name`` copied into modules of the same package imported before us."""
    if not callable(original) and type(original).__module__ == "builtins":
        return  # a plain container or number: being the same object does not make it a copy of the name
    package = module.__name__.partition(".")[0]
    for name, other in list(sys.modules.items()):
        if name.partition(".")[0] == package and other is not None and other is not module:
            for attribute in [key for key, value in vars(other).items() if value is original]:
                setattr(other, attribute, replacement)
