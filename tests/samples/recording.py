"""A recording of a terminal as one SVG: it moves by CSS alone, and asks nobody for a font or a script.

Each line of the screen is one text for as long as it stays the same. A viewer that does not animate, and a reader who
wants no motion, get the last screen. The window has its own colours, so it can be read on light and dark pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from tests.samples.terminal import Line, Style

LETTER_PX, LINE_PX, MARGIN_PX, BAR_PX = 8.4, 20, 14, 30
COLOURS = {
    "": "#e6edf3",
    "black": "#8b949e",
    "red": "#ff8078",
    "green": "#7ee787",
    "yellow": "#e3b341",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#76e3ea",
    "white": "#e6edf3",
}
SHORTEST_S, LONGEST_S = 0.12, 0.6
TOGETHER_S = 0.2
LAST_SCREEN_S = 6.0
_SPINNER_OR_CLOCK = re.compile(r"[\u2800-\u28ff]|\d+:\d\d:\d\d")


@dataclass(frozen=True)
class Screen:
    """The lines from a moment on, in seconds since the beginning."""

    at_s: float
    lines: tuple[Line, ...]


def chosen(screens: Sequence[Screen], *, every_s: float = 4.0) -> list[Screen]:
    """Return the screens with news; where only a clock or a spinner moves, one in `every_s` seconds."""
    kept: list[Screen] = []
    for screen in screens:
        news = not kept or _words(kept[-1]) != _words(screen)
        if news and kept and screen.at_s - kept[-1].at_s < TOGETHER_S:
            kept[-1] = Screen(kept[-1].at_s, screen.lines)
        elif news or screen.at_s - kept[-1].at_s >= every_s:
            kept.append(screen)
    if screens and kept[-1].lines != screens[-1].lines:
        kept.append(screens[-1])
    return kept


def shortened(screens: Sequence[Screen]) -> list[Screen]:
    """Return the screens with the pauses between them from SHORTEST_S to LONGEST_S."""
    at_s, shown = 0.0, []
    for place, screen in enumerate(screens):
        if place:
            at_s += min(LONGEST_S, max(SHORTEST_S, screen.at_s - screens[place - 1].at_s))
        shown.append(Screen(at_s, screen.lines))
    return shown


def svg(screens: Sequence[Screen], *, title: str, columns: int) -> str:
    """Return the recording of these screens, each shown until the next."""
    ends_s = screens[-1].at_s + LAST_SCREEN_S
    height = max(len(screen.lines) for screen in screens)
    width_px = round(columns * LETTER_PX + 2 * MARGIN_PX)
    height_px = BAR_PX + height * LINE_PX + MARGIN_PX
    rules, texts = [], []
    for number, (row, line, from_s, until_s) in enumerate(_stays(screens, ends_s)):
        if (from_s, until_s) != (0.0, ends_s):
            rules.append(_keyframes(number, from_s / ends_s, until_s / ends_s))
        is_last = until_s == ends_s
        texts.append(_text(row, line, name=f"t{number}", is_last=is_last))
    label = quoteattr(title)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width_px} {height_px}" width="{width_px}" '
            f'height="{height_px}" role="img" aria-label={label}>',
            f"<title>{escape(title)}</title>",
            "<style>",
            "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
            f"white-space:pre;fill:{COLOURS['']}}}",
            ".past{visibility:hidden}",
            "@media (prefers-reduced-motion:no-preference){",
            f"text[class]{{animation:{ends_s:.2f}s step-end infinite}}",
            *rules,
            "}",
            "</style>",
            f'<rect width="{width_px}" height="{height_px}" rx="8" fill="#0d1117" stroke="#57606a"/>',
            *(f'<circle cx="{18 + 18 * n}" cy="16" r="5" fill="#57606a"/>' for n in range(3)),
            *texts,
            "</svg>\n",
        ]
    )


def _words(screen: Screen) -> list[str]:
    return [_SPINNER_OR_CLOCK.sub("", "".join(span.text for span in line)) for line in screen.lines]


def _stays(screens: Sequence[Screen], ends_s: float) -> Iterable[tuple[int, Line, float, float]]:
    """Yield each row's lines, and from when until when each stays."""
    for row in range(max(len(screen.lines) for screen in screens)):
        line: Line = ()
        from_s = 0.0
        for screen in screens:
            now = screen.lines[row] if row < len(screen.lines) else ()
            if now != line:
                if line:
                    yield row, line, from_s, screen.at_s
                line, from_s = now, screen.at_s
        if line:
            yield row, line, from_s, ends_s


def _keyframes(number: int, from_part: float, until_part: float) -> str:
    """Return the rule that shows a text for this part of the whole time."""
    steps = [f"{100 * from_part:.2f}%{{visibility:visible}}"]
    if from_part > 0:
        steps.insert(0, "0%{visibility:hidden}")
    if until_part < 1:
        steps.append(f"{100 * until_part:.2f}%{{visibility:hidden}}")
    return f"@keyframes t{number}{{{''.join(steps)}}}.t{number}{{animation-name:t{number}!important}}"


def _text(row: int, line: Line, *, name: str, is_last: bool) -> str:
    classes = name if is_last else f"{name} past"
    y = BAR_PX + (row + 1) * LINE_PX - 5
    column, spans = 0, []
    for span in line:
        x = MARGIN_PX + column * LETTER_PX
        spans.append(f'<tspan x="{x:.1f}"{_look(span.style)}>{escape(span.text)}</tspan>')
        column += len(span.text)
    return f'<text y="{y}" class="{classes}">{"".join(spans)}</text>'


def _look(style: Style) -> str:
    fill = f' fill="{COLOURS[style.colour]}"' if style.colour else ""
    weight = ' font-weight="bold"' if style.bold else ""
    opacity = ' opacity=".65"' if style.dim else ""
    return fill + weight + opacity
