"""Charts of a page, as SVG inside it: curves over time or over a load, a histogram, a bar of stages. Pure.

Series have the colours of frame.py by number. All text is escaped where it is put in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hpc_serve.pages.frame import COLOURS, swatch

_MOST_POINTS = 800
_GAP_S = 35.0  # vLLM reports every ten seconds while it has work
_BARS = 24

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One curve: its name, its points, and how it is drawn."""

    name: str
    points: Sequence[Point]
    series: int = 0
    dashes: str = ""


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """A drawing with room for the labels of its axes."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    def x(self, share: float) -> float:
        return self.left + share * (self.width - self.left - self.right)

    def y(self, share: float) -> float:
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)

    def svg(self, title: str, parts: Iterable[Markup]) -> Markup:
        size = Markup('width="{0}" height="{1}" viewBox="0 0 {0} {1}"').format(self.width, self.height)
        about = Markup(' class="wide"') if self.width > _SMALL.width else ""
        frame = Markup('<svg xmlns="http://www.w3.org/2000/svg" {}{} role="img" aria-label="{}">{}</svg>')
        return frame.format(size, about, title, Markup("").join(parts))

    def grid(self, top: float, shares: Sequence[float], shown: Callable[[float], str]) -> list[Markup]:
        """Horizontal lines at shares of the highest value, with their values."""
        line = Markup('<line x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}" class="grid"/>')
        found = []
        for share in shares:
            y = self.y(share)
            found.append(line.format(self.left, self.width - self.right, y, y))
            found.append(_text(self.left - 6, y + 4, shown(share * top), "end"))
        return found


_WIDE = _Panel(width=860, height=180, left=84, right=12, top=12, bottom=26)
_SMALL = _Panel(width=430, height=280, left=58, right=20, top=28, bottom=42)


def stage_bar(stages: Sequence[tuple[str, float]]) -> Markup:
    """Stages with their seconds, side by side in the order of time."""
    total = sum(seconds for _, seconds in stages)
    if total <= 0:
        return Markup("")
    bar = _Panel(width=860, height=34, left=0, right=0, top=0, bottom=0)
    box = Markup('<rect x="{:.1f}" y="0" width="{:.1f}" height="34" class="s{}" fill="currentColor">')
    parts, x = [], 0.0
    for place, (name, seconds) in enumerate(stages):
        width = bar.width * seconds / total
        parts.append(box.format(x, max(width, 0.5), place % COLOURS))
        parts.append(Markup("<title>{}: {:.0f} s</title></rect>").format(name, seconds))
        if width > 11 * len(name):
            parts.append(_text(x + width / 2, 22, name, "middle", kind="in"))
        x += width
    return bar.svg("stages of the start", parts)


def over_time(title: str, found: Sequence[Curve], *, unit: str = "", percent: bool = False) -> Markup:
    """Curves over one axis of time, coloured by their order. Points further apart than a report are not joined."""
    points = [point for curve in found for point in curve.points]
    if not points:
        return Markup("")
    begin, end = min(at for at, _ in points), max(at for at, _ in points)
    top = 1.0 if percent else _next_of(max(value for _, value in points), (1, 2, 5), least=1.0)
    span_s = max(end - begin, 1.0)

    def place(point: Point) -> Point:
        return _WIDE.x((point[0] - begin) / span_s), _WIDE.y(min(point[1] / top, 1.0))

    parts = _WIDE.grid(top, (0.0, 0.5, 1.0), lambda value: f"{100 * value:.0f} %" if percent else axis_number(value, 4))
    for at, anchor in ((begin, "start"), ((begin + end) / 2, "middle"), (end, "end")):
        words = time.strftime("%m-%d %H:%M:%S", time.localtime(at))
        parts.append(_text(place((at, 0))[0], _WIDE.height - 8, words, anchor))
    for number, curve in enumerate(found):
        for piece in _pieces(curve.points):
            parts.append(_line(list(map(place, piece)), number, "", is_marked=len(piece) == 1, radius=2))
    keys = Markup(" ").join(Markup("{} {}").format(swatch(number), curve.name) for number, curve in enumerate(found))
    heading = f"{title} ({unit})" if unit else title
    return Markup("<figure><figcaption><b>{}</b> &nbsp; {}</figcaption>{}</figure>").format(
        heading, keys, _WIDE.svg(title, parts)
    )


def over_load(title: str, below: str, found: Sequence[Curve]) -> Markup:
    """Curves over a logarithmic axis of loads, from 0 up; every point is marked."""
    points = [point for curve in found for point in curve.points]
    least, most = min(x for x, _ in points), max(x for x, _ in points)
    top = _next_of(max(y for _, y in points))
    width = math.log(most / least) or 1.0

    def place(point: Point) -> Point:
        share = math.log(point[0] / least) / width if most > least else 0.5
        return _SMALL.x(share), _SMALL.y(point[1] / top)

    parts = _small_frame(title, below, top)
    for x in sorted({x for x, _ in points}):
        parts.append(_text(place((x, 0))[0], _SMALL.height - _SMALL.bottom + 16, axis_number(x, 6), "middle"))
    for curve in found:
        if curve.points:
            parts.append(_line(list(map(place, curve.points)), curve.series, curve.dashes, is_marked=True, radius=3))
    return _SMALL.svg(title, parts)


def histogram(title: str, values: Sequence[float]) -> Markup:
    """How many values lie in each of equal steps; the most extreme hundredth is in the last step."""
    ordered = sorted(values)
    most = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] or 1.0
    counts = [0] * _BARS
    for value in values:
        counts[min(_BARS - 1, int(value / most * _BARS))] += 1
    top = _next_of(max(counts))
    parts, base = _small_frame(title, "", top), _SMALL.y(0)
    bar = Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" class="s0" fill="currentColor"/>')
    for number, count in enumerate(counts):
        left, right, y = _SMALL.x(number / _BARS), _SMALL.x((number + 1) / _BARS), _SMALL.y(count / top)
        parts.append(bar.format(left, y, right - left - 1, base - y))
    for share in (0.0, 0.5, 1.0):
        parts.append(_text(_SMALL.x(share), base + 16, axis_number(share * most, 3), "middle"))
    return _SMALL.svg(title, parts)


def _small_frame(title: str, below: str, top: float) -> list[Markup]:
    return [
        _text(_SMALL.left, 16, title, "start", kind="bold"),
        _text((_SMALL.left + _SMALL.width) / 2, _SMALL.height - 6, below, "middle"),
        *_SMALL.grid(top, (0.0, 0.25, 0.5, 0.75, 1.0), lambda value: axis_number(value, 4)),
    ]


def axis_number(value: float, digits: int) -> str:
    """A number with so many digits, without an exponent.

    >>> axis_number(25000, 4), axis_number(2.5, 4), axis_number(0.0, 4)
    ('25,000', '2.5', '0')
    """
    return f"{value:,.{digits}g}" if value < 1000 else f"{value:,.0f}"


def _text(x: float, y: float, words: str, anchor: str, *, kind: str = "") -> Markup:
    about = Markup(' class="{}"').format(kind) if kind else ""
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}"{}>{}</text>').format(x, y, anchor, about, words)


def _line(points: Sequence[Point], series: int, dashes: str, *, is_marked: bool, radius: int) -> Markup:
    """A line through points on the page, and marks on them."""
    parts = []
    if len(points) > 1 or not is_marked:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = Markup(' stroke-dasharray="{}"').format(dashes) if dashes else ""
        line = Markup('<polyline points="{}" fill="none" stroke="currentColor" stroke-width="1.8" class="s{}"{}/>')
        parts.append(line.format(path, series % COLOURS, dash))
    if is_marked:
        mark = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{}" fill="currentColor" class="s{}"/>')
        parts += [mark.format(x, y, radius, series % COLOURS) for x, y in points]
    return Markup("").join(parts)


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


def _next_of(
    value: float, factors: Sequence[float] = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8), *, least: float = 0.0
) -> float:
    """The next number up that is one of the factors times a power of ten. The usual factors are easy to divide by four.

    >>> _next_of(130), _next_of(0.7), _next_of(1000), _next_of(130, (1, 2, 5))
    (160.0, 0.8, 1000.0, 200.0)
    """
    if value <= least:
        return least or 1.0
    step = 10.0 ** math.floor(math.log10(value))
    return next((factor * step for factor in factors if factor * step >= 0.999999 * value), 10 * step)
