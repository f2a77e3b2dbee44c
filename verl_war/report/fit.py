"""How well the model of engine step times explains the engines: windows between snapshots against its predictions."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_war.core.cost_model import ReplicaPace
from verl_war.core.step_time import StepTime, StepTimeFit, Window

MAX_POINTS = 4000
"""Points of the plot; every second one is dropped when there are more."""

WARM_ITERATIONS = 100
"""Iterations after which the prior counts little; predictions before that are not judged."""


@dataclass(slots=True)
class FitQuality:
    """Predicts every window before the model learns from it, as the router does.

    Attributes:
        points: (predicted, measured) seconds per iteration of windows, thinned out. Predictions are those of the model
            times the replica's slowness, as placement counts with.
        windows: Windows that were judged.
    """

    points: list[tuple[float, float]] = field(default_factory=list)
    windows: int = 0
    _fit: StepTimeFit = field(default_factory=StepTimeFit)
    _seen: int = 0
    _every: int = 1
    _weight: float = 0.0
    _mean_s: float = 0.0
    _spread: float = 0.0
    _error: float = 0.0
    _model_error: float = 0.0
    _paces: dict[str, ReplicaPace] = field(default_factory=dict)

    def add(self, replica_id: str, window: Window) -> None:
        """Judge the model by a window, then teach it. One that can't be tells nothing."""
        if not window.is_telling:
            return
        iterations = window.iterations
        pace = self._paces.setdefault(replica_id, ReplicaPace())
        if self._fit.iterations >= WARM_ITERATIONS:
            model_s, measured_s = window.predicted_s(self._fit.value()) / iterations, window.busy_s / iterations
            self._model_error += iterations * (measured_s - model_s) ** 2
            self._judge(model_s * pace.slowness, measured_s, iterations)
        self._fit.observe(*window)
        pace.update(window, self._fit.value())

    def model(self) -> StepTime:
        """The model at the end."""
        return self._fit.value()

    def r2(self) -> float | None:
        """Share of the variance of seconds per iteration that was predicted, weighted by iterations; None when unknown.

        Source: coefficient of determination, 1 - sum of squared errors over sum of squares about the mean.
        """
        return 1.0 - self._error / self._spread if self._is_judged else None

    def model_r2(self) -> float | None:
        """The same for the fleet's model alone, without the replicas' slowness."""
        return 1.0 - self._model_error / self._spread if self._is_judged else None

    @property
    def _is_judged(self) -> bool:
        return self.windows >= 2 and self._spread > 0

    def _judge(self, predicted_s: float, measured_s: float, iterations: int) -> None:
        self.windows += 1
        self._error += iterations * (measured_s - predicted_s) ** 2
        # Welford 1962, weighted: the mean and the sum of squares about it in one pass.
        self._weight += iterations
        distance_s = measured_s - self._mean_s
        self._mean_s += distance_s * iterations / self._weight
        self._spread += iterations * distance_s * (measured_s - self._mean_s)
        self._seen += 1
        if self._seen % self._every == 0:
            self.points.append((predicted_s, measured_s))
        if len(self.points) > MAX_POINTS:
            self.points, self._every = self.points[::2], 2 * self._every
