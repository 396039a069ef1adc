"""The report of replicas as one page of HTML: no script, no picture and no style from elsewhere. Pure.

Text of records and logs is made printable and escaped wherever it is put in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

import hpc_serve
from hpc_serve.cli.charts import Curve, curves, stage_bar
from hpc_serve.cli.work_view import figure, when, work_rows
from hpc_serve.diagnose.redact import redact
from hpc_serve.durations import duration
from hpc_serve.printable import printable
from hpc_serve.submit.planned_speed import planned_request, planned_speeds, planned_tokens_per_s

if TYPE_CHECKING:
    from hpc_serve.client.engine_work import ReplicaWork
    from hpc_serve.client.status import ReplicaStatus
    from hpc_serve.submit.diagnosis import Diagnosis
    from hpc_serve.submit.log_history import LogHistory

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#1d1d1f;max-width:900px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em;margin-bottom:0} h2{font-size:1.2em;margin:1.8em 0 .3em;border-bottom:1px solid #ddd}
h3{font-size:1em;margin:1.3em 0 .3em} p.note,.when{color:#666} table{border-collapse:collapse}
td,th{padding:.15em 1.2em .15em 0;text-align:left;vertical-align:top} td.n,th.n{text-align:right}
th{font-weight:600;color:#555;white-space:nowrap} pre{background:#f5f5f7;
padding:.7em;white-space:pre-wrap;overflow-wrap:anywhere}
td{overflow-wrap:anywhere} svg{width:100%;height:auto;display:block} figure{margin:.8em 0} figcaption{font-size:.9em}
.grid{stroke:#e3e3e6} svg text{font-size:11px;fill:#666} svg .y{text-anchor:end} svg .in{fill:#fff;text-anchor:middle}
.ready{color:#27753c} .failed,.unresponsive{color:#b3261e} .bad{background:#fdf1f0;
border-left:3px solid #b3261e;padding:.4em .8em}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_WITHOUT_HISTORY = (
    "No figures over time: vLLM writes them to its log every ten seconds while it has work, and the log that this host "
    "can see has none."
)


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """All that the page says of one replica."""

    status: ReplicaStatus
    work: ReplicaWork
    history: LogHistory
    diagnosis: Diagnosis
    engine_args: Sequence[str] = ()


def report_page(title: str, replicas: Sequence[ReplicaReport], *, at: float) -> str:
    """The page. `at`: seconds since the epoch, when its figures were read."""
    return str(
        Markup(
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta http-equiv="Content-Security-Policy" content="{}"><title>{}</title><style>{}</style></head>\n'
            '<body><h1>{}</h1><p class="when">hpc-serve {}, {}</p>\n{}</body></html>\n'
        ).format(
            _POLICY,
            _text(title),
            Markup(_STYLE),
            _text(title),
            hpc_serve.__version__,
            when(at),
            Markup("\n").join(_replica(one, at) for one in replicas),
        )
    )


def _replica(found: ReplicaReport, at: float) -> Markup:
    status = found.status
    parts = [
        Markup('<h2>{} job {} <span class="{}">{}</span></h2>').format(
            _text(status.service), _text(status.name), status.state, status.state
        ),
        _facts(_status_rows(status, at)),
        _failure(found.diagnosis),
        _section("Plan", _plan(found)),
        _section("The start", _start(found)),
        _section("Measured against predicted", _figures(status)),
        _section("Now", _facts(work_rows(status, found.work))),
        _section("Over time", _over_time(found)),
    ]
    return Markup("\n").join(part for part in parts if part)


def _section(title: str, content: Markup) -> Markup:
    return Markup("<h3>{}</h3>\n{}").format(title, content) if content else Markup("")


def _status_rows(status: ReplicaStatus, at: float) -> dict[str, str]:
    started = status.started_at
    return {
        "model": status.model,
        "weights": f"of {status.stand_in}, which stands in for the model's own" if status.stand_in else "",
        "state": status.sentence,
        "address": status.address,
        "nodes": " ".join(node.name for node in status.nodes) or str(status.num_nodes),
        "submitted": when(status.submitted_at),
        "started": when(started),
        "age": duration(at - started) if started is not None and not status.is_over else "",
        "ended": when(status.updated_at) if status.is_over else "",
        "time left": status.time_left or "",
        "restarts": f"{status.engine_restarts}, of the engine in place" if status.engine_restarts else "",
        "exit code": "" if status.exit_code is None else str(status.exit_code),
    }


def _failure(diagnosis: Diagnosis) -> Markup:
    if diagnosis.cause is None:
        return Markup("")
    return Markup('<div class="bad"><pre>{}</pre></div>').format(_text(diagnosis.report))


def _plan(found: ReplicaReport) -> Markup:
    status = found.status
    layout = f"TP={status.tensor_parallel_size} PP={status.pipeline_parallel_size}" if status.nodes else ""
    nodes = "a node" if status.num_nodes == 1 else f"{status.num_nodes} nodes"
    gpus = f" with {status.gpus_per_node} GPUs" if status.gpus_per_node else ""
    rows = {
        "layout": f"{layout} on {nodes}{gpus}".strip(),
        "options": " ".join(found.engine_args),
    }
    speeds, request = planned_speeds(status.predicted), planned_request(status.predicted)
    if not status.predicted:
        note = "The plan was not written down: this job was not submitted by hpc-serve submit."
        return Markup('{}<p class="note">{}</p>').format(_facts(rows), note)
    if not speeds or request is None:
        return _facts(rows)
    cells = [(f"{count:,}", f"{speed:,.0f}") for count, speed in speeds]
    what = f"Expected of requests of {request[0]:,} tokens in and {request[1]:,} out:"
    return Markup('{}<p class="note">{}</p>{}').format(
        _facts(rows), what, _table(("in flight", "generated tokens/s"), cells, numbers_from=0)
    )


def _start(found: ReplicaReport) -> Markup:
    spans = [(span.name, span.took_s) for span in found.history.stages]
    if not spans:
        return Markup('<p class="note">{}</p>').format("The log that this host can see tells no stage of it.")
    total = sum(seconds for _, seconds in spans)
    cells = [(_text(name), f"{seconds:,.0f} s", f"{100 * seconds / max(total, 1.0):.0f} %") for name, seconds in spans]
    end = "until it was ready" if found.history.is_ready else "so far"
    note = f"{total:,.0f} s {end}, by the head's log, to the second."
    return Markup('{}<p class="note">{}</p>{}').format(
        stage_bar([(_text(name), seconds) for name, seconds in spans]),
        note,
        _table(("stage", "took", "share"), cells, numbers_from=1),
    )


def _figures(status: ReplicaStatus) -> Markup:
    names = [name for name in status.predicted if name in status.measured]
    if not names:
        return Markup('<p class="note">{}</p>').format(
            "No figure is both predicted and measured: "
            + ("the plan was not written down." if not status.predicted else "the engine has logged none so far.")
        )
    cells = []
    for name in names:
        predicted, measured = status.predicted[name], status.measured[name]
        ratio = f"{round(100 * (measured / predicted - 1), 1) + 0.0:+.1f} %" if predicted else ""
        cells.append((_text(name), figure(name, predicted), figure(name, measured), ratio))
    return _table(("figure", "predicted", "measured", "measured is"), cells, numbers_from=1)


def _over_time(found: ReplicaReport) -> Markup:
    reports = found.history.reports
    if not reports:
        return Markup('<p class="note">{}</p>').format(_WITHOUT_HISTORY)
    generated = [Curve(name="generated", points=[(at, one.generation_tokens_per_s) for at, one in reports])]
    planned = [
        (at, speed)
        for at, one in reports
        if (speed := planned_tokens_per_s(found.status.predicted, one.running + one.waiting)) is not None
    ]
    if planned:
        generated.append(Curve(name="planned, for as many requests as there were at that moment", points=planned))
    pictures = [
        curves("Generated", generated, unit="tokens/s"),
        curves(
            "Prompts",
            [Curve(name="of prompts", points=[(at, one.prompt_tokens_per_s) for at, one in reports])],
            unit="tokens/s",
        ),
        curves(
            "Requests",
            [
                Curve(name="running", points=[(at, float(one.running)) for at, one in reports]),
                Curve(name="waiting", points=[(at, float(one.waiting)) for at, one in reports]),
            ],
        ),
        curves(
            "KV cache in use",
            [Curve(name="in use", points=[(at, one.cache_use) for at, one in reports if one.cache_use is not None])],
            percent=True,
        ),
    ]
    note = (
        f"{len(reports):,} reports that vLLM wrote to the head's log, every ten seconds while it had work. "
        "Where nothing is drawn, it had none."
    )
    return Markup('<p class="note">{}</p>{}').format(note, Markup("\n").join(pictures))


def _facts(rows: Mapping[str, str]) -> Markup:
    lines = [
        Markup("<tr><th>{}</th><td>{}</td></tr>").format(_text(name), _text(value))
        for name, value in rows.items()
        if value
    ]
    return Markup("<table>{}</table>").format(Markup("").join(lines)) if lines else Markup("")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, numbers_from: int) -> Markup:
    """A table whose columns from the given one on are numbers."""

    def line(cells: Sequence[str], tag: str) -> Markup:
        found = [
            Markup('<{} class="{}">{}</{}>').format(tag, "n" if place >= numbers_from else "", cell, tag)
            for place, cell in enumerate(cells)
        ]
        return Markup("<tr>{}</tr>").format(Markup("").join(found))

    return Markup("<table>{}{}</table>").format(line(headings, "th"), Markup("").join(line(row, "td") for row in rows))


def _text(text: str) -> str:
    """Text of others without what moves a cursor or looks like a secret; it is escaped where it is put in."""
    return redact(printable(text))
