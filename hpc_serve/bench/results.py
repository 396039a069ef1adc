"""A run's result: figures under the keys of `vllm bench serve --save-result`, so that what reads its files reads ours.

Text, pages and pictures show this mapping; nothing else is made of a run. Ours come after vLLM's keys: the service, how
requests were split, the figures of each replica, what was predicted, how busy this program was, and remarks: this
program was the limit, or the requests were not as asked for. Several runs are a list of such objects, as the
summary.json of `vllm bench sweep`. One run in a file of this name is a list too, since programs that read sweeps look
for it.

Figures follow the definitions of `vllm bench serve`, without numpy. TTFT is the time to the first piece of an answer.
TPOT is the time from there to the last piece, by the tokens after the first. ITL is the time between two pieces. E2EL
is the time to the last piece. Requests that failed count in `failed` alone. A peak is of one second, counted from the
first request that was answered. Rates are per second.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_serve.bench.run import RequestResult, Run
from hpc_serve.units import number_of

SUMMARY = "summary.json"
_PERCENTILES = (50, 90, 99)


def figures_of(
    outcomes: Sequence[RequestResult], duration_s: float, *, goals_ms: Mapping[str, float] | None = None
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
        **{f"p{percent}_{name}_ms": cuts[percent - 1] for percent in _PERCENTILES},
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


# -- remarks

_MOST_BUSY = 0.8
_MOST_LATE_S = 0.02
_MOST_ERRORS = 3
_MOST_WAITING = 0.25
_OTHERS_SHARE = 0.01
"""Of the run's tokens: an engine counts the last tokens of the run before, or of the first request, a moment late."""


def notes_on(run: Run, wrong: Mapping[int, str]) -> list[str]:
    """Return sentences, the gravest first. `wrong` are the faults of answers, by the place of the request."""
    return [*_program(run), *_others(run), *_lengths(run), *_failures(run), *_answers(run, wrong)]


def _program(run: Run) -> Iterator[str]:
    """Say that the run was interrupted, or that this program was the limit."""
    if run.interrupted:
        yield (
            f"The run was interrupted: {len(run.outcomes)} of {len(run.requests)} requests had ended. The figures are "
            "of these."
        )
    busy, late_s = run.busy, run.late_s
    if busy >= _MOST_BUSY:
        yield (
            f"This program was busy {busy:.0%} of the time: the figures are its own, and the service may be faster. "
            "Run it on several nodes at once, each with a part of the load."
        )
    elif late_s >= _MOST_LATE_S:
        yield (
            f"One time in twenty this program woke {1e3 * late_s:.0f} ms late or later, though it was busy {busy:.0%} "
            "of the time: other programs use this machine's cores, and times are too long by as much. Run it on a "
            "quieter node."
        )


def _others(run: Run) -> Iterator[str]:
    """Say that others used the engines, or the cores beside them."""
    own = sum(outcome.output_len for outcome in run.outcomes)
    counted_late = len(run.replicas) + _OTHERS_SHARE * own
    if not run.interrupted and run.others_tokens is not None and run.others_tokens > counted_late:
        yield (
            f"The engines generated {run.others_tokens:,.0f} tokens for other requests meanwhile, and {own:,} for "
            "these: alone, the service is faster."
        )
    if run.waited is not None and run.waited > _MOST_WAITING:
        yield (
            f"An engine is on this node, where programs waited for a core {run.waited:.0%} of the time: it may be "
            "faster where it has its cores alone."
        )


def _lengths(run: Run) -> Iterator[str]:
    """Name answers and prompts that are longer or shorter than asked for."""
    asked = [(run.requests[outcome.place], outcome) for outcome in run.outcomes if outcome.is_answered]
    prompts = [outcome.input_len - ask.input_len for ask, outcome in asked if ask.input_len is not None]
    if any(prompts):
        yield _off("prompts", prompts, len(asked))
    answers = [outcome.output_len - ask.output_len for ask, outcome in asked if ask.body.get("ignore_eos")]
    if any(answers):
        words = _off("answers", answers, len(answers))
        yield f"{words} Does the service's --max-model-len leave room for them?"


def _off(what: str, differences: Sequence[int], count: int) -> str:
    wrong = [one for one in differences if one]
    span = f"from {min(wrong):+d} to {max(wrong):+d} tokens"
    return f"{len(wrong)} of {count} {what} are not as long as asked for: {span}."


def _failures(run: Run) -> Iterator[str]:
    """Yield why requests failed, the most frequent cause first."""
    causes = Counter(outcome.error for outcome in run.outcomes if not outcome.is_answered)
    yield from (f"{count} failed: {error}" for error, count in causes.most_common(_MOST_ERRORS))
    if (others := len(causes) - _MOST_ERRORS) > 0:
        yield f"Requests failed for {others} more reasons: --save FILE --detailed keeps them all."


def _answers(run: Run, wrong: Mapping[int, str]) -> Iterator[str]:
    """Say which answers came from a further replica, and which are wrong."""
    if again := sum(outcome.sent > 1 for outcome in run.outcomes):
        were = number_of(again, "request was", "requests were")
        yield f"{were} sent to another replica after the first, as by any client, and the time that it took counts."
    if wrong:
        are = number_of(len(wrong), "answer is", "answers are")
        yield f"{are} wrong by --check, the first: {wrong[min(wrong)]}"


# -- the whole result


def result_of(
    run: Run,
    *,
    goals_ms: Mapping[str, float] | None = None,
    predicted: Mapping[str, Any] | None = None,
    wrong: Mapping[int, str] | None = None,
    is_detailed: bool = False,
) -> dict[str, Any]:
    """Return all that is shown of a run.

    `goals_ms` bound its times (goodput). `wrong` are answers that a check refused; None without a check. If
    `is_detailed`, it holds each request, as with vLLM's --save-detailed.
    """
    kind = "openai-chat" if run.requests and "messages" in run.requests[0].body else "openai"
    result: dict[str, Any] = {
        "date": run.date,
        "endpoint_type": kind,
        "backend": kind,
        "label": run.service,
        "model_id": run.model,
        "tokenizer_id": None,
        "num_prompts": len(run.requests),
        "request_rate": run.pace.request_rate if run.pace.is_rate else "inf",
        "burstiness": run.pace.burstiness,
        "max_concurrency": run.pace.max_concurrency,
        **figures_of(run.outcomes, run.duration_s, goals_ms=goals_ms),
    }
    if is_detailed:
        result |= _details(run.outcomes)
    if run.pace.max_concurrency is not None:
        result |= spread("client_queue_time", [one.queue_s for one in run.outcomes if one.is_answered])
    parts: dict[str, list[RequestResult]] = {name: [] for name in run.replicas}
    for outcome in run.outcomes:
        parts.setdefault(outcome.replica, []).append(outcome)
    return result | {
        "service": run.service,
        "workload": run.workload,
        "pace": str(run.pace),
        "split": run.split,
        "interrupted": run.interrupted,
        "resent": sum(outcome.sent - 1 for outcome in run.outcomes),
        "wrong_answers": None if wrong is None else len(wrong),
        "replicas": {name: figures_of(part, run.duration_s, goals_ms=goals_ms) for name, part in parts.items()},
        "predicted": predicted,
        "client_busy": run.busy,
        "client_late_ms": 1e3 * run.late_s,
        "notes": notes_on(run, wrong or {}),
    }


def _details(outcomes: tuple[RequestResult, ...]) -> dict[str, list[Any]]:
    """Return a list for each kind of value, with one place for each request."""
    return {
        "input_lens": [outcome.input_len for outcome in outcomes],
        "output_lens": [outcome.output_len for outcome in outcomes],
        "ttfts": [outcome.ttft_s for outcome in outcomes],
        "itls": [list(outcome.itls_s) for outcome in outcomes],
        "latencies": [outcome.latency_s for outcome in outcomes],
        "start_times": [outcome.start_s for outcome in outcomes],
        "queue_times": [outcome.queue_s for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
        "replica_names": [outcome.replica for outcome in outcomes],
    }


def document(results: list[dict[str, Any]], path: Path | None = None) -> dict[str, Any] | list[dict[str, Any]]:
    """Return one result as itself, as vLLM saves it; several, and those of a file summary.json, as a list."""
    is_one = len(results) == 1 and (path is None or path.name != SUMMARY)
    return results[0] if is_one else results
