"""Reading what verl's file logger wrote, over all attempts of a trial."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

from verl_war.compare.plan import Trial

logger = logging.getLogger(__name__)

TRAINING_KEY = "training/global_step"
"""In every record of a training step. Records without it hold validation only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Metrics of one trial.

    Attributes:
        records: Step -> metric name -> value, of the training steps.
        validation: Step -> validation metrics, step 0 included.
        cold_steps: The first step after each start: it pays for warming up and is left out of timings.
    """

    records: dict[int, dict[str, float]] = field(default_factory=dict)
    validation: dict[int, dict[str, float]] = field(default_factory=dict)
    cold_steps: frozenset[int] = frozenset()

    @property
    def last_step(self) -> int:
        """The newest training step on record; 0 before the first."""
        return max(self.records, default=0)

    def values(self, key: str, warm: bool = False) -> dict[int, float]:
        """Step -> value of one metric, where it was logged.

        Args:
            key: verl's name of the metric.
            warm: Leave the first step after each start out.
        """
        steps = (step for step in sorted(self.records) if not (warm and step in self.cold_steps))
        return {step: self.records[step][key] for step in steps if key in self.records[step]}


def read_series(trial: Trial) -> Series:
    """Merge the metrics of all attempts of ``trial``.

    An attempt that went back to a checkpoint replaces what earlier ones logged from there on.

    Raises:
        ValueError: A line in the middle of a file is not what verl writes.
    """
    records: dict[int, dict[str, float]] = {}
    validation: dict[int, dict[str, float]] = {}
    cold: set[int] = set()
    for path in sorted(trial.metrics_directory.glob("attempt-*.jsonl")):
        attempt = read_records(path)
        first = min((step for step, data in attempt if TRAINING_KEY in data), default=None)
        if first is not None:
            records = {step: data for step, data in records.items() if step < first}
            cold = {step for step in cold if step < first} | {first}
        for step, data in attempt:
            (records if TRAINING_KEY in data else validation).setdefault(step, {}).update(data)
    for step, data in records.items():
        found = {key: value for key, value in data.items() if key.startswith("val-")}
        if found:
            validation[step] = found
    return Series(records=records, validation=validation, cold_steps=frozenset(cold))


def read_records(path: Path) -> list[tuple[int, dict[str, float]]]:
    """All (step, metrics) of one file. A last line without its end was cut off by an interruption and is dropped.

    Raises:
        ValueError: Another line is broken; names file and line.
    """
    complete, _, _ = path.read_text().rpartition("\n")
    return [_parse(line, f"{path}:{number}") for number, line in enumerate(complete.splitlines(), 1)]


def _parse(line: str, where: str) -> tuple[int, dict[str, float]]:
    try:
        record = json.loads(line)
        # orjson writes not-a-number as null.
        data = {key: value for key, value in record["data"].items() if isinstance(value, int | float)}
        return int(record["step"]), data
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{where}: expected a line of verl's file logger, found {line[:80]!r}") from error
