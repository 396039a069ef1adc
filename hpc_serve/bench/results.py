"""A run's result: figures under the keys of `vllm bench serve --save-result`, so that what reads its files reads ours.

Text, pages and pictures show this mapping; nothing else is made of a run. Ours come after vLLM's keys: the service, how
requests were split, the figures of each replica, what was predicted, and how busy this program was. Several runs are a
list of such objects, as the summary.json of `vllm bench sweep`. One run in a file of this name is a list too, since
programs that read sweeps look for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_serve.bench.figures import figures_of, spread
from hpc_serve.bench.notes import notes_on
from hpc_serve.bench.run import RequestResult, Run

SUMMARY = "summary.json"


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
