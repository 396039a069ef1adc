"""Runs as one HTML page that needs nothing else: tables, curves of throughput and latency, times of requests.

The curves are SVG in the page itself. What they show is decided in `figures`; here is where it is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from hpc_serve.bench.figures import METRICS
from hpc_serve.bench.measured import Measured, by_series, load_of, load_title
from hpc_serve.bench.report import pace, replica_rows, sweep_rows

_COLOURS = ("#0b7285", "#c92a2a", "#2f9e44", "#e67700", "#5f3dc4", "#1864ab", "#a61e4d", "#5c940d")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 430, 280, 58, 42, 28
_BARS = 24
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1f2933; background: #fff; margin: 2rem auto; max-width: 88rem;
  padding: 0 1.5rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #e4e7eb; white-space: nowrap; }
th { color: #52606d; font-weight: 600; } td.word, th.word { text-align: left; }
.scroll { overflow-x: auto; } .charts { display: flex; flex-wrap: wrap; gap: 1rem; } svg { max-width: 100%; }
.note { background: #fff3bf; padding: .4rem .8rem; margin: .4rem 0; } .about { color: #52606d; }
.key { display: inline-block; margin-right: 1.2rem; } .key i { display: inline-block; width: 1em; height: .25em;
  margin-right: .4em; vertical-align: middle; }
"""

Line = tuple[str, str, list[tuple[float, float]]]  # colour, dashes, points


def page(runs: Sequence[Measured]) -> str:
    """The whole page."""
    services = ", ".join(dict.fromkeys(one.run.service for one in runs))
    parts = [
        "<!doctype html>",
        '<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{escape(services)}: measured by hpc-serve bench</title><style>{_STYLE}</style>",
        f"<h1>{escape(services)}</h1>",
        f'<p class="about">{escape(_about(runs))}</p>',
        _table(sweep_rows(runs)),
        *_curves(runs),
    ]
    for number, one in enumerate(runs, start=1):
        parts += _run(number, one)
    return "\n".join([*parts, "</html>"]) + "\n"


def _about(runs: Sequence[Measured]) -> str:
    run = runs[0].run
    models = ", ".join(dict.fromkeys(one.run.model for one in runs))
    how = "to each replica in turn" if run.split == "equally" else "as the client routes"
    return (
        f"{models}. Begun {run.date}. Requests go {how}. TTFT is the time to the first token, TPOT the time for each "
        "token after it, medians of the requests that were answered; figures are those of vllm bench serve."
    )


def _curves(runs: Sequence[Measured]) -> Iterator[str]:
    """Throughput and latency against the load, where there are several loads or series."""
    if len(runs) < 2:
        return
    series = by_series(runs)
    colours = {title: _COLOURS[place % len(_COLOURS)] for place, title in enumerate(series)}
    keys = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{escape(title)}</span>'
        for title, colour in colours.items()
    )
    yield f"<h2>By load</h2><p>{keys}</p>"

    def lines(value: Callable[[Measured], float | None], dashes: str = "") -> list[Line]:
        found = []
        for title, ones in series.items():
            points = [(load_of(one.run), seen) for one in ones if (seen := value(one)) is not None]
            found.append((colours[title], dashes, points))
        return found

    expected = lines(lambda one: one.prediction.output_rate if one.prediction else None, "6 4")
    load = load_title(runs)
    is_dashed = ", predicted dashed" if any(points for _, _, points in expected) else ""
    yield '<div class="charts">'
    yield _chart(f"Output tokens/s{is_dashed}", load, [*lines(lambda one: one.figures.output_rate), *expected])
    for name, title in (("ttft", "TTFT"), ("tpot", "TPOT")):
        middle = lines(lambda one, name=name: one.figures.times[name].median)  # type: ignore[misc]
        worst = lines(lambda one, name=name: one.figures.times[name].percentiles[99.0], "2 3")  # type: ignore[misc]
        yield _chart(f"{title} (ms): median, P99 dotted", load, middle + worst)
    yield "</div>"


def _run(number: int, one: Measured) -> Iterator[str]:
    run, figures = one.run, one.figures
    yield f"<h2>Run {number}: {escape(run.service)}, {escape(run.workload)}, {escape(pace(run))}</h2>"
    for note in one.notes:
        yield f'<p class="note">{escape(note)}</p>'
    if one.prediction is not None and one.prediction.reason:
        yield f'<p class="about">No prediction: {escape(one.prediction.reason)}</p>'
    heading = ["ms", "mean", "median", "std", *(f"P{percent:g}" for percent in figures.times["ttft"].percentiles)]
    rows = [heading]
    for name in METRICS:
        spread = figures.times[name]
        rows.append([name.upper(), *(f"{value:,.2f}" for value in (spread.mean, spread.median, spread.std))])
        rows[-1] += [f"{value:,.2f}" for value in spread.percentiles.values()]
    yield _table(rows)
    yield "<p></p>"
    yield _table(replica_rows(one))
    answered = [outcome for outcome in run.outcomes if outcome.is_answered]
    if answered:
        yield '<div class="charts">'
        yield _histogram("TTFT of requests (ms)", [1e3 * outcome.ttft_s for outcome in answered])
        yield _histogram("Whole answers (ms)", [1e3 * outcome.latency_s for outcome in answered])
        yield "</div>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    heading, *body = rows
    is_word = [not cell.replace(",", "").replace(".", "").replace("-", "").isdecimal() for cell in (body or rows)[0]]
    lines = ['<div class="scroll"><table>']
    for kind, row in (("th", heading), *(("td", row) for row in body)):
        cells = (f"<{kind}{' class=word' if word else ''}>{escape(cell)}</{kind}>" for cell, word in zip(row, is_word))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</table></div>"])


def _chart(title: str, below: str, lines: Sequence[Line]) -> str:
    """Curves over a logarithmic axis of loads, from 0 up."""
    points = [point for _, _, some in lines for point in some]
    least, most = min(x for x, _ in points), max(x for x, _ in points)
    highest = _round_up(max(y for _, y in points))
    width = math.log(most / least) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        share = math.log(x / least) / width if most > least else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - 20), _HEIGHT - _BOTTOM - y / highest * (_HEIGHT - _BOTTOM - _TOP)

    parts = [_frame(title, below, highest)]
    for x in sorted({x for x, _ in points}):
        parts.append(_text(place(x, 0)[0], _HEIGHT - _BOTTOM + 16, f"{x:g}", "middle"))
    for colour, dashes, some in lines:
        if not some:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in some))
        dash = f' stroke-dasharray="{dashes}"' if dashes else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        marks = (place(*point) for point in some)
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in marks]
    return _svg(parts)


def _histogram(title: str, values: Sequence[float]) -> str:
    """How many values lie in each of equal steps; the most extreme hundredth is in the last step."""
    ordered = sorted(values)
    most = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] or 1.0
    counts = [0] * _BARS
    for value in values:
        counts[min(_BARS - 1, int(value / most * _BARS))] += 1
    highest, step = _round_up(max(counts)), (_WIDTH - _LEFT - 20) / _BARS
    parts = [_frame(title, "", highest)]
    for number, count in enumerate(counts):
        height = count / highest * (_HEIGHT - _BOTTOM - _TOP)
        x, y = _LEFT + number * step, _HEIGHT - _BOTTOM - height
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{step - 1:.1f}" height="{height:.1f}" fill="#0b7285"/>')
    for share in (0.0, 0.5, 1.0):
        label = f"{share * most:,.3g}" if share * most < 1000 else f"{share * most:,.0f}"
        parts.append(_text(_LEFT + share * _BARS * step, _HEIGHT - _BOTTOM + 16, label, "middle"))
    return _svg(parts)


def _frame(title: str, below: str, highest: float) -> str:
    lines = [_text(_LEFT, 16, title, "start", bold=True), _text((_LEFT + _WIDTH) / 2, _HEIGHT - 6, below, "middle")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)
        lines.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e7eb"/>')
        lines.append(
            _text(_LEFT - 6, y + 4, f"{share * highest:,.4g}" if highest < 1000 else f"{share * highest:,.0f}", "end")
        )
    return "".join(lines)


def _text(x: float, y: float, words: str, anchor: str, *, bold: bool = False) -> str:
    style = f'font-size="12" fill="#52606d" text-anchor="{anchor}"' + (' font-weight="600"' if bold else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def _svg(parts: Sequence[str]) -> str:
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>'


def _round_up(value: float) -> float:
    """The next number that is easy to divide by four.

    >>> _round_up(130), _round_up(0.7), _round_up(1000)
    (160.0, 0.8, 1000.0)
    """
    if value <= 0:
        return 1.0
    step = 10.0 ** math.floor(math.log10(value))
    factors = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8)
    return next((factor * step for factor in factors if factor * step >= 0.999999 * value), 10 * step)
