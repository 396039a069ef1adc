"""Errors of predicted output tokens per second, the fit of the factors, and tables of both.

To predict a source, the factors are fitted on all other sources, so that no row influences its own prediction.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache

from benchmarks.accuracy.speed_case import Case
from benchmarks.accuracy.speed_cases_later import ENGINE
from hpc_serve.plan.speed.step import EXPECTED, FITTED, Factors

NEUTRAL = replace(EXPECTED, flops=0.7, expert_flops=0.3, bandwidth=0.8, kernel_s=5e-6, sequence_s=40e-6, request_s=5e-3)
"""Where every fit starts: guesses that use no row."""
HIGHEST_SHARE = 0.95
STEPS = (1.3, 1.1)
"""Ratios of neighbouring values that the fit tries, first coarse, then fine."""
SATURATES = 0.4
"""An error with this logarithm weighs half as much as by its size, and larger ones less. So a source that is off for a
cause that no term has hardly draws the factors."""
Losses = Callable[[Factors], dict[str, float]]


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


def is_fitted(case: Case) -> bool:
    """Whether factors are fitted on a row: of vLLM, on GPUs or TPUs, with one stage, one data-parallel rank, and CUDA
    graphs."""
    assert case.roofline
    layout, engine = case.roofline.layout, case.roofline.engine
    is_plain = layout.pipeline_parallel_size == layout.data_parallel_size == 1 and not engine.enforce_eager
    return is_plain and case.engine.startswith(ENGINE) and case.roofline.accelerator.kind != "cpu"


def loss(sources: dict[str, list[Case]], factors: Factors) -> float:
    """Mean over sources of the mean absolute logarithm of predicted ÷ measured: each source counts once."""
    return statistics.fmean(
        statistics.fmean(abs(math.log(one.tokens_per_s(factors) / one.measured)) for one in rows)
        for rows in sources.values()
    )


def saturating_losses(cases: Sequence[Case]) -> Losses:
    """The loss of each source with rows for the fit, by factors. Each is computed once."""
    sources = by_source([one for one in cases if not one.left_out and is_fitted(one)])

    def of(row: Case, factors: Factors) -> float:
        size = abs(math.log(row.tokens_per_s(factors) / row.measured))
        return size / (1 + size / SATURATES)

    return cache(
        lambda factors: {name: statistics.fmean(of(row, factors) for row in rows) for name, rows in sources.items()}
    )


def fit(losses: Losses, without: Collection[str] = (), start: Factors = NEUTRAL) -> Factors:
    """The factors with the least mean loss. One factor changes at a time, until no step helps. Shares stay below 1."""

    def mean(factors: Factors) -> float:
        return statistics.fmean(value for name, value in losses(factors).items() if name not in without)

    best, least = start, mean(start)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for name, ratio in itertools.product(FITTED, (step, 1 / step)):
                value = float(f"{getattr(best, name) * ratio:.3g}")
                if not name.endswith("_s") and value > HIGHEST_SHARE:
                    continue
                tried = replace(best, **{name: value})
                found = mean(tried)
                if found < least - 1e-5:
                    best, least, improved = tried, found, True
    return best


def leave_one_out(cases: Sequence[Case]) -> dict[str, tuple[Factors, list[Case]]]:
    """For each source the factors fitted on all others, and its rows."""
    losses = saturating_losses(cases)
    return {name: (fit(losses, {name}), rows) for name, rows in by_source(cases).items()}


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
                f"{one.measured:8.0f} {error(one, factors):+5.0f} %  {estimate.speed.bound}"
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
