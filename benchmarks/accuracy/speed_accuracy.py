"""How near printed speeds are to published measurements, by the way in which requests arrive and kind of accelerator.

`python -m benchmarks.accuracy.speed_accuracy` writes what `plan` says of itself (plan/catalog/speed_accuracy.json). A
source counts with the factors fitted on all others.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any, get_args

from benchmarks.accuracy.speed_case import Case
from benchmarks.accuracy.speed_cases import load
from benchmarks.accuracy.speed_cases_later import ENGINE, load_later
from benchmarks.accuracy.speed_scores import error, leave_one_out
from hpc_serve.plan.catalog import SPEED_ACCURACY
from hpc_serve.plan.engine import Arrivals
from hpc_serve.plan.speed.estimate import own_classes, range_class, wide_classes
from hpc_serve.plan.speed.step import Factors

WITHIN_PER_CENT = 25
LEAST_TTFT_ROWS = 20
"""Quartiles of fewer rows are not given."""
ENOUGH = 0.85
"""Of the sources lie within the bounds of the others. The goal is 0.8 of new sources.

The formula was chosen with these rows in view: with 0.8 here, 11 of 18 new sources lay in the printed range.
"""
LEAST_SOURCES = 4
"""Bounds of fewer are not given."""
LEAST_CLASS_ROWS = 3
"""Of a class with fewer rows nothing is said."""


def every_case() -> list[Case]:
    """All rows of both files."""
    return [*load(), *load_later()]


def scored_rows(folds: dict[str, tuple[Factors, list[Case]]]) -> list[tuple[Case, Factors]]:
    """All rows of vLLM that are compared, and of other engines those on CPUs, each with the factors it is scored by.

    `folds` are those of speed_scores.leave_one_out.
    """
    rows = [(one, factors) for factors, fold in folds.values() for one in fold]
    return [row for row in rows if row[0].engine.startswith(ENGINE) or kind_of(row[0]) == "cpu"]


def kind_of(case: Case) -> str:
    """gpu, tpu or cpu."""
    assert case.roofline
    return case.roofline.accelerator.kind


def arrivals_of(case: Case) -> str:
    """steady or burst."""
    assert case.traffic
    return case.traffic.arrivals


def accuracy(rows: Sequence[tuple[Case, Factors]]) -> dict[str, dict[str, Any]]:
    """By arrivals and kind of accelerator: rows, sources, errors of a source, and quartiles of TTFT."""
    found: dict[str, dict[str, Any]] = {}
    for arrivals in get_args(Arrivals):
        for kind in ("gpu", "tpu", "cpu"):
            of_kind = [row for row in rows if kind_of(row[0]) == kind]
            there = [row for row in of_kind if arrivals_of(row[0]) == arrivals]
            if there:
                found.setdefault(arrivals, {})[kind] = _figures(there, of_kind)
    return found


def _figures(rows: Sequence[tuple[Case, Factors]], of_kind: Sequence[tuple[Case, Factors]]) -> dict[str, Any]:
    sources: dict[str, list[float]] = {}
    for case, factors in rows:
        sources.setdefault(case.source, []).append(abs(error(case, factors)))
    medians = sorted(statistics.median(errors) for errors in sources.values())
    figures: dict[str, Any] = {
        "rows": len(rows),
        "sources": len(medians),
        "median_error_per_cent": round(statistics.median(medians), 1),
        "ranges": {**_few(_ranges(of_kind)), **_ranges(rows)},
    }
    ratios = _ttft_ratios(rows)
    if len(ratios) >= LEAST_TTFT_ROWS:
        low, high = _quartiles([ratio for _, ratio in ratios])
        figures |= {
            "ttft_rows": len(ratios),
            "measured_by_printed_ttft_quartiles": [round(low, 1), round(high, 1)],
            "ttft_rows_in_quartiles_of_other_sources": _in_quartiles_of_others(ratios),
        }
    return figures


def _ranges(rows: Sequence[tuple[Case, Factors]]) -> dict[str, dict[str, Any]]:
    """By class: bounds of measured by printed speed. At least 17 of 20 sources lie within the bounds of the others.

    A source counts by its median row. As many as can be, the farthest off, lie beyond the bounds. The printed speed
    lies within them.
    """
    members: dict[str, dict[str, list[float]]] = {}
    for case, factors in rows:
        assert case.roofline
        there = members.setdefault(range_class(case.roofline), {})
        there.setdefault(case.source, []).append(case.measured / case.tokens_per_s(factors))
    found = {}
    for name, sources in sorted(members.items()):
        if len(sources) < LEAST_SOURCES:
            continue
        ratios = [statistics.median(ratios) for ratios in sources.values()]
        beyond = max((n for n in range(len(ratios) // 4) if _held(ratios, n) >= ENOUGH * len(ratios)), default=0)
        low, high = _bounds(ratios, beyond)
        found[name] = {
            "sources": len(ratios),
            "measured_by_printed": [min(1, math.floor(100 * low) / 100), max(1, math.ceil(100 * high) / 100)],
            "sources_in_bounds_of_others": _held(ratios, beyond),
        }
    return found


def _few(ranges: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The ranges of both kinds of arrivals together that are given where one kind alone has too few sources."""
    return {name: one for name, one in ranges.items() if one["sources"] == LEAST_SOURCES}


def _bounds(ratios: Sequence[float], beyond: int) -> tuple[float, float]:
    """The least and the largest of the ratios without the `beyond` farthest off."""
    near = sorted(ratios, key=lambda ratio: abs(math.log(ratio)))[: len(ratios) - beyond]
    return min(near), max(near)


def _held(ratios: Sequence[float], beyond: int) -> int:
    """How many of the ratios lie within the bounds of the others."""
    bounds = [_bounds([*ratios[:place], *ratios[place + 1 :]], beyond) for place in range(len(ratios))]
    return sum(low <= one <= high for one, (low, high) in zip(ratios, bounds, strict=True))


def _ttft_ratios(rows: Sequence[tuple[Case, Factors]]) -> list[tuple[str, float]]:
    """(source, measured / predicted) of the mean time to the first token of each row that has it."""
    found = []
    for case, factors in rows:
        predicted = case.ttft_s(factors)
        if case.measured_ttft_s and predicted:
            found.append((case.source, case.measured_ttft_s / predicted))
    return found


def _in_quartiles_of_others(ratios: Sequence[tuple[str, float]]) -> int:
    """How many rows lie between the quartiles of all rows of other sources: half of them, if sources were alike."""
    count = 0
    for source, ratio in ratios:
        low, high = _quartiles([other for name, other in ratios if name != source])
        count += low <= ratio <= high
    return count


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def class_accuracy(rows: Sequence[tuple[Case, Factors]]) -> dict[str, dict[str, Any]]:
    """By class of plans (plan/speed/estimate.py): how far what was measured is from what is printed."""
    members: dict[str, list[tuple[Case, Factors]]] = {}
    for case, factors in rows:
        assert case.roofline
        own = own_classes(case.roofline)[-1 if case.format_not_told else 0 :]
        for name in (*own, *wide_classes(case.roofline)):
            members.setdefault(name, []).append((case, factors))
    spreads = {name: _spread(there) for name, there in sorted(members.items()) if len(there) >= LEAST_CLASS_ROWS}
    return {name: spread for name, spread in spreads.items() if not _says_no_more(name, spread, spreads)}


def _says_no_more(name: str, spread: dict[str, Any], spreads: dict[str, dict[str, Any]]) -> bool:
    """Whether a class of runs with CUDA graphs or without has the rows of the class with them alone."""
    narrow, _, both = name.partition(", with CUDA")
    return bool(both) and spreads.get(narrow) == spread


def _spread(rows: Sequence[tuple[Case, Factors]]) -> dict[str, Any]:
    ratios = sorted(case.measured / case.tokens_per_s(factors) for case, factors in rows)
    low, high = _quartiles(ratios)
    return {
        "rows": len(ratios),
        "sources": len({case.source for case, _ in rows}),
        "measured_by_printed": [round(ratios[0], 2), round(ratios[-1], 2)],
        "measured_by_printed_quartiles": [round(low, 2), round(high, 2)],
    }


def document(rows: Sequence[tuple[Case, Factors]]) -> str:
    """The text of the file."""
    about = "How near `plan` is to published measurements; python -m benchmarks.accuracy.speed_accuracy writes it."
    return json.dumps({"_about": about, **accuracy(rows), "classes": class_accuracy(rows)}, indent=1) + "\n"


if __name__ == "__main__":
    text = document(scored_rows(leave_one_out(every_case())))
    SPEED_ACCURACY.write_text(text, encoding="utf-8")
    print(text)
