"""Pictures of a report page, as SVG inside the page: a bar of stages, curves over time. Pure; all text is escaped."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

COLOURS = ("#2a6fb0", "#d1732a", "#3a8f57", "#9a4f96", "#b3433f", "#6b6b6b", "#8a7a1f", "#2f8f9d")
_WIDTH, _HEIGHT = 860, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 26
_MOST_POINTS = 800
_GAP_S = 35.0  # vLLM reports every ten seconds; where it does not, it had no work


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One curve: its name, and values at times since the epoch."""

    name: str
    points: Sequence[tuple[float, float]]


def stage_bar(stages: Sequence[tuple[str, float]]) -> Markup:
    """Stages with their seconds, side by side in the order of time."""
    total = sum(seconds for _, seconds in stages)
    if total <= 0:
        return Markup("")
    parts, x = [], 0.0
    for place, (name, seconds) in enumerate(stages):
        width = _WIDTH * seconds / total
        parts.append(
            Markup(
                '<rect x="{:.1f}" y="0" width="{:.1f}" height="34" fill="{}"><title>{}: {:.0f} s</title></rect>'
            ).format(x, max(width, 0.5), COLOURS[place % len(COLOURS)], name, seconds)
        )
        if width > 9 * len(name):
            parts.append(Markup('<text x="{:.1f}" y="22" class="in">{}</text>').format(x + width / 2, name))
        x += width
    return Markup('<svg viewBox="0 0 {} 34" role="img" aria-label="stages of the start">{}</svg>').format(
        _WIDTH, Markup("").join(parts)
    )


def curves(title: str, found: Sequence[Curve], *, unit: str = "", percent: bool = False) -> Markup:
    """Curves over one axis of time. Points further apart than a report are not joined."""
    points = [point for curve in found for point in curve.points]
    if not points:
        return Markup("")
    begin, end = min(at for at, _ in points), max(at for at, _ in points)
    top = 1.0 if percent else _round_up(max(value for _, value in points))
    span_s = max(end - begin, 1.0)

    def x(at: float) -> float:
        return _LEFT + (at - begin) / span_s * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - min(value / top, 1.0) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for share in (0.0, 0.5, 1.0):
        shown = f"{100 * share:.0f} %" if percent else f"{share * top:,.4g}"
        parts.append(
            Markup(
                '<line x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}" class="grid"/>'
                '<text x="{}" y="{:.1f}" class="y">{}</text>'
            ).format(_LEFT, _WIDTH - _RIGHT, y(share * top), y(share * top), _LEFT - 6, y(share * top) + 4, shown)
        )
    for at, anchor in ((begin, "start"), ((begin + end) / 2, "middle"), (end, "end")):
        parts.append(
            Markup('<text x="{:.1f}" y="{}" text-anchor="{}" class="x">{}</text>').format(
                x(at), _HEIGHT - 8, anchor, time.strftime("%m-%d %H:%M:%S", time.localtime(at))
            )
        )
    for place, curve in enumerate(found):
        colour = COLOURS[place % len(COLOURS)]
        for piece in _pieces(curve.points):
            if len(piece) == 1:
                at, value = piece[0]
                parts.append(
                    Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2" fill="{}"/>').format(x(at), y(value), colour)
                )
                continue
            path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in piece)
            parts.append(
                Markup('<polyline points="{}" fill="none" stroke="{}" stroke-width="1.6"/>').format(path, colour)
            )
    legend = Markup(" ").join(
        Markup('<span class="key" style="color:{}">&#9632;</span> {}').format(COLOURS[place % len(COLOURS)], curve.name)
        for place, curve in enumerate(found)
    )
    heading = f"{title} ({unit})" if unit else title
    return Markup(
        "<figure><figcaption><b>{}</b> &nbsp; {}</figcaption>"
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg></figure>'
    ).format(heading, legend, _WIDTH, _HEIGHT, escape(title), Markup("").join(parts))


def _pieces(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """The points in pieces without a gap, thinned out where there are more than can be seen."""
    step = max(1, len(points) // _MOST_POINTS)
    kept = [max(points[at : at + step], key=lambda point: point[1]) for at in range(0, len(points), step)]
    pieces: list[list[tuple[float, float]]] = []
    for point in kept:
        if pieces and point[0] - pieces[-1][-1][0] <= _GAP_S * step:
            pieces[-1].append(point)
        else:
            pieces.append([point])
    return pieces


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20 …"""
    step = 1.0
    while True:
        for factor in (1, 2, 5):
            if value <= factor * step:
                return factor * step
        step *= 10
