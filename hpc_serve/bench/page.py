"""Results of runs as one HTML page that needs nothing else: tables, and curves of throughput and latency by load.

`report` decides what they show, pages/ how they are drawn.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup

from hpc_serve.bench.report import TIMES, Result, load_curves, load_title, no_prediction, replica_rows, sweep_rows
from hpc_serve.pages.frame import document, over_load, table

_STYLE = Path(__file__).with_name("page.css")


def page(results: Sequence[Result]) -> str:
    """Return the whole page."""
    services = ", ".join(dict.fromkeys(one["service"] for one in results))
    heading, *rows = sweep_rows(results)
    parts = [
        Markup('<h1>{}</h1><p class="about">{}</p>').format(services, _about(results)),
        table(heading, rows),
        *(_curves(results) if len(results) > 1 else ()),
        *(part for number, one in enumerate(results, start=1) for part in _run(number, one)),
    ]
    style = _STYLE.read_text(encoding="utf-8")
    return document(f"{services}: measured by hpc-serve bench", Markup("\n").join(parts), style=style)


def _about(results: Sequence[Result]) -> str:
    date = results[0]["date"]
    with contextlib.suppress(ValueError):
        date = datetime.datetime.strptime(date, "%Y%m%d-%H%M%S").isoformat(sep=" ")
    models = ", ".join(dict.fromkeys(one["model_id"] for one in results))
    how = "to each replica in turn" if results[0]["split"] == "equally" else "as the client routes"
    return (
        f"{models}. Begun {date}. Requests go {how}. TTFT is the time to the first token, TPOT the time "
        "for each token after it, medians of the requests that were answered; figures are those of vllm bench serve."
    )


def _curves(results: Sequence[Result]) -> Iterator[Markup]:
    """Throughput and latency against the load."""
    yield Markup("<h2>By load</h2>")
    charts = (over_load(title, load_title(results), curves) for title, curves in load_curves(results).items())
    yield Markup('<div class="charts">{}</div>').format(Markup("").join(charts))


def _run(number: int, one: Result) -> Iterator[Markup]:
    yield Markup("<h2>Run {}: {}, {}, {}</h2>").format(number, one["service"], one["workload"], one["pace"])
    yield from (Markup('<p class="warning">{}</p>').format(note) for note in one["notes"])
    if why := no_prediction(one):
        yield Markup('<p class="about">{}</p>').format(why)
    kinds = {"mean": "mean", "median": "median", "std": "std", "p90": "P90", "p99": "P99"}
    times = ([name.upper(), *(f"{one[f'{kind}_{name}_ms']:,.2f}" for kind in kinds)] for name in TIMES)
    yield table(["ms", *kinds.values()], list(times))
    heading, *rows = replica_rows(one)
    yield table(heading, rows)
