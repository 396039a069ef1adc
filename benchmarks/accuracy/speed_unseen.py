"""Scores sources of 2026 that nobody had used against the ranges that `plan` prints: data/speed_cases_unseen.jsonl.

`python -m benchmarks.accuracy.speed_unseen` prints a row for each source of vLLM, by its median row. Neither a factor
nor a range comes from these rows.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.accuracy.speed_cases_later import ENGINE, load_later
from benchmarks.accuracy.speed_scores import by_source
from hpc_serve.plan.speed.estimate import speed_range
from hpc_serve.plan.speed.step import EXPECTED


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """One source: its rows, its median of measured by printed speed, and the range that is printed for that row."""

    source: str
    rows: int
    ratio: float
    bounds: tuple[float, float] | None

    @property
    def is_held(self) -> bool:
        """Whether the source lies in the range."""
        return self.bounds is not None and self.bounds[0] <= self.ratio <= self.bounds[1]


def unseen() -> list[Unseen]:
    """Return every source of vLLM with rows that can be scored."""
    cases = [case for case in load_later("speed_cases_unseen.jsonl") if case.engine.startswith(ENGINE)]
    found = []
    for source, rows in by_source([case for case in cases if not case.left_out]).items():
        ratios = sorted((case.measured / case.tokens_per_s(EXPECTED), number) for number, case in enumerate(rows))
        ratio, place = ratios[len(ratios) // 2]
        case = rows[place]
        assert case.roofline
        assert case.traffic
        printed = speed_range(case.roofline, case.traffic)
        bounds = tuple(printed["measured_by_printed"]) if printed else None
        found.append(Unseen(source=source, rows=len(rows), ratio=ratio, bounds=bounds))
    return found


if __name__ == "__main__":
    sources = unseen()
    for one in sorted(sources, key=lambda one: one.ratio):
        where = f"{one.bounds[0]:.2f} to {one.bounds[1]:.2f}" if one.bounds else "no range"
        verdict = "in range" if one.is_held else "outside"
        print(f"{one.ratio:5.2f} of the printed speed ({where}: {verdict}), {one.rows} rows: {one.source}")
    errors = [abs(1 / one.ratio - 1) for one in sources]
    held = sum(one.is_held for one in sources)
    print(f"{held} of {len(sources)} in range, median error {100 * statistics.median(errors):.0f} %")
