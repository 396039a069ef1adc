"""A run as JSON, under the keys of `vllm bench serve --save-result`, so that what reads its files reads ours.

Ours come after them: the service, how requests were split, the same figures of each replica, what was predicted, and
how busy this program was. Several runs are a list of such objects, as the summary.json of `vllm bench sweep`. One run
in a file of this name is a list too, since programs that read sweeps look for it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hpc_serve.bench.figures import METRICS, Figures, Spread
from hpc_serve.bench.measured import Measured
from hpc_serve.bench.outcome import RequestResult

SUMMARY = "summary.json"
_CHAT = "/v1/chat/completions"


def run_json(measured: Measured, *, is_detailed: bool = False) -> dict[str, Any]:
    """Return one run. If `is_detailed`, it holds each request, as with vLLM's --save-detailed."""
    run, figures, prediction = measured.run, measured.figures, measured.prediction
    is_chat = bool(run.requests) and run.requests[0].path == _CHAT
    rate = "inf" if math.isinf(run.request_rate) else run.request_rate
    answer: dict[str, Any] = {
        "date": run.date,
        "endpoint_type": "openai-chat" if is_chat else "openai",
        "backend": "openai-chat" if is_chat else "openai",
        "label": run.service,
        "model_id": run.model,
        "tokenizer_id": None,
        "num_prompts": len(run.requests),
        "request_rate": rate,
        "burstiness": "inf" if math.isinf(run.burstiness) else run.burstiness,
        "max_concurrency": run.max_concurrency,
        **_figures_json(figures),
    }
    if is_detailed:
        answer |= _details(run.outcomes)
    answer |= _times_json(figures)
    if run.max_concurrency is not None:
        answer |= _spread_json("client_queue_time", figures.times["client_queue_time"])
    return answer | {
        "service": run.service,
        "workload": run.workload,
        "split": run.split,
        "interrupted": run.interrupted,
        "resent": figures.resent,
        "wrong_answers": None if measured.wrong is None else len(measured.wrong),
        "replicas": {
            name: {**_figures_json(part), **_times_json(part)} for name, part in measured.of_replicas().items()
        },
        "predicted": None if prediction is None else prediction.keys(),
        "client_busy": run.own_share.busy,
        "client_late_ms": 1e3 * run.own_share.late_s,
        "notes": measured.notes,
    }


def _figures_json(figures: Figures) -> dict[str, Any]:
    return {
        "duration": figures.duration_s,
        "completed": figures.completed,
        "failed": figures.failed,
        "total_input_tokens": figures.total_input,
        "total_output_tokens": figures.total_output,
        "request_throughput": figures.request_rate,
        "request_goodput": figures.goodput,
        "output_throughput": figures.output_rate,
        "total_token_throughput": figures.total_rate,
        "max_output_tokens_per_s": figures.peak_output_rate,
        "max_concurrent_requests": figures.peak_concurrency,
        "rtfx": 0.0,  # of speech; vLLM writes it for every model
    }


def _times_json(figures: Figures) -> dict[str, float]:
    return {key: value for name in METRICS for key, value in _spread_json(name, figures.times[name]).items()}


def _spread_json(name: str, spread: Spread) -> dict[str, float]:
    keys = {f"mean_{name}_ms": spread.mean, f"median_{name}_ms": spread.median, f"std_{name}_ms": spread.std}
    return keys | {f"p{percent:g}_{name}_ms": value for percent, value in spread.percentiles.items()}


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
