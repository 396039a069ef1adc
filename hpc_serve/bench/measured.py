"""A run with all that is shown of it: figures, prediction, faults of its answers. The curves of several runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpc_serve.bench.figures import Figures, figures_of
from hpc_serve.bench.notes import notes_on
from hpc_serve.bench.outcome import Prediction, RequestResult, Run
from hpc_serve.pages.charts import Curve

PREDICTED, WORST = "6 4", "2 3"
"""The dashes of a predicted curve, and of a 99th percentile."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run. `goals_ms` bound its times (goodput); `wrong` are answers that a check refused, None without a check."""

    run: Run
    goals_ms: Mapping[str, float] | None = None
    prediction: Prediction | None = None
    wrong: Mapping[int, str] | None = None

    @property
    def figures(self) -> Figures:
        return self._figures_of(self.run.outcomes)

    def _figures_of(self, outcomes: Sequence[RequestResult]) -> Figures:
        return figures_of(outcomes, self.run.duration_s, goals_ms=self.goals_ms)

    @property
    def predicted_rate(self) -> float | None:
        """Return the predicted tokens per second, if there is a prediction."""
        return self.prediction.output_rate if self.prediction else None

    def of_replicas(self) -> dict[str, Figures]:
        """Return the figures of each replica; under "" those of requests that none answered."""
        found: dict[str, list[RequestResult]] = {name: [] for name in self.run.replicas}
        for outcome in self.run.outcomes:
            found.setdefault(outcome.replica, []).append(outcome)
        return {name: self._figures_of(part) for name, part in found.items()}

    @property
    def notes(self) -> list[str]:
        """Return the remarks that belong beside the figures, as sentences."""
        if not self.wrong:
            return notes_on(self.run)
        first = self.wrong[min(self.wrong)]
        return [*notes_on(self.run), f"{len(self.wrong)} answers are wrong by --check, the first: {first}"]


def series_of(runs: Sequence[Measured]) -> dict[str, list[Measured]]:
    """Return the runs of each service and workload, in the order of their load."""
    found: dict[str, list[Measured]] = {}
    for one in sorted(runs, key=lambda one: one.run.load):
        found.setdefault(f"{one.run.service}, {one.run.workload}", []).append(one)
    return found


def load_curves(runs: Sequence[Measured]) -> list[tuple[str, list[Curve]]]:
    """Return the charts of throughput and times by load: a title, and the curves of each service and workload."""

    def curves(value: Callable[[Measured], float | None], dashes: str = "") -> list[Curve]:
        return [
            Curve(
                name=title,
                points=[(one.run.load, seen) for one in ones if (seen := value(one)) is not None],
                series=place,
                dashes=dashes,
            )
            for place, (title, ones) in enumerate(series_of(runs).items())
        ]

    expected = curves(lambda one: one.predicted_rate, PREDICTED)
    is_dashed = ", predicted dashed" if any(curve.points for curve in expected) else ""
    charts = [(f"Output tokens/s{is_dashed}", [*curves(lambda one: one.figures.output_rate), *expected])]
    for name in ("ttft", "tpot"):
        middle = curves(lambda one, name=name: one.figures.times[name].median)  # type: ignore[misc]
        worst = curves(lambda one, name=name: one.figures.times[name].percentiles[99.0], WORST)  # type: ignore[misc]
        charts.append((f"{name.upper()} (ms): median, P99 dotted", middle + worst))
    return charts


def load_title(runs: Sequence[Measured]) -> str:
    """Return what the load of these runs counts."""
    return "requests per second" if any(one.run.pace.is_rate for one in runs) else "requests at once"
