"""The figures of a run, by the definitions and under the keys of `vllm bench serve`, without numpy.

TTFT is the time to the first piece of an answer. TPOT is the time from there to the last piece, by the tokens after the
first. ITL is the time between two pieces. E2EL is the time to the last piece. Requests that failed count in `failed`
alone. A peak is of one second, counted from the first request that was answered. Rates are per second.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hpc_serve.bench.run import RequestResult

PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "tpot", "itl", "e2el")


def figures_of(
    outcomes: Sequence[RequestResult],
    duration_s: float,
    *,
    goals_ms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the figures of some requests in `duration_s`. `goals_ms` bounds ttft, tpot and e2el, in milliseconds."""
    answered = [outcome for outcome in outcomes if outcome.is_answered]
    duration_s = max(duration_s, 1e-9)
    input_tokens = sum(outcome.input_len for outcome in answered)
    output_tokens = sum(outcome.output_len for outcome in answered)
    peak_rate, peak_requests = _peaks(answered)
    good = sum(_is_good(outcome, goals_ms) for outcome in answered) / duration_s if goals_ms else None
    return {
        "completed": len(answered),
        "failed": len(outcomes) - len(answered),
        "duration": duration_s,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(answered) / duration_s,
        "request_goodput": good,
        "output_throughput": output_tokens / duration_s,
        "max_output_tokens_per_s": peak_rate,
        "max_concurrent_requests": peak_requests,
        "total_token_throughput": (input_tokens + output_tokens) / duration_s,
        "rtfx": 0.0,  # of speech; vLLM writes it for every model
        **spread("ttft", [outcome.ttft_s for outcome in answered]),
        **spread("tpot", [tpot_s(outcome) for outcome in answered if outcome.output_len > 1]),
        **spread("itl", [itl_s for outcome in answered for itl_s in outcome.itls_s]),
        **spread("e2el", [outcome.latency_s for outcome in answered]),
    }


def tpot_s(outcome: RequestResult) -> float:
    """Seconds for each token after the first; 0 for an answer of one token."""
    return (outcome.latency_s - outcome.ttft_s) / (outcome.output_len - 1) if outcome.output_len > 1 else 0.0


def spread(name: str, values_s: Sequence[float]) -> dict[str, float]:
    """Return mean, median, deviation and percentiles of some seconds, in milliseconds; 0 without any, as in vLLM.

    >>> spread("ttft", [0.001, 0.002, 0.003, 0.004])["p90_ttft_ms"]
    3.7
    """
    values = sorted(1e3 * value for value in values_s) or [0.0]
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {
        f"mean_{name}_ms": statistics.fmean(values),
        f"median_{name}_ms": statistics.median(values),
        f"std_{name}_ms": statistics.pstdev(values),
        **{f"p{percent}_{name}_ms": cuts[percent - 1] for percent in PERCENTILES},
    }


def _is_good(outcome: RequestResult, goals_ms: Mapping[str, float]) -> bool:
    seen = {"ttft": outcome.ttft_s, "tpot": tpot_s(outcome), "e2el": outcome.latency_s}
    return all(1e3 * seen[name] <= most for name, most in goals_ms.items())


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
