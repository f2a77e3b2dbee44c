"""The directory of a comparison: who may use it, what is done in it, and where a trial goes on."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

from verl_war.compare.plan import Plan, Trial
from verl_war.compare.series import read_series

Status = Literal["new", "running", "interrupted", "failed", "complete"]

SCRATCH_PARENT = Path("/tmp")
"""Socket paths may have 107 bytes and Ray's take 70 of them, so a deep TMPDIR would not do."""

SCRATCH_PREFIX = "war-"
"""Of the names of trials' temporary directories."""

TRACKER = "latest_checkpointed_iteration.txt"
"""verl's note of the checkpoint to resume from."""

LAST_PART = "data.pt"
"""verl writes the data loader's state after everything else of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialState:
    """What is known of a trial between two starts of the comparison.

    Attributes:
        status: How the last attempt ended; ``running`` after a crash of the comparison itself.
        attempts: Starts so far.
        run_id: Mark of the last attempt's processes.
        scratch: Temporary directory of the last attempt.
        started_at_s: Start of the last attempt, seconds since the epoch.
        version: verl_war's version and commit at the last attempt.
        seconds: Wall time of all attempts that ended under our eyes.
    """

    status: Status = "new"
    attempts: int = 0
    run_id: str = ""
    scratch: str = ""
    started_at_s: float = 0.0
    version: str = ""
    seconds: float = 0.0


class DamagedState(ValueError):
    """The state file of a trial cannot be read.

    Attributes:
        path: The file.
        can_be_discarded: Whether ``--fresh`` would, since a comparison was made in that directory.
    """

    def __init__(self, path: Path, cause: Exception) -> None:
        self.path = path
        self.can_be_discarded = (path.parents[1] / "plan.json").exists()
        discard = "use --fresh to discard all results there" if self.can_be_discarded else "remove that file"
        super().__init__(
            f"{path} is damaged, or no state file of verl-war compare ({cause!r:.200}); {discard}, or choose another "
            "--out"
        )


def load_state(trial: Trial) -> TrialState:
    """The state of ``trial``, a fresh one when it never started.

    Raises:
        DamagedState: The file cannot be read.
    """
    path = _state_file(trial)
    if not path.exists():
        return TrialState()
    try:
        state = TrialState(**json.loads(path.read_text()))
        _require_types(state)
        return state
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DamagedState(path, error) from error


def _require_types(state: TrialState) -> None:
    """Check what JSON does not.

    Raises:
        ValueError: A value is of another type than its default, or the status is none.
    """
    for field in fields(state):
        value, expected = getattr(state, field.name), type(field.default)
        if not isinstance(value, (int, float) if expected is float else expected):
            raise ValueError(f"{field.name}={value!r:.40}, expected a value of type {expected.__name__}")
    if state.status not in get_args(Status):
        raise ValueError(f"status={state.status!r:.40}, expected one of {', '.join(get_args(Status))}")
    # What is left of such a trial is ended and deleted: nothing else may be named here.
    if state.status == "running" and not (state.run_id and state.started_at_s > 0 and is_scratch(Path(state.scratch))):
        raise ValueError(
            f"run_id={state.run_id!r:.40}, started_at_s={state.started_at_s!r:.40}, scratch={state.scratch!r:.80}, "
            "expected those of a running trial"
        )


def is_scratch(folder: Path) -> bool:
    """Whether a path is that of a trial's temporary directory."""
    parents = (SCRATCH_PARENT, Path(tempfile.gettempdir()))
    return folder.name.startswith(SCRATCH_PREFIX) and folder.parent in parents and ".." not in folder.parts


def save_state(trial: Trial, state: TrialState) -> None:
    """Write ``state`` so that a crash leaves the old one or the new one."""
    write_atomically(_state_file(trial), json.dumps(asdict(state), indent=1))


def _state_file(trial: Trial) -> Path:
    return trial.directory / "state.json"


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of ``path`` in one go."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold ``out`` for this process alone. The lock ends with the process, however that ends.

    Raises:
        ValueError: Another process holds it, or it cannot be made.
    """
    with _lock_file(out) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ValueError(
                f"--out={out} is in use by another comparison (process {holder}); wait for it, stop it, or choose "
                "another --out"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _lock_file(out: Path) -> TextIO:
    try:
        out.mkdir(parents=True, exist_ok=True)
        return (out / ".lock").open("a+")
    except OSError as error:
        raise ValueError(
            f"--out={out} cannot be used ({error}); give the name of a directory, in one that you may write to"
        ) from error


def claim(plan: Plan, fresh: bool) -> None:
    """Make ``plan.out`` the directory of ``plan``; with ``fresh``, empty it of earlier trials first.

    Raises:
        ValueError: It holds another comparison.
    """
    if fresh:
        _remove_results(plan.out)
    claim_identity(plan.out, plan.identity())


def claim_identity(out: Path, wanted: dict[str, Any]) -> None:
    """Note in ``out`` what is compared there.

    Raises:
        ValueError: It holds another comparison.
    """
    require_identity(out, wanted)
    write_atomically(out / "plan.json", json.dumps(wanted, indent=1))


def require_identity(out: Path, wanted: dict[str, Any]) -> None:
    """Check that ``out`` holds this comparison or none.

    Raises:
        ValueError: It holds another one, or its note of what is compared is damaged.
    """
    path = out / "plan.json"
    if path.exists():
        found = _read_identity(path)
        changed = [f"{key}: {found.get(key)!r} -> {wanted[key]!r}" for key in wanted if found.get(key) != wanted[key]]
        if changed:
            raise ValueError(
                f"--out={out} holds another comparison ({'; '.join(changed)}); choose another --out, or use "
                "--fresh to discard it"
            )


def _read_identity(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError(f"{found!r:.40}, expected an object")
        return found
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({error!r:.200}), so what is compared there is unknown; choose another --out, or use "
            "--fresh to discard it"
        ) from error


def _remove_results(out: Path) -> None:
    """Delete what a comparison made, and nothing that somebody else put there."""
    if not (out / "plan.json").exists():
        return
    for state in out.glob("*/state.json"):
        shutil.rmtree(state.parent)
    for name in ("data", "plots"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("plan.json", "report.md", "report.json", "unchanged.txt", "unchanged.json", "unchanged.png"):
        (out / name).unlink(missing_ok=True)


def is_complete(trial: Trial, state: TrialState, steps: int) -> bool:
    """Whether ``trial`` ended well and its last step is on record."""
    return state.status == "complete" and read_series(trial).last_step >= steps


def rewind(trial: Trial) -> int:
    """Point verl to the newest checkpoint that can be resumed without a gap, and return its step (0: none).

    verl notes a checkpoint before it logs the step, and does neither atomically. So a checkpoint counts when it is
    whole and its step is on record; otherwise the one before it does.
    """
    logged = read_series(trial).last_step
    noted = _noted_step(trial.checkpoints / TRACKER)
    usable = [step for step in _checkpoint_steps(trial.checkpoints) if step <= min(logged, noted)]
    step = max(usable, default=0)
    if step and step != noted:
        write_atomically(trial.checkpoints / TRACKER, str(step))
    elif not step:
        (trial.checkpoints / TRACKER).unlink(missing_ok=True)
    for folder in trial.checkpoints.glob("global_step_*"):
        if not folder.name.removeprefix("global_step_").isdigit() or int(folder.name[len("global_step_") :]) > step:
            shutil.rmtree(folder)
    return step


def _noted_step(tracker: Path) -> float:
    """The step in verl's tracker file. When it was cut off, the checkpoint that it was about to name is whole."""
    if not tracker.exists():
        return 0
    text = tracker.read_text().strip()
    return int(text) if text.isdigit() else float("inf")


def _checkpoint_steps(folder: Path) -> list[int]:
    names = [path.parent.name for path in folder.glob(f"global_step_*/{LAST_PART}")]
    return [int(name.removeprefix("global_step_")) for name in names if name.removeprefix("global_step_").isdigit()]
