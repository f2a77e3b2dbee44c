"""The numbers of a comparison: totals, medians and paired ratios. What they mean is for the reader to say."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from verl_war.compare.series import Series

Aggregate = Literal["total", "median", "mean"]

Runs = Mapping[str, Sequence[Series]]
"""Arm -> its trials, in the order of their repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One row of the table.

    Attributes:
        name: What it is, for people.
        source: How it follows from verl's metrics.
        aggregate: ``total`` sums over steps and trials; ``median`` and ``mean`` are over all steps of all trials.
        per_step: Step -> value.
        warm: Leave the first step after every start out.
        digits: Decimals to show.
    """

    name: str
    source: str
    aggregate: Aggregate
    per_step: Callable[[Series], dict[int, float]]
    warm: bool = False
    digits: int = 0

    def values(self, series: Series) -> dict[int, float]:
        """Step -> value of the steps that count."""
        values = self.per_step(series)
        return {step: value for step, value in values.items() if not (self.warm and step in series.cold_steps)}


def trajectories(series: Series) -> dict[int, float]:
    """Trajectories per step: all tokens over the mean tokens of one."""
    totals = series.values("perf/total_num_tokens")
    prompts, responses = series.values("prompt_length/mean"), series.values("response_length/mean")
    return {
        step: float(round(total / (prompts[step] + responses[step])))
        for step, total in totals.items()
        if prompts.get(step, 0) + responses.get(step, 0) > 0
    }


def _logged(key: str) -> Callable[[Series], dict[int, float]]:
    return lambda series: series.values(key)


def _times_trajectories(key: str) -> Callable[[Series], dict[int, float]]:
    def per_step(series: Series) -> dict[int, float]:
        means = series.values(key)
        return {step: means[step] * count for step, count in trajectories(series).items()}

    return per_step


def _per_second(key: str, seconds_key: str) -> Callable[[Series], dict[int, float]]:
    tokens = _times_trajectories(key)

    def per_step(series: Series) -> dict[int, float]:
        seconds = series.values(seconds_key)
        return {step: count / seconds[step] for step, count in tokens(series).items() if seconds.get(step)}

    return per_step


REWARD_KEY = "critic/score/mean"

QUANTITIES: tuple[Quantity, ...] = (
    Quantity(
        name="reward, mean over steps", source=REWARD_KEY, aggregate="mean", digits=4, per_step=_logged(REWARD_KEY)
    ),
    Quantity(
        name="trajectories",
        source="perf/total_num_tokens over prompt_length/mean + response_length/mean",
        aggregate="total",
        per_step=trajectories,
    ),
    Quantity(
        name="prompt tokens",
        source="prompt_length/mean times trajectories",
        aggregate="total",
        per_step=_times_trajectories("prompt_length/mean"),
    ),
    Quantity(
        name="response tokens (generated and tool results)",
        source="response_length/mean times trajectories",
        aggregate="total",
        per_step=_times_trajectories("response_length/mean"),
    ),
    Quantity(
        name="generated tokens",
        source="perf/generated_tokens, which the patch verl_generated_tokens adds for all arms",
        aggregate="total",
        per_step=_logged("perf/generated_tokens"),
    ),
    Quantity(
        name="turns of a trajectory, mean",
        source="num_turns/mean: messages of user, assistant and tools",
        aggregate="mean",
        digits=2,
        per_step=_logged("num_turns/mean"),
    ),
    Quantity(
        name="rollout s, median",
        source="timing_s/gen",
        aggregate="median",
        digits=2,
        warm=True,
        per_step=_logged("timing_s/gen"),
    ),
    Quantity(
        name="step s, median",
        source="timing_s/step",
        aggregate="median",
        digits=2,
        warm=True,
        per_step=_logged("timing_s/step"),
    ),
    Quantity(
        name="response tokens per rollout s, median",
        source="response tokens over timing_s/gen",
        aggregate="median",
        warm=True,
        per_step=_per_second("response_length/mean", "timing_s/gen"),
    ),
)


def aggregate(quantity: Quantity, trials: Sequence[Series]) -> float | None:
    """One number for all trials of an arm; None when verl logged nothing for it."""
    values = [value for series in trials for value in quantity.values(series).values()]
    if not values:
        return None
    return {"total": math.fsum, "median": median, "mean": fmean}[quantity.aggregate](values)


def step_ratios(quantity: Quantity, arm: Sequence[Series], base: Sequence[Series]) -> list[float]:
    """Ratios of ``arm`` over ``base`` of the same step of the same repeat."""
    ratios = []
    for one, other in zip(arm, base, strict=False):
        values, bases = quantity.values(one), quantity.values(other)
        ratios += [values[step] / bases[step] for step in sorted(values) if bases.get(step)]
    return ratios


def _repeat_ratios(quantity: Quantity, arm: Sequence[Series], base: Sequence[Series]) -> list[float]:
    pairs = [(aggregate(quantity, [one]), aggregate(quantity, [other])) for one, other in zip(arm, base, strict=False)]
    return [one / other for one, other in pairs if one is not None and other]


def compare_quantity(quantity: Quantity, arm: Sequence[Series], base: Sequence[Series]) -> dict[str, Any] | None:
    """Ratio of two arms with its spread over steps and over repeats; None when there is nothing to divide."""
    value, base_value = aggregate(quantity, arm), aggregate(quantity, base)
    if value is None or not base_value:
        return None
    per_step, per_repeat = step_ratios(quantity, arm, base), _repeat_ratios(quantity, arm, base)
    return {
        "ratio": value / base_value,
        "steps_min_max": [min(per_step), max(per_step)] if per_step else None,
        "repeats_min_max": [min(per_repeat), max(per_repeat)] if len(per_repeat) > 1 else None,
    }


def summarise_arm(trials: Sequence[Series]) -> dict[str, Any]:
    """All numbers of one arm."""
    rewards = [list(series.values(REWARD_KEY).values()) for series in trials]
    return {
        "steps": [len(series.records) for series in trials],
        "missing_steps": [missing_steps(series) for series in trials],
        "reward_first": _mean_of(values[0] for values in rewards if values),
        "reward_last": _mean_of(values[-1] for values in rewards if values),
        "quantities": {quantity.name: aggregate(quantity, trials) for quantity in QUANTITIES},
        "validation": _validation(trials),
        "war": _war_metrics(trials),
    }


def missing_steps(series: Series) -> list[int]:
    """Steps up to the last one that are not on record."""
    return sorted(set(range(1, series.last_step + 1)) - set(series.records))


def summarise(runs: Runs) -> dict[str, Any]:
    """Everything that the report states of the trials. The first arm is the base of the ratios."""
    base, *others = runs
    return {
        "base": base,
        "arms": {arm: summarise_arm(trials) for arm, trials in runs.items()},
        "ratios": {
            arm: {quantity.name: compare_quantity(quantity, runs[arm], runs[base]) for quantity in QUANTITIES}
            for arm in others
        },
        "series": {
            arm: [{str(step): data for step, data in sorted(series.records.items())} for series in trials]
            for arm, trials in runs.items()
        },
    }


def _validation(trials: Sequence[Series]) -> dict[str, dict[str, float]]:
    """First and last value of verl's core validation metrics, mean over trials."""
    keys = sorted({key for series in trials for data in series.validation.values() for key in data})
    result = {}
    for key in (key for key in keys if key.startswith("val-core/")):
        columns = [[data[key] for _, data in sorted(series.validation.items()) if key in data] for series in trials]
        columns = [column for column in columns if column]
        result[key] = {
            "first": fmean(column[0] for column in columns),
            "last": fmean(column[-1] for column in columns),
        }
    return result


def _war_metrics(trials: Sequence[Series]) -> dict[str, dict[str, float]]:
    """Median and extremes over steps of each metric that WAR logged."""
    keys = sorted({key for series in trials for data in series.records.values() for key in data})
    columns = {key: [v for series in trials for v in series.values(key).values()] for key in keys}
    return {
        key: {"median": median(values), "min": min(values), "max": max(values)}
        for key, values in columns.items()
        if key.startswith("war/")
    }


def _mean_of(values: Iterable[float]) -> float | None:
    known = list(values)
    return fmean(known) if known else None
