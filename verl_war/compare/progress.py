"""What a person sees while a trial runs: its phase, then one report per training step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from verl_war.compare.series import TRAINING_KEY, read_records

PHASES: tuple[tuple[str, str], ...] = (
    ("ray init kwargs", "starting Ray"),
    ("(WorkerDict pid=", "loading the model into the trainers"),
    ("HttpServer pid=", "starting vLLM"),
    ("Creating file logger", "first rollout"),
)
"""Words in the training's output -> phase that they begin, in the order in which verl gets there."""

BAR_FORMAT = "{desc}: |{bar:24}| {elapsed}{postfix}"

HEARTBEAT_S = 60.0
"""Without a terminal, a line this often says that the trial is alive."""


class Follower:
    """Reads what was appended to a file since the last look."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read(self) -> str:
        """The new text, empty when there is none."""
        if not self._path.exists():
            return ""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        return data.decode(errors="replace")


class Display:
    """Progress of one trial: a bar on a terminal, plain lines anywhere else.

    Args:
        name: Name of the trial.
        steps: Training steps of the trial.
        log: Console output to take the phases from.
        metrics: File that verl's file logger writes.
        stream: Where to show it.
    """

    def __init__(self, name: str, steps: int, log: Path, metrics: Path, stream: TextIO) -> None:
        self._name, self._steps, self._stream = name, steps, stream
        self._log, self._metrics = Follower(log, from_end=True), metrics
        self._phases_left = list(PHASES)
        self._phase, self._status = "starting up", ""
        self._begin_s = self._shown_s = time.monotonic()
        self._shown_step = 0
        self._bar = tqdm(total=steps, desc=name, bar_format=BAR_FORMAT, file=stream) if stream.isatty() else None
        self._show()

    def update(self) -> None:
        """Look for news and show them."""
        self._follow_log(self._log.read())
        self._follow_metrics()
        if self._bar is not None:
            self._bar.refresh()
        elif time.monotonic() - self._shown_s > HEARTBEAT_S:
            self._show()

    def close(self) -> None:
        """End the display; a bar stays as it is."""
        if self._bar is not None:
            self._bar.close()

    def _follow_log(self, text: str) -> None:
        reached = [number for number, (words, _) in enumerate(self._phases_left) if words in text]
        if reached and not self._shown_step:
            self._phase = self._phases_left[reached[-1]][1]
            del self._phases_left[: reached[-1] + 1]
            self._show()

    def _follow_metrics(self) -> None:
        records = read_records(self._metrics) if self._metrics.exists() else []
        for step, data in records:
            if step > self._shown_step and TRAINING_KEY in data:
                self._shown_step = step
                self._phase = f"step {step}/{self._steps}"
                self._status = step_summary(data)
                self._show()

    def _show(self) -> None:
        self._shown_s = time.monotonic()
        text = ", ".join(filter(None, [self._phase, self._status]))
        if self._bar is None:
            self._stream.write(f"[{self._shown_s - self._begin_s:5.0f} s] {self._name}: {text}\n")
            self._stream.flush()
        else:
            self._bar.n = self._shown_step
            self._bar.set_postfix_str(text)


def step_summary(data: dict[str, float]) -> str:
    """Reward and seconds of one step, as far as they were logged."""
    parts = (
        ("reward {:.3f}", "critic/score/mean"),
        ("step {:.1f} s", "timing_s/step"),
        ("rollout {:.1f} s", "timing_s/gen"),
    )
    return ", ".join(form.format(data[key]) for form, key in parts if key in data)
