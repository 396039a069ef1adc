"""Places labels beside the points of curves, where they cover no curve, no other label, and stay on the axes.

figure.py decides what has a label. Here each label tries eight places around its point and takes the best one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

INK, PAPER = "#1f2933", "#ffffff"
_FONT_SIZE = 8.5
_EM, _LINE = 0.62, 1.2
_NEAR, _FAR = 6.0, 8.0
_PLACES = (  # points to the right, points up, and which end of the text lies there: -1 is the left or the lower end
    (-_FAR, 0, 1, 0),
    (_FAR, 0, -1, 0),
    (_NEAR, -_NEAR, -1, 1),
    (-_NEAR, _NEAR, 1, -1),
    (0, -_FAR, 0, 1),
    (0, _FAR, 0, -1),
    (-_NEAR, -_NEAR, 1, 1),
    (_NEAR, _NEAR, -1, -1),
)
_HORIZONTAL, _VERTICAL = {-1: "left", 0: "center", 1: "right"}, {-1: "bottom", 0: "center", 1: "top"}
_SAMPLE = 3.0
_COVERS_A_LABEL, _OFF_THE_AXES = 100.0, 1000.0

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Label:
    """A text and its point, in the units of the axes."""

    text: str
    point: Point
    colour: str


@dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangle on the page, in points."""

    left: float
    bottom: float
    right: float
    top: float

    def holds(self, point: Point) -> bool:
        """Return whether a point lies in it."""
        return self.left <= point[0] <= self.right and self.bottom <= point[1] <= self.top

    def meets(self, other: Box) -> bool:
        """Return whether two overlap."""
        apart = self.right < other.left or other.right < self.left
        return not (apart or self.top < other.bottom or other.top < self.bottom)


def halo(colour: str) -> list[Any]:
    """Return an outline for text in the colour behind it, so that lines behind the text do not cross it out."""
    return [import_module("matplotlib.patheffects").withStroke(linewidth=3, foreground=colour)]


def label_points(axes: Any, labels: Sequence[Label], curves: Sequence[Sequence[Point]]) -> list[Box]:
    """Write labels and return their boxes. Earlier labels choose first. The limits of the axes must be final."""
    drawn = [point for curve in curves for point in _samples(_on_page(axes, curve))]
    frame = _frame(axes)
    taken: list[Box] = []
    for label in labels:
        anchor = _on_page(axes, [label.point])[0]
        boxes = [_box(label.text, anchor, place) for place in _PLACES]
        costs = [_cost(box, drawn, taken, frame) for box in boxes]
        best = costs.index(min(costs))
        right, up, side, end = _PLACES[best]
        taken.append(boxes[best])
        axes.annotate(
            label.text,
            label.point,
            (right, up),
            textcoords="offset points",
            ha=_HORIZONTAL[side],
            va=_VERTICAL[end],
            fontsize=_FONT_SIZE,
            color=label.colour,
            path_effects=halo(PAPER),
            zorder=5,
        )
    return taken


def _on_page(axes: Any, points: Sequence[Point]) -> list[Point]:
    scale = 72 / axes.figure.dpi
    return [(float(x) * scale, float(y) * scale) for x, y in axes.transData.transform(list(points))]


def _frame(axes: Any) -> Box:
    scale, box = 72 / axes.figure.dpi, axes.bbox
    return Box(left=box.x0 * scale, bottom=box.y0 * scale, right=box.x1 * scale, top=box.y1 * scale)


def _samples(curve: Sequence[Point]) -> Iterator[Point]:
    """Yield points along a curve, a few points of the page apart."""
    for (x, y), (next_x, next_y) in pairwise(curve):
        parts = 1 + int(max(abs(next_x - x), abs(next_y - y)) / _SAMPLE)
        for part in range(parts):
            share = part / parts
            yield x + share * (next_x - x), y + share * (next_y - y)
    yield from curve[-1:]


def _box(text: str, anchor: Point, place: tuple[float, float, int, int]) -> Box:
    right, up, side, end = place
    width, height = _EM * _FONT_SIZE * len(text), _LINE * _FONT_SIZE
    left = anchor[0] + right - width * (side + 1) / 2
    bottom = anchor[1] + up - height * (end + 1) / 2
    return Box(left=left, bottom=bottom, right=left + width, top=bottom + height)


def _cost(box: Box, drawn: Sequence[Point], taken: Sequence[Box], frame: Box) -> float:
    covered = sum(box.holds(point) for point in drawn)
    others = sum(box.meets(other) for other in taken)
    inside = frame.holds((box.left, box.bottom)) and frame.holds((box.right, box.top))
    return covered + _COVERS_A_LABEL * others + (0 if inside else _OFF_THE_AXES)
