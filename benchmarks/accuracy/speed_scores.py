"""Errors of predicted output tokens per second, the fit of the factors, and tables of both.

To predict a source, the factors are fitted on all other sources, so that no row influences its own prediction.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.accuracy.speed_case import Case
from hpc_serve.plan.speed.step import EXPECTED, FITTED, Factors

NEUTRAL = replace(EXPECTED, flops=0.5, expert_flops=0.5, bandwidth=0.8, kernel_s=5e-6, sequence_s=20e-6)
"""Where every fit starts: guesses that use no row."""
HIGHEST_SHARE = 0.95
STEPS = (1.3, 1.1)
"""Ratios of neighbouring values that the fit tries, first coarse, then fine."""


def error(case_: Case, factors: Factors) -> float:
    """Relative error of output tokens per second, in per cent."""
    return 100 * (case_.tokens_per_s(factors) / case_.measured - 1)


def by_source(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """The rows that are compared, by source."""
    found: dict[str, list[Case]] = {}
    for one in cases:
        if not one.left_out:
            found.setdefault(one.source, []).append(one)
    return found


def loss(sources: dict[str, list[Case]], factors: Factors) -> float:
    """Mean over sources of the mean absolute logarithm of predicted ÷ measured: each source counts once."""
    return statistics.fmean(
        statistics.fmean(abs(math.log(one.tokens_per_s(factors) / one.measured)) for one in rows)
        for rows in sources.values()
    )


def fit(sources: dict[str, list[Case]], start: Factors = NEUTRAL) -> Factors:
    """The factors with the least loss. One factor changes at a time, until no step helps. Shares stay below 1."""
    best, least = start, loss(sources, start)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for name, ratio in itertools.product(FITTED, (step, 1 / step)):
                value = getattr(best, name) * ratio
                if not name.endswith("_s") and value > HIGHEST_SHARE:
                    continue
                tried = replace(best, **{name: value})
                found = loss(sources, tried)
                if found < least - 1e-5:
                    best, least, improved = tried, found, True
    return best


def leave_one_out(cases: Sequence[Case]) -> dict[str, tuple[Factors, list[Case]]]:
    """For each source the factors fitted on all others, and its rows."""
    sources = by_source(cases)
    return {
        name: (fit({other: rows for other, rows in sources.items() if other != name}), rows)
        for name, rows in sources.items()
    }


def median_errors(folds: dict[str, tuple[Factors, list[Case]]]) -> dict[str, float]:
    """By source, the median absolute error of output tokens per second, in per cent."""
    return {
        name: statistics.median(abs(error(one, factors)) for one in rows) for name, (factors, rows) in folds.items()
    }


def source_errors(cases: Sequence[Case], factors: Factors) -> dict[str, float]:
    """By source, the median absolute error of output tokens per second under the same factors, in per cent."""
    return median_errors({name: (factors, rows) for name, rows in by_source(cases).items()})


def report(folds: dict[str, tuple[Factors, list[Case]]]) -> list[str]:
    """Lines for people: each source and its rows."""
    lines = [f"{'row':46} {'in':>6} {'out':>5} {'asked':>6} {'runs':>5} {'ideal':>8} {'expected':>8} {'measured':>8}"]
    errors = median_errors(folds)
    for name, (factors, rows) in folds.items():
        lines.append(f"{name}: median absolute error {errors[name]:.0f} %")
        for one in rows:
            estimate = one.predict(factors)
            ideal, expected = estimate.ideal.output_tokens_per_s, one.tokens_per_s(factors)
            traffic = estimate.traffic
            lines.append(
                f"  {one.id[:44]:44} {traffic.input_tokens:6} {traffic.output_tokens:5} {traffic.concurrency:6} "
                f"{estimate.batch:5.0f} {one.replicas * ideal:8.0f} {expected:8.0f} "
                f"{one.measured:8.0f} {error(one, factors):+5.0f} %  {estimate.bound}"
            )
    return lines


def table(cases: Sequence[Case], folds: dict[str, tuple[Factors, list[Case]]]) -> str:
    """The table for people."""
    errors = median_errors(folds)
    lines = [*report(folds), f"median over {len(errors)} sources: {statistics.median(errors.values()):.1f} %"]
    left = [one for one in cases if one.left_out]
    lines.append(f"compared {len(cases) - len(left)} of {len(cases)}; left out:")
    lines += [f"  {one.id}: {one.left_out}" for one in left]
    return "\n".join(lines)
