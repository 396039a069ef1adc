"""Shows a replica, and its engine's work beside its plan's figures: lines for people, keys for scripts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hpc_serve.durations import duration
from hpc_serve.exit_codes import exit_code_words
from hpc_serve.rendezvous.record import DEFAULT_MACHINE, EndpointRecord
from hpc_serve.sizes import GIB
from hpc_serve.submit.plans.planned_speed import measured_runs_of, planned_request, planned_tokens_per_s

if TYPE_CHECKING:
    from hpc_serve.client.engine_work import ReplicaWork
    from hpc_serve.client.replicas.status import ReplicaStatus


def status_rows(status: ReplicaStatus, now: float) -> dict[str, str]:
    """The lines of a replica by their names; "" for what there is nothing to say of. `now`: seconds since the epoch."""
    record, job, started = status.record, status.job, status.started_at
    has_gpus = job.gpus_per_node > 0 and job.cluster != "local"
    gpus = f", {job.gpus_per_node} GPU{'s' if job.gpus_per_node > 1 else ''} each" if has_gpus else ""
    machine = f" ({status.machine})" if status.machine != DEFAULT_MACHINE else ""
    words = "" if status.exit_code is None else exit_code_words(status.exit_code)
    return {
        "model": job.model,
        "weights": _weights(record) if record else "",
        "state": status.sentence,
        "address": status.address,
        "nodes": f"{status.nodes}{gpus}{machine}",
        "submitted": when(status.submitted_at),
        "started": when(started),
        "age": duration(now - started) if started is not None and not status.is_over else "",
        "ended": when(status.updated_at) if status.is_over else "",
        "time left": status.time_left or "",
        "restarts": f"{record.engine_restarts}, of the engine in place" if record and record.engine_restarts else "",
        "exit code": "" if status.exit_code is None else f"{status.exit_code}{f' ({words})' if words else ''}",
    }


def _weights(record: EndpointRecord) -> str:
    stand_in = f"of {record.stand_in}, which stands in for the model's own" if record.stand_in else ""
    return ", ".join(filter(None, (stand_in, record.weight_version and f"version {record.weight_version}")))


def work_rows(status: ReplicaStatus, work: ReplicaWork) -> dict[str, str]:
    """The lines of a replica's details, by their names; none for one that has ended or has not begun."""
    if not work.is_known:
        return {"requests": f"not known: {work.problem}"} if status.state in ("ready", "draining") else {}
    now = work.now
    running, waiting = ("?" if count is None else f"{count:,}" for count in (now.running, now.waiting))
    rows = {"requests": f"{running} running, {waiting} waiting", "tokens/s": _speed(work), "planned": ""}
    if work.in_flight:
        rows["planned"] = _planned(status, work.in_flight)
    if now.generation_tokens is not None:
        prompts = "" if now.prompt_tokens is None else f", {now.prompt_tokens:,.0f} of prompts"
        rows["tokens"] = f"{now.generation_tokens:,.0f} generated{prompts}, since its engine started"
    if now.cache_use is not None:
        rows["KV cache"] = f"{100 * now.cache_use:.1f} % in use"
    return rows


def work_words(work: ReplicaWork) -> str:
    """The same in a few words, for a table; "" where the engine said nothing."""
    now = work.now
    counts = ((now.running, "running"), (now.waiting, "waiting"), (work.generation_tokens_per_s, "tokens/s"))
    words = [f"{value:,.0f} {name}" for value, name in counts if value is not None]
    if now.cache_use is not None:
        words.append(f"{100 * now.cache_use:.1f} % of the KV cache")
    return ", ".join(words)


def _speed(work: ReplicaWork) -> str:
    if work.over_s is None or work.generation_tokens_per_s is None:
        return "" if work.in_flight else "none: no request runs"
    prompts = work.prompt_tokens_per_s
    of_prompts = "" if prompts is None else f", {prompts:,.0f} of prompts"
    return f"{work.generation_tokens_per_s:,.0f} generated{of_prompts}, over {work.over_s:.1f} s"


def _planned(status: ReplicaStatus, in_flight: int) -> str:
    expected, request = planned_tokens_per_s(status.predicted, in_flight), planned_request(status.predicted)
    if expected is None or request is None:
        return "no speed: the plan was not written down when this job was submitted, or knows none of this accelerator"
    record = status.record
    of_what = f", of {record.model}, not of what stands in for it" if record and record.stand_in else ""
    runs = measured_runs_of(status.predicted)
    measured = f"; corrected by {runs} earlier run{'s' if runs > 1 else ''} measured here" if runs else ""
    return (
        f"{expected:,.0f} generated with {in_flight:,} in flight, of {request[0]:,} tokens in and {request[1]:,} "
        f"out{of_what}{measured}"
    )


def work_json(status: ReplicaStatus, work: ReplicaWork) -> dict[str, Any]:
    """The same under stable keys; null is what is not known."""
    now, in_flight = work.now, work.in_flight
    return {
        "requests_running": now.running,
        "requests_waiting": now.waiting,
        "prompt_tokens": now.prompt_tokens,
        "generation_tokens": now.generation_tokens,
        "prompt_tokens_per_s": work.prompt_tokens_per_s,
        "generation_tokens_per_s": work.generation_tokens_per_s,
        "over_s": work.over_s,
        "kv_cache_use": now.cache_use,
        "planned_generation_tokens_per_s": planned_tokens_per_s(status.predicted, in_flight) if in_flight else None,
        "problem": work.problem or None,
    }


def figure(name: str, value: float) -> str:
    """A figure of a plan or a log by its name: bytes as GiB, other numbers as they are."""
    if name.endswith("_bytes"):
        return f"{value / GIB:.2f} GiB"
    return f"{value:,.0f}" if value == int(value) or value > 100 else f"{value:.2f}"


_FIGURES = {
    "model_loading_bytes": "weights",
    "kv_cache_tokens": "KV cache, tokens",
    "max_model_len": "longest context, tokens",
    "max_concurrency": "longest requests at once",
    "num_blocks": "blocks of the cache",
    "non_torch_bytes": "non-torch memory",
    "cuda_graph_bytes": "CUDA graphs",
    "activation_bytes": "activations",
    "kv_cache_bytes": "KV cache",
    "total_bytes": "memory of a GPU",
}


def figure_name(name: str) -> str:
    """The words for a figure of a plan or a log.

    >>> figure_name("kv_cache_bytes"), figure_name("loading_weights_s")
    ('KV cache', 'loading weights')
    """
    return _FIGURES.get(name) or name.removesuffix("_bytes").removesuffix("_s").replace("_", " ")


def when(seconds: float | None) -> str:
    """A time since the epoch by this host's clock; "" for none."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else ""
