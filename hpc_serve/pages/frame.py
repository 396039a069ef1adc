"""The frame, the tables and the charts of every page: one file of HTML that needs no other.

A policy forbids the browser to load any other file. A page may have one script and one style, which the policy names by
their hashes: nothing that others wrote can become part of the page, even if it were put in unescaped. Text is escaped
by markupsafe where it is put in. Charts are SVG inside the page: curves over time or over a load, and a bar of stages.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup

COLOURS = 8
"""Series have the classes s0 to s7 of frame.css, whose colour is `currentColor`: darker on paper, lighter on a dark
screen."""
_NUMBER = re.compile(r"-|[-+]?[0-9][0-9.,]*( \S+)?")
_STYLE = Path(__file__).with_name("frame.css")


def document(
    title: str, body: Markup, *, style: str = "", script: str = "", data: object = None, asks_its_host: bool = False
) -> str:
    """Return the whole page. `data` is what the script reads, as JSON in the element with the id `data`.

    With `asks_its_host` the script may send requests to the server that the page came from.
    """
    css = _STYLE.read_text(encoding="utf-8") + style
    policy = f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src {_source(css)}"
    parts = [body]
    if data is not None:
        parts.append(Markup('<script type="application/json" id="data">{}</script>').format(_json(data)))
    if script:
        policy += f"; script-src {_source(script)}" + ("; connect-src 'self'" if asks_its_host else "")
        parts.append(Markup("<script>{}</script>").format(_verbatim(script, "script")))
    return str(
        Markup(
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            '<meta http-equiv="Content-Security-Policy" content="{}"><title>{}</title><style>{}</style></head>\n'
            "<body>{}</body></html>\n"
        ).format(policy, title, _verbatim(css, "style"), Markup("\n").join(parts))
    )


def number_columns(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return which columns hold numbers alone, perhaps with a unit: these go to the right.

    >>> number_columns([["9-r0-0", "1,024", "22.2 s"], ["10-r0-0", "-", "1 at once"]])
    [False, True, False]
    """
    return [all(_NUMBER.fullmatch(cell) for cell in column if cell) for column in zip(*rows)]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """Return a table; columns of numbers go to the right."""
    right = number_columns(rows) or [False] * len(headings)

    def line(cells: Sequence[str], tag: str) -> Markup:
        found = [
            Markup("<{}{}>{}</{}>").format(tag, Markup(' class="n"') if is_number else "", cell, tag)
            for cell, is_number in zip(cells, right)
        ]
        return Markup("<tr>{}</tr>").format(Markup("").join(found))

    lines = Markup("").join(line(row, "td") for row in rows)
    return Markup('<div class="scroll"><table>{}{}</table></div>').format(line(headings, "th"), lines)


def swatch(number: int) -> Markup:
    """A little square in the colour of a series."""
    return Markup('<i class="swatch s{}"></i>').format(number % COLOURS)


def _source(text: str) -> str:
    """The hash by which a policy names a script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _verbatim(text: str, tag: str) -> Markup:
    """Return a script or style of this package unchanged; it must not close its element."""
    assert f"</{tag}" not in text.lower()
    return Markup(text)


def _json(data: object) -> Markup:
    """JSON that cannot end its element, whatever its texts are."""
    text = json.dumps(data, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


# -- charts

_MOST_POINTS = 800
_GAP_S = 35.0  # vLLM reports every ten seconds while it has work
_WIDE, _SMALL = (860, 190), (430, 260)
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 20, 12, 42  # room for the labels of axes
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One curve: its name, its points, and how it is drawn."""

    name: str
    points: Sequence[Point]
    series: int = 0
    dashes: str = ""


def stage_bar(stages: Sequence[tuple[str, float]]) -> Markup:
    """Stages with their seconds, side by side in the order of time."""
    total = sum(seconds for _, seconds in stages)
    if total <= 0:
        return Markup("")
    box = Markup('<rect x="{:.1f}" y="0" width="{:.1f}" height="34" class="s{}" fill="currentColor">')
    parts, x, width_of_all = [], 0.0, _WIDE[0]
    for place, (name, seconds) in enumerate(stages):
        width = width_of_all * seconds / total
        parts.append(box.format(x, max(width, 0.5), place % COLOURS))
        parts.append(Markup("<title>{}: {:.0f} s</title></rect>").format(name, seconds))
        if width > 11 * len(name):
            parts.append(_text(x + width / 2, 22, name, "middle", kind="in"))
        x += width
    return _svg("stages of the start", (width_of_all, 34), parts)


def over_time(title: str, found: Sequence[Curve], *, unit: str = "", percent: bool = False) -> Markup:
    """Curves over one axis of time, coloured by their order. Points further apart than a report are not joined."""
    ats = sorted(at for curve in found for at, _ in curve.points)
    if not ats:
        return Markup("")
    ends = (ats[0], (ats[0] + ats[-1]) / 2, ats[-1])
    ticks = {at: time.strftime("%m-%d %H:%M:%S", time.localtime(at)) for at in ends}
    numbered = [replace(curve, series=number) for number, curve in enumerate(found)]
    pieces = [replace(curve, points=piece) for curve in numbered for piece in _pieces(curve.points)]
    heading = f"{title} ({unit})" if unit else title
    return _figure(heading, numbered, _drawing(title, pieces, ticks, _WIDE, percent=percent))


def over_load(title: str, below: str, found: Sequence[Curve]) -> Markup:
    """Curves over a logarithmic axis of loads, from 0 up; every point is marked."""
    scaled = [replace(curve, points=[(math.log(x), y) for x, y in curve.points]) for curve in found]
    ticks = {math.log(x): _axis_number(x, 6) for curve in found for x, _ in curve.points}
    return _figure(title, found, _drawing(title, scaled, ticks, _SMALL, below=below, is_marked=True))


def _figure(heading: str, curves: Iterable[Curve], drawing: Markup) -> Markup:
    """Return a drawing under its heading, with the name of each series once."""
    names = {curve.series: curve.name for curve in curves}
    keys = Markup(" ").join(
        Markup('<span class="key">{} {}</span>').format(swatch(series), name) for series, name in names.items()
    )
    return Markup("<figure><figcaption><b>{}</b> &nbsp; {}</figcaption>{}</figure>").format(heading, keys, drawing)


def _drawing(
    title: str,
    curves: Sequence[Curve],
    ticks: Mapping[float, str],
    size: tuple[int, int],
    *,
    below: str = "",
    percent: bool = False,
    is_marked: bool = False,
) -> Markup:
    """Curves over the span of the ticks and from 0 up, with the marks of each point, or of those that stand alone."""
    (width, height), begin, span = size, min(ticks), max(ticks) - min(ticks)
    top = 1.0 if percent else _next_above(max(y for curve in curves for _, y in curve.points))

    def place(point: Point) -> Point:
        share = (point[0] - begin) / span if span else 0.5
        up = min(point[1] / top, 1.0) * (height - _TOP - _BOTTOM)
        return _LEFT + share * (width - _LEFT - _RIGHT), height - _BOTTOM - up

    parts = [_text((_LEFT + width) / 2, height - 6, below, "middle")]
    line = Markup('<line x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}" class="grid"/>')
    for quarter in range(5):
        value = top * quarter / 4
        _, y = place((begin, value))
        parts.append(line.format(_LEFT, width - _RIGHT, y, y))
        parts.append(_text(_LEFT - 6, y + 4, f"{100 * value:.0f} %" if percent else _axis_number(value, 4), "end"))
    for at, words in ticks.items():
        x, y = place((at, 0))
        anchor = "start" if x < 0.2 * width else "end" if x > 0.9 * width else "middle"
        parts.append(_text(x, y + 16, words, "middle" if is_marked else anchor))
    path = Markup('<polyline points="{}" fill="none" stroke="currentColor" stroke-width="1.8" class="s{}"{}/>')
    mark = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="currentColor" class="s{}"/>')
    for curve in curves:
        points, series = list(map(place, curve.points)), curve.series % COLOURS
        if len(points) > 1:
            dashes = Markup(' stroke-dasharray="{}"').format(curve.dashes) if curve.dashes else ""
            parts.append(path.format(" ".join(f"{x:.1f},{y:.1f}" for x, y in points), series, dashes))
        if is_marked or len(points) == 1:
            parts += [mark.format(x, y, series) for x, y in points]
    return _svg(title, size, parts)


def _svg(title: str, size: tuple[int, int], parts: Iterable[Markup]) -> Markup:
    about = Markup(' class="wide"') if size[0] > _SMALL[0] else ""
    frame = Markup('<svg width="{0}" height="{1}" viewBox="0 0 {0} {1}"{2} role="img" aria-label="{3}">{4}</svg>')
    return frame.format(*size, about, title, Markup("").join(parts))


def _axis_number(value: float, digits: int) -> str:
    """A number with so many digits, without an exponent.

    >>> _axis_number(25000, 4), _axis_number(2.5, 4), _axis_number(0.0, 4)
    ('25,000', '2.5', '0')
    """
    return f"{value:,.{digits}g}" if value < 1000 else f"{value:,.0f}"


def _text(x: float, y: float, words: str, anchor: str, *, kind: str = "") -> Markup:
    about = Markup(' class="{}"').format(kind) if kind else ""
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}"{}>{}</text>').format(x, y, anchor, about, words)


def _pieces(points: Sequence[Point]) -> list[list[Point]]:
    """The points in pieces without a gap, thinned out where there are more than can be seen."""
    step = max(1, len(points) // _MOST_POINTS)
    kept = [max(points[at : at + step], key=lambda point: point[1]) for at in range(0, len(points), step)]
    pieces: list[list[Point]] = []
    for point in kept:
        if pieces and point[0] - pieces[-1][-1][0] <= _GAP_S * step:
            pieces[-1].append(point)
        else:
            pieces.append([point])
    return pieces


def _next_above(value: float) -> float:
    """The next number up that is easy to divide by four; 1 above 0.

    >>> _next_above(130), _next_above(0.7), _next_above(1000), _next_above(0)
    (160.0, 0.8, 1000.0, 1.0)
    """
    if value <= 0:
        return 1.0
    step = 10.0 ** math.floor(math.log10(value))
    return next(
        (one * step for one in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8) if one * step >= 0.999999 * value), 10 * step
    )
