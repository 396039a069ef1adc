"""`report`: one page of HTML about a service or a job, to look at and to pass on.

The page has no script, and no picture and no style from elsewhere. Text of records and logs is made printable and
escaped wherever it is put in. `pages/frame.py` makes the page and its charts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from markupsafe import Markup

import hpc_serve
from hpc_serve.cli.complete import service_names
from hpc_serve.cli.show import figure, figure_name, status_rows, when, work_rows
from hpc_serve.client.engine_work import ReplicaWork, look_for
from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.pages.frame import Curve, document, over_time, stage_bar, swatch, table
from hpc_serve.printable import printable
from hpc_serve.redact import redact
from hpc_serve.rendezvous.files import write_private
from hpc_serve.rendezvous.store import ServiceStore, own_store
from hpc_serve.submit.diagnosis import Diagnosis, diagnose_replica
from hpc_serve.submit.logs import Reports, read_reports
from hpc_serve.submit.plans.planned_speed import measured_runs_of, planned_request, planned_speeds, planned_tokens_per_s
from hpc_serve.submit.status.job_status import stage_seconds
from hpc_serve.submit.status.status_reader import find
from hpc_serve.units import duration, number_of
from hpc_serve.vllm.log import EngineReport

# -- the page

_STYLE = """
body{max-width:900px} th{white-space:nowrap} td{overflow-wrap:anywhere} .scroll td{overflow-wrap:normal}
svg{width:100%;display:block}
pre{background:var(--panel);padding:.7em;white-space:pre-wrap;overflow-wrap:anywhere} svg .in{fill:var(--paper)}
.ready{color:var(--good)} .failed,.unresponsive{color:var(--bad)}
.bad{background:var(--bad-panel);border-left:3px solid var(--bad);padding:.4em .8em}
.bad pre{background:none;padding:0;margin:.3em 0}
"""
_WITHOUT_HISTORY = (
    "No figures over time: vLLM writes them to its log every ten seconds while it has work, and the log that this host "
    "can see has none."
)


@dataclass(frozen=True, kw_only=True)
class _ReplicaReport:
    """All that the page says of one replica."""

    status: ReplicaStatus
    work: ReplicaWork
    reports: Reports
    diagnosis: Diagnosis
    engine_args: Sequence[str] = ()


def _report_page(title: str, replicas: Sequence[_ReplicaReport], *, at: float) -> str:
    """The page. `at`: seconds since the epoch, when its figures were read."""
    about = Markup('<h1>{}</h1><p class="when">hpc-serve {}, {}</p>').format(
        _text(title), hpc_serve.__version__, when(at)
    )
    return document(_text(title), Markup("\n").join((about, *(_replica(one, at) for one in replicas))), style=_STYLE)


def _replica(found: _ReplicaReport, at: float) -> Markup:
    status, diagnosis = found.status, found.diagnosis
    heading = Markup('<h2>{} job {} <span class="{state}">{state}</span></h2>')
    parts = [
        heading.format(_text(status.service), _text(status.name), state=status.state),
        _facts(status_rows(status, at)),
        Markup('<div class="bad"><pre>{}</pre></div>').format(_text(diagnosis.report)) if diagnosis.cause else "",
        _section("Plan", _plan(found)),
        _section("The start", _start(status)),
        _section("Measured against predicted", _figures(status)),
        _section("Now", _facts(work_rows(status, found.work))),
        _section("Over time", _over_time(found)),
    ]
    return Markup("\n").join(part for part in parts if part)


def _section(title: str, content: Markup) -> Markup:
    return Markup("<h3>{}</h3>\n{}").format(title, content) if content else Markup("")


def _plan(found: _ReplicaReport) -> Markup:
    status = found.status
    job = status.job
    nodes = "a node" if job.num_nodes == 1 else f"{job.num_nodes} nodes"
    gpus = f" with {number_of(job.gpus_per_node, 'GPU')}" if job.gpus_per_node else ""
    rows = {"layout": f"{status.layout} on {nodes}{gpus}".strip(), "options": " ".join(found.engine_args)}
    speeds, request = planned_speeds(status.predicted), planned_request(status.predicted)
    if not status.predicted:
        return _facts(rows) + _note("The plan was not written down: this job was not submitted by hpc-serve submit.")
    if not speeds or request is None:
        return _facts(rows)
    cells = [(f"{count:,}", f"{speed:,.0f}") for count, speed in speeds]
    runs = measured_runs_of(status.predicted)
    corrected = f", corrected by {number_of(runs, 'earlier run')} measured here" if runs else ""
    what = f"Expected of requests of {request[0]:,} tokens in and {request[1]:,} out{corrected}:"
    return _facts(rows) + _note(what) + table(("in flight", "generated tokens/s"), cells)


def _start(status: ReplicaStatus) -> Markup:
    stages = {_text(name): seconds for name, seconds in stage_seconds(status).items()}
    if not stages:
        return _note("Its record tells no stage of it.")
    total = sum(stages.values())
    cells = [
        (Markup("{} {}").format(swatch(place), name), f"{seconds:,.1f} s", f"{100 * seconds / max(total, 1.0):.0f} %")
        for place, (name, seconds) in enumerate(stages.items())
    ]
    is_ready = status.start is not None and not status.start.stage
    end = "until it was ready" if is_ready else "until it ended" if status.is_over else "so far"
    caches = f" Caches: {_text(status.record.cache)}." if status.record and status.record.cache else ""
    bar = stage_bar(list(stages.items()))
    return bar + _note(f"{duration(total)} {end}.{caches}") + table(("stage", "took", "share"), cells)


def _figures(status: ReplicaStatus) -> Markup:
    if not status.predicted_and_measured:
        why = "the engine has logged none so far" if status.predicted else "the plan was not written down"
        return _note(f"No figure is both predicted and measured: {why}.")
    cells = []
    for name, (predicted, measured) in status.predicted_and_measured.items():
        ratio = f"{round(100 * (measured / predicted - 1), 1) + 0.0:+.1f} %" if predicted else ""
        cells.append((_text(figure_name(name)), figure(name, predicted), figure(name, measured), ratio))
    return table(("figure", "predicted", "measured", "measured is"), cells)


def _over_time(found: _ReplicaReport) -> Markup:
    reports, predicted = found.reports, found.status.predicted
    if not reports:
        return _note(_WITHOUT_HISTORY)

    def curve(name: str, value: Callable[[EngineReport], float | None]) -> Curve:
        points = [(at, float(seen)) for at, one in reports if (seen := value(one)) is not None]
        return Curve(name=name, points=points)

    planned = curve(
        "planned, for as many requests as there were at that moment",
        lambda one: planned_tokens_per_s(predicted, one.running + one.waiting),
    )
    generated = [curve("generated", lambda one: one.generation_tokens_per_s), *([planned] if planned.points else [])]
    requests = [curve("running", lambda one: one.running), curve("waiting", lambda one: one.waiting)]
    pictures = [
        over_time("Generated", generated, unit="tokens/s"),
        over_time("Prompts", [curve("of prompts", lambda one: one.prompt_tokens_per_s)], unit="tokens/s"),
        over_time("Requests", requests),
        over_time("KV cache in use", [curve("in use", lambda one: one.cache_use)], percent=True),
    ]
    note = (
        f"{len(reports):,} {'report' if len(reports) == 1 else 'reports'} that vLLM wrote to the head's log, every ten "
        "seconds while it had work. A gap in a curve is a time without work."
    )
    return _note(note) + Markup("\n").join(pictures)


def _note(text: str) -> Markup:
    return Markup('<p class="note">{}</p>').format(text)


def _facts(rows: Mapping[str, str]) -> Markup:
    lines = [
        Markup("<tr><th>{}</th><td>{}</td></tr>").format(_text(name), _text(value))
        for name, value in rows.items()
        if value
    ]
    return Markup("<table>{}</table>").format(Markup("").join(lines)) if lines else Markup("")


def _text(text: str) -> str:
    """Text of others without what moves a cursor or looks like a secret; it is escaped where it is put in."""
    return redact(printable(text))


# -- the command

_MOST_REPLICAS = 16


@click.command("report")
@click.argument("target", metavar="SERVICE|JOB", shell_complete=service_names)
@click.option(
    "--output", "-o", metavar="FILE", help="Where to; - is stdout [default: hpc-serve-report-SERVICE|JOB.html]."
)
def report_command(target: str, output: str | None) -> None:
    """Write a page about a service or a job: plan, stages of the start, measured against predicted, figures over time.

    hpc-serve report 405b --output 405b.html

    One file of HTML without a script, which loads nothing. It shows a service's replicas that are not over, else the
    last. Look through it before you pass it on: it names addresses and folders, and quotes logs.
    """
    store = own_store()
    page = _report_page(f"hpc-serve: {target}", _reports(store, target), at=time.time())
    if output == "-":
        click.echo(page, nl=False)
        return
    path = Path(output or f"hpc-serve-report-{target}.html")
    if not path.absolute().parent.is_dir():
        raise click.UsageError(f"--output {path}: there is no folder {path.absolute().parent}.")
    write_private(path, page)
    click.echo(f"{path}: open it in a browser.")


def _reports(store: ServiceStore, target: str) -> list[_ReplicaReport]:
    found = find(store, target)
    live = [status for status in found if not status.is_over or status.service != target]
    shown = (live or list(found[-1:]))[-_MOST_REPLICAS:]
    jobs = {job.job_id: job for service in {one.service for one in shown} for job in store.read_submitted(service)}
    works = look_for(shown, store.read_api_key)
    return [
        _ReplicaReport(
            status=status,
            work=work,
            reports=_engine_reports(status),
            diagnosis=diagnose_replica(status),
            engine_args=jobs[status.job_id].engine_args if status.job_id in jobs else (),
        )
        for status, work in zip(shown, works)
    ]


def _engine_reports(status: ReplicaStatus) -> Reports:
    near = status.updated_at or status.started_at or time.time()
    head = Path(status.log_dir) / f"{status.name}-node0.log"
    return read_reports(head, near=near) if status.log_dir else ()
