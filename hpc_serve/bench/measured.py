"""A run with all that is shown of it: its figures, the prediction, and the faults of its answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_serve.bench.figures import Figures, by_replica, figures_of
from hpc_serve.bench.notes import notes_on
from hpc_serve.bench.outcome import Run
from hpc_serve.bench.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run. `goals_ms` bound its times (goodput); `wrong` are answers that a check refused, None without a check."""

    run: Run
    goals_ms: Mapping[str, float] | None = None
    prediction: Prediction | None = None
    wrong: Mapping[int, str] | None = None

    @property
    def figures(self) -> Figures:
        return figures_of(self.run.outcomes, self.run.duration_s, goals_ms=self.goals_ms)

    def of_replicas(self) -> dict[str, Figures]:
        """Return the figures of each replica; under "" those of requests that none answered."""
        return {
            name: figures_of(part, self.run.duration_s, goals_ms=self.goals_ms)
            for name, part in by_replica(self.run).items()
        }

    @property
    def notes(self) -> list[str]:
        """Return the remarks that belong beside the figures, as sentences."""
        if not self.wrong:
            return notes_on(self.run)
        first = self.wrong[min(self.wrong)]
        return [*notes_on(self.run), f"{len(self.wrong)} answers are wrong by --check, the first: {first}"]


def by_series(runs: Sequence[Measured]) -> dict[str, list[Measured]]:
    """Return the runs of each service and workload, in the order of what comes."""
    found: dict[str, list[Measured]] = {}
    for one in runs:
        found.setdefault(f"{one.run.service}, {one.run.workload}", []).append(one)
    return {title: sorted(series, key=lambda one: load_of(one.run)) for title, series in found.items()}


def load_of(run: Run) -> float:
    """Return how many requests come: per second at a rate, else at once."""
    if not math.isinf(run.request_rate):
        return run.request_rate
    return float(run.max_concurrency or len(run.requests))


def load_title(runs: Sequence[Measured]) -> str:
    """What `load_of` counts."""
    return "requests at once" if all(math.isinf(one.run.request_rate) for one in runs) else "requests per second"
