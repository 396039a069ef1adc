"""Shows services and replicas, and an engine's work beside its plan's figures: text for people, JSON for scripts.

The keys of the JSON are stable. cli/services/stages.py shows services that start.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from hpc_serve.cli.console import PlainConsole, plain_table
from hpc_serve.client.engine_work import ReplicaWork
from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.exit_codes import exit_code_words
from hpc_serve.rendezvous.record import DEFAULT_MACHINE, EndpointRecord
from hpc_serve.rendezvous.wanted import Wanted
from hpc_serve.submit.diagnosis import diagnose_replica
from hpc_serve.submit.logs import files_of, places_of
from hpc_serve.submit.plans.planned_speed import measured_runs_of, planned_request, planned_tokens_per_s
from hpc_serve.submit.status.job_status import StatusReport, detail_words, stages_words, without_successors
from hpc_serve.submit.status.wanted_words import wanted_lines
from hpc_serve.units import GIB, duration, number_of

# -- one replica and its engine's work


def status_rows(status: ReplicaStatus, now: float) -> dict[str, str]:
    """The lines of a replica by their names; "" for what there is nothing to say of. `now`: seconds since the epoch."""
    record, job, started = status.record, status.job, status.started_at
    has_gpus = job.gpus_per_node > 0 and job.cluster != "local"
    gpus = f", {number_of(job.gpus_per_node, 'GPU')} each" if has_gpus else ""
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
    if work.now.requests:
        rows["planned"] = _planned(status, work.now.requests)
    if now.generation_tokens is not None:
        prompts = "" if now.prompt_tokens is None else f", {now.prompt_tokens:,.0f} of prompts"
        rows["tokens"] = f"{now.generation_tokens:,.0f} generated{prompts}, since its engine started"
    if now.cache_use is not None:
        rows["KV cache"] = f"{100 * now.cache_use:.1f} % in use"
    return rows


def _work_words(work: ReplicaWork) -> str:
    """The same in a few words, for a table; "" where the engine said nothing."""
    now = work.now
    counts = ((now.running, "running"), (now.waiting, "waiting"), (work.generation_tokens_per_s, "tokens/s"))
    words = [f"{value:,.0f} {name}" for value, name in counts if value is not None]
    if now.cache_use is not None:
        words.append(f"{100 * now.cache_use:.1f} % of the KV cache")
    return ", ".join(words)


def _speed(work: ReplicaWork) -> str:
    if work.over_s is None or work.generation_tokens_per_s is None:
        return "" if work.now.requests else "none: no request runs"
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
    measured = f"; corrected by {number_of(runs, 'earlier run')} measured here" if runs else ""
    return (
        f"{expected:,.0f} generated with {in_flight:,} in flight, of {request[0]:,} tokens in and {request[1]:,} "
        f"out{of_what}{measured}"
    )


def _work_json(status: ReplicaStatus, work: ReplicaWork) -> dict[str, Any]:
    """The same under stable keys; null is what is not known."""
    now, in_flight = work.now, work.now.requests
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


# -- services

_COLOURS = {
    "ready": "green",
    "starting": "cyan",
    "pending": "yellow",
    "draining": "yellow",
    "unresponsive": "red",
    "failed": "red",
    "unknown": "magenta",
    "stopped": "dim",
}
_STATUS_KEYS = (
    *("service", "job_id", "state", "cluster", "model", "stand_in", "stage", "progress", "start", "reason", "nodes"),
    *("num_nodes", "gpus_per_node", "tensor_parallel_size", "pipeline_parallel_size", "restart", "replica"),
    *("data_parallel_size", "replicas_per_job", "submitted_at", "started_at", "updated_at", "state_since"),
    *("engine_restarts", "weight_version", "cache"),
    *("loading", "failed_part", "exit_code", "last_log_lines", "end_reported_by_job", "log_dir", "batch_log"),
    *("scheduler_state", "pending_reason", "time_left", "successor", "successor_job_id", "measured", "predicted"),
    "machine",
)
# The keys of a record, as they are while a replica has published none.
_OF_NO_RECORD = {
    **dict.fromkeys(("stand_in", "start", "tensor_parallel_size", "pipeline_parallel_size", "started_at")),
    **dict.fromkeys(("data_parallel_size", "state_since", "failed_part")),
    **{"nodes": (), "engine_restarts": 0, "weight_version": "", "cache": "", "loading": "", "measured": {}},
}
_A_DAY_S = 24 * 3600.0
_DETAIL_LENGTH = 160  # characters of a reason in the table; the rest is in the details of the service
_LEAST_SUMMARY = 24  # columns for the details of a service, beside its name, job and state


def report_json(report: StatusReport, works: Sequence[ReplicaWork]) -> dict[str, Any]:
    """A report under stable keys. `works` says what the engine of each replica does."""
    return {
        "services": [status_json(status, work) for status, work in zip(report.replicas, works)],
        "problems": list(report.problems),
        "wanted": {service: _wanted_json(wanted) for service, wanted in report.wanted.items()},
    }


def _wanted_json(wanted: Wanted) -> dict[str, Any]:
    """What is wanted, and the last decisions, under stable keys."""
    keys = dataclasses.asdict(wanted)
    names = ["state", "least", "most", "count", "keep_up", "idle_stop_s", "replicas_per_job", "decider", "problem"]
    decided = [{**keys, "text": one.sentence} for one, keys in zip(wanted.decided, keys["decided"])]
    further = {"machines": keys["machines"], "next_try_at": wanted.next_try_at or None, "decided": decided}
    return {name: keys[name] for name in names} | further


def print_counts(report: StatusReport) -> None:
    """How many replicas are ready of each service that has several which are not over, without those that only wait to
    take over from one of them; and what its jobs decided of their number."""
    live = without_successors(status for status in report.replicas if not status.is_over)
    for service, count in Counter(status.service for status in live).items():
        if count > 1:
            ready = sum(status.service == service and status.state == "ready" for status in live)
            click.echo(f"{service}: {ready}/{count} replicas ready")
    shown = {status.service for status in report.replicas}
    for service, wanted in report.wanted.items():
        if service not in shown and wanted.state != "asleep" and not wanted.submitting:
            continue  # its jobs were forgotten, or ended long ago
        for line in wanted_lines(service, wanted, live, time.time()):
            click.echo(line)


def recent(statuses: Iterable[ReplicaStatus]) -> tuple[ReplicaStatus, ...]:
    """Return what is not over, and what has ended within a day."""
    now = time.time()
    return tuple(one for one in statuses if not one.is_over or (one.began_or_ended_at or now) > now - _A_DAY_S)


def status_json(status: ReplicaStatus, work: ReplicaWork | None = None) -> dict[str, Any]:
    """A status under stable keys, its job's, its record's and its own, with what its engine does."""
    known = dataclasses.asdict(status)
    known = known["job"] | _OF_NO_RECORD | (known["record"] or {}) | known | {"updated_at": status.updated_at}
    keys = {name: known[name] for name in _STATUS_KEYS}
    logs = [str(path) for path in files_of(status)]
    engine = None if work is None else _work_json(status, work)
    return keys | {"name": status.name, "address": status.address, "logs": logs, "engine": engine}


def status_table(statuses: Sequence[ReplicaStatus], works: Sequence[ReplicaWork] = (), *, width: int) -> RenderableType:
    """Return a line for each replica and one for what its engine does. If they are wider than `width`, the details go
    on a line below."""
    states = [Text(status.state, style=_COLOURS[status.state]) for status in statuses]
    rows = itertools.zip_longest(statuses, works[: len(statuses)])
    details = [Text(_state_detail(status, work), overflow="fold") for status, work in rows]
    in_columns = max(len(f"{status.service} {status.name} {status.state}") for status in statuses) + 8
    if width < in_columns + _LEAST_SUMMARY:
        names = [f"{status.service} {status.name} " for status in statuses]
        heads = [Text.assemble(name, state, overflow="fold") for name, state in zip(names, states)]
        return Group(*(part for head, detail in zip(heads, details) for part in (head, Padding(detail, (0, 0, 0, 2)))))
    table = plain_table("SERVICE", "JOB", "STATE", "", folded=("",))
    for status, state, detail in zip(statuses, states, details):
        table.add_row(Text(status.service), Text(status.name), state, detail)
    return table


def print_details(status: ReplicaStatus, work: ReplicaWork | None = None) -> None:
    """All there is to say about one replica, and what its engine does, if it was asked."""
    console = PlainConsole(soft_wrap=True)
    found = diagnose_replica(status).cause if status.state == "failed" else None
    cause = found if found and found.is_known else None
    record, shown = status.record, status_rows(status, time.time())
    rows = {
        "model": shown["model"],
        "weights": shown["weights"],
        "state": _sentence(status),
        "cause": f"{cause.cause} ({cause.lines[0].place})" if cause else "",
        "to do": cause.cure if cause else "",
        "start": stages_words(status),
        "since": when(record.state_since) if record and status.state == "unresponsive" else "",
        **{name: shown[name] for name in ("restarts", "address", "nodes")},
        "layout": status.layout,
        "submitted": shown["submitted"] if status.started_at is None else "",
        "started": shown["started"],
        "age": shown["age"],
        "caches": record.cache if record else "",
        "loading": record.loading if record else "",
        "adapters": ", ".join(
            f"{name}{' (not loaded)' if adapter.fault else ''}"
            for name, adapter in (record.adapters if record else {}).items()
        ),
        "time left": shown["time left"],
        "successor": status.successor,
        **(work_rows(status, work) if work is not None else {}),
        "exit code": shown["exit code"],
        "logs": "\n".join(map(str, files_of(status) or places_of(status))),
    }
    console.print(Text(f"{status.service}  job {status.name}", style=f"bold {_COLOURS[status.state]}"))
    for name, value in rows.items():
        if value:
            console.print(f"  {name:<10} " + f"\n{'':<13}".join(value.splitlines()))
    if status.predicted_and_measured:
        console.print(f"  {'figure':<24} {'predicted':>14} {'measured':>14}")
    for name, (predicted, measured) in status.predicted_and_measured.items():
        console.print(f"  {figure_name(name):<24} {figure(name, predicted):>14} {figure(name, measured):>14}")
    if status.last_log_lines and status.state != "ready":
        console.print("  last log lines")
        for line in status.last_log_lines[-10:]:
            console.print(Text(f"    {line}", style="dim"))


def _sentence(status: ReplicaStatus) -> str:
    return f"starting: {detail_words(status)}" if status.state == "starting" and status.detail else status.sentence


def _state_detail(status: ReplicaStatus, work: ReplicaWork | None = None) -> str:
    machine = f" on {status.machine}" if status.machine != DEFAULT_MACHINE else ""
    successor = f"; successor {status.successor}" if status.successor else ""
    if status.state == "ready":
        age = f", {duration(time.time() - status.started_at)} old" if status.started_at else ""
        left = f", {status.time_left} left" if status.time_left else ""
        does = f"\n{words}" if work is not None and (words := _work_words(work)) else ""
        return f"{status.job.model}{machine} at {status.address}{age}{left}{successor}{does}"
    return f"{machine[1:]}{': ' if machine else ''}{_first_words(status)}{successor}"


def _first_words(status: ReplicaStatus) -> str:
    """The detail of a status in at most _DETAIL_LENGTH characters, and where the rest is."""
    detail = " ".join(detail_words(status).split())
    if len(detail) <= _DETAIL_LENGTH:
        return detail
    command = "doctor" if status.state == "failed" else "status"
    return f"{detail[:_DETAIL_LENGTH].rsplit(' ', 1)[0]} … (hpc-serve {command} {status.name})"
