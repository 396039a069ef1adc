"""A run as JSON, under the keys of `vllm bench serve --save-result`, so that what reads its files reads ours.

Ours come after them: the service, how requests were split, the same figures of each replica, what was predicted, and
how busy this program was. Several runs are a list of such objects, as the summary.json of `vllm bench sweep`. One run
in a file of this name is a list too, since programs that read sweeps look for it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hpc_serve.bench.figures import FIGURES, METRICS, Figures, Spread
from hpc_serve.bench.measured import Measured
from hpc_serve.bench.outcome import RequestResult
from hpc_serve.bench.prompts import CHAT

SUMMARY = "summary.json"


def run_json(measured: Measured, *, is_detailed: bool = False) -> dict[str, Any]:
    """Return one run. If `is_detailed`, it holds each request, as with vLLM's --save-detailed."""
    run, figures, prediction = measured.run, measured.figures, measured.prediction
    kind = "openai-chat" if run.requests and run.requests[0].path == CHAT else "openai"
    answer: dict[str, Any] = {
        "date": run.date,
        "endpoint_type": kind,
        "backend": kind,
        "label": run.service,
        "model_id": run.model,
        "tokenizer_id": None,
        "num_prompts": len(run.requests),
        "request_rate": _number(run.pace.request_rate),
        "burstiness": _number(run.pace.burstiness),
        "max_concurrency": run.pace.max_concurrency,
        **_figures_json(figures),
    }
    if is_detailed:
        answer |= _details(run.outcomes)
    answer |= _times_json(figures)
    if run.pace.max_concurrency is not None:
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


def _number(value: float) -> float | str:
    return "inf" if math.isinf(value) else value


def _figures_json(figures: Figures) -> dict[str, Any]:
    values = {key: getattr(figures, name) for name, key, _ in FIGURES}
    return {**values, "rtfx": 0.0}  # of speech; vLLM writes it for every model


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
