"""The figures of a run, by the definitions of `vllm bench serve` (its `calculate_metrics`), without numpy.

TTFT is the time to the first piece of an answer. TPOT is the time from there to the last piece, by the tokens after the
first. ITL is the time between two pieces. E2EL is the time to the last piece. Requests that failed count in `failed`
alone. A peak is of one second, counted from the first request that was answered.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_serve.bench.outcome import RequestResult

PERCENTILES = (50.0, 90.0, 99.0)
METRICS = ("ttft", "tpot", "itl", "e2el")
FIGURES = (
    ("completed", "completed", "Successful requests:"),
    ("failed", "failed", "Failed requests:"),
    ("duration_s", "duration", "Benchmark duration (s):"),
    ("total_input", "total_input_tokens", "Total input tokens:"),
    ("total_output", "total_output_tokens", "Total generated tokens:"),
    ("request_rate", "request_throughput", "Request throughput (req/s):"),
    ("goodput", "request_goodput", "Request goodput (req/s):"),
    ("output_rate", "output_throughput", "Output token throughput (tok/s):"),
    ("peak_output_rate", "max_output_tokens_per_s", "Peak output token throughput (tok/s):"),
    ("peak_concurrency", "max_concurrent_requests", "Peak concurrent requests:"),
    ("total_rate", "total_token_throughput", "Total token throughput (tok/s):"),
)
"""The figures by their names here, with the keys and the words of `vllm bench serve`."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean, median, standard deviation and percentiles of one kind of times, in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of the requests of a run, or of one replica's. Rates are per second, tokens as the engine counts."""

    duration_s: float
    completed: int
    failed: int
    total_input: int
    total_output: int
    good: int | None
    peak_output_rate: float
    peak_concurrency: int
    times: Mapping[str, Spread]
    resent: int = 0

    @property
    def request_rate(self) -> float:
        return self.completed / self.duration_s

    @property
    def goodput(self) -> float | None:
        """Requests within all goals, per second; None without goals."""
        return None if self.good is None else self.good / self.duration_s

    @property
    def output_rate(self) -> float:
        return self.total_output / self.duration_s

    @property
    def total_rate(self) -> float:
        return (self.total_input + self.total_output) / self.duration_s


def figures_of(
    outcomes: Sequence[RequestResult],
    duration_s: float,
    *,
    goals_ms: Mapping[str, float] | None = None,
) -> Figures:
    """Return the figures of some requests in `duration_s`. `goals_ms` bounds ttft, tpot and e2el, in milliseconds."""
    answered = [outcome for outcome in outcomes if outcome.is_answered]
    values = {
        "ttft": [outcome.ttft_s for outcome in answered],
        "tpot": [tpot_s(outcome) for outcome in answered if outcome.output_len > 1],
        "itl": [itl_s for outcome in answered for itl_s in outcome.itls_s],
        "e2el": [outcome.latency_s for outcome in answered],
        "client_queue_time": [outcome.queue_s for outcome in answered],
    }
    rate, concurrency = _peaks(answered)
    return Figures(
        duration_s=max(duration_s, 1e-9),
        completed=len(answered),
        failed=len(outcomes) - len(answered),
        total_input=sum(outcome.input_len for outcome in answered),
        total_output=sum(outcome.output_len for outcome in answered),
        good=sum(_is_good(outcome, goals_ms) for outcome in answered) if goals_ms else None,
        peak_output_rate=rate,
        peak_concurrency=concurrency,
        times={name: spread(times) for name, times in values.items()},
        resent=sum(outcome.sent - 1 for outcome in outcomes),
    )


def tpot_s(outcome: RequestResult) -> float:
    """Seconds for each token after the first; 0 for an answer of one token."""
    return (outcome.latency_s - outcome.ttft_s) / (outcome.output_len - 1) if outcome.output_len > 1 else 0.0


def spread(values_s: Sequence[float]) -> Spread:
    """Return the spread of times in seconds; all figures are 0 without any time, as in vLLM."""
    values = sorted(values_s) or [0.0]
    return Spread(
        mean=1e3 * statistics.fmean(values),
        median=1e3 * statistics.median(values),
        std=1e3 * statistics.pstdev(values),
        percentiles={percent: 1e3 * percentile(values, percent) for percent in PERCENTILES},
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between two values in proportion, as numpy's default.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50), percentile([1.0, 2.0, 3.0, 4.0], 90)
    (2.5, 3.7)
    """
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _is_good(outcome: RequestResult, goals_ms: Mapping[str, float] | None) -> bool:
    seen = {"ttft": outcome.ttft_s, "tpot": tpot_s(outcome), "e2el": outcome.latency_s}
    return all(1e3 * seen[name] <= most for name, most in (goals_ms or {}).items())


def _peaks(answered: Sequence[RequestResult]) -> tuple[float, int]:
    """Return the most pieces in a second, and the most requests that were under way in one."""
    if not answered:
        return 0.0, 0
    begin_s = min(outcome.start_s for outcome in answered)
    pieces: Counter[int] = Counter()
    under_way: Counter[int] = Counter()
    for outcome in answered:
        from_s = outcome.start_s - begin_s
        at_s = from_s + outcome.ttft_s
        pieces[int(at_s)] += 1
        for itl_s in outcome.itls_s:
            at_s += itl_s
            pieces[int(at_s)] += 1
        for second in range(int(from_s), int(from_s + outcome.latency_s) + 1):
            under_way[second] += 1
    return float(max(pieces.values())), max(under_way.values())
