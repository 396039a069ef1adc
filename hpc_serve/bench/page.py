"""Runs as one HTML page that needs nothing else: tables, curves of throughput and latency, times of requests.

`figures` decides what they show, pages/ how they are drawn.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from hpc_serve.bench.figures import METRICS
from hpc_serve.bench.measured import Measured, load_curves, load_title, series_of
from hpc_serve.bench.report import is_number, replica_rows, sweep_rows
from hpc_serve.pages.charts import histogram, over_load
from hpc_serve.pages.frame import document, swatch, table

_STYLE = """
body{max-width:88rem} .charts{display:flex;flex-wrap:wrap;gap:1rem;margin-top:.8rem}
.charts svg{flex:1 1 22rem;max-width:430px} .key{display:inline-block;margin-right:1.2rem}
td,th{border-bottom:1px solid var(--line);white-space:nowrap}
.warning{background:var(--note);padding:.4rem .8rem;margin:.4rem 0}
"""


def page(runs: Sequence[Measured]) -> str:
    """Return the whole page."""
    services = ", ".join(dict.fromkeys(one.run.service for one in runs))
    parts = [
        Markup('<h1>{}</h1><p class="about">{}</p>').format(services, _about(runs)),
        _table(sweep_rows(runs)),
        *_curves(runs),
        *(part for number, one in enumerate(runs, start=1) for part in _run(number, one)),
    ]
    return document(f"{services}: measured by hpc-serve bench", Markup("\n").join(parts), style=_STYLE)


def _readable(date: str) -> str:
    """Return a date of `vllm bench serve` as people write it; other text is returned unchanged."""
    with contextlib.suppress(ValueError):
        return datetime.datetime.strptime(date, "%Y%m%d-%H%M%S").isoformat(sep=" ")
    return date


def _about(runs: Sequence[Measured]) -> str:
    run = runs[0].run
    models = ", ".join(dict.fromkeys(one.run.model for one in runs))
    how = "to each replica in turn" if run.split == "equally" else "as the client routes"
    return (
        f"{models}. Begun {_readable(run.date)}. Requests go {how}. TTFT is the time to the first token, TPOT the time "
        "for each token after it, medians of the requests that were answered; figures are those of vllm bench serve."
    )


def _curves(runs: Sequence[Measured]) -> Iterator[Markup]:
    """Throughput and latency against the load, where there are several loads or series."""
    if len(runs) < 2:
        return
    titles = enumerate(series_of(runs))
    keys = (Markup('<span class="key">{} {}</span>').format(swatch(place), title) for place, title in titles)
    yield Markup("<h2>By load</h2><p>{}</p>").format(Markup("").join(keys))
    yield _side_by_side([over_load(title, load_title(runs), curves) for title, curves in load_curves(runs)])


def _side_by_side(charts: Sequence[Markup]) -> Markup:
    return Markup('<div class="charts">{}</div>').format(Markup("").join(charts))


def _run(number: int, one: Measured) -> Iterator[Markup]:
    run, figures = one.run, one.figures
    yield Markup("<h2>Run {}: {}, {}, {}</h2>").format(number, run.service, run.workload, run.pace)
    for note in one.notes:
        yield Markup('<p class="warning">{}</p>').format(note)
    if one.prediction is not None and one.prediction.reason:
        yield Markup('<p class="about">No prediction: {}</p>').format(one.prediction.reason)
    heading = ["ms", "mean", "median", "std", *(f"P{percent:g}" for percent in figures.times["ttft"].percentiles)]
    rows = [heading]
    for name in METRICS:
        spread = figures.times[name]
        rows.append([name.upper(), *(f"{value:,.2f}" for value in (spread.mean, spread.median, spread.std))])
        rows[-1] += [f"{value:,.2f}" for value in spread.percentiles.values()]
    yield _table(rows)
    yield Markup("<p></p>")
    yield _table(replica_rows(one))
    answered = [outcome for outcome in run.outcomes if outcome.is_answered]
    if answered:
        yield _side_by_side(
            [
                histogram("TTFT of requests (ms)", [1e3 * outcome.ttft_s for outcome in answered]),
                histogram("Whole answers (ms)", [1e3 * outcome.latency_s for outcome in answered]),
            ]
        )


def _table(rows: Sequence[Sequence[str]]) -> Markup:
    """Return a table; its first row is the heading."""
    heading, *body = rows
    return table(heading, body, are_numbers=[is_number(cell) for cell in (body or rows)[0]])
