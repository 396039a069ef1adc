"""A terminal as far as our commands use one: text, colours, the line above, and clearing.

`Terminal` takes what a program writes and holds the screen. Sequences that it does not know are an error, so that a
recording is never wrong in silence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_PIECE = re.compile(
    r"\x1b\[(?P<arguments>[?\d;]*)(?P<command>[A-Za-z])|\x1b\](?P<title>[^\x07]*)\x07|(?P<text>[^\x1b])"
)


@dataclass(frozen=True)
class Style:
    """How a character looks."""

    colour: str = ""
    bold: bool = False
    dim: bool = False


@dataclass(frozen=True)
class Span:
    """Neighbouring characters of one style."""

    text: str
    style: Style = Style()


Line = tuple[Span, ...]


@dataclass
class Terminal:
    """A screen as wide as it must be. `scrolled` counts the lines that have left it at the top."""

    height: int
    rows: list[list[tuple[str, Style]]] = field(default_factory=lambda: [[]])
    scrolled: int = 0
    _row: int = 0
    _column: int = 0
    _style: Style = Style()
    _rest: str = ""

    def write(self, text: str) -> None:
        """Take what a program has written. A sequence that is not whole waits for its rest."""
        text = self._rest + text
        self._rest = ""
        place = 0
        while place < len(text):
            found = _PIECE.match(text, place)
            if found is None:
                self._rest = text[place:]
                if len(self._rest) > 100:
                    raise ValueError(f"unknown to this terminal: {self._rest[:20]!r}")
                return
            if found["command"]:
                self._control(found["command"], found["arguments"])
            elif found["text"]:
                self._character(found["text"])
            place = found.end()

    def lines(self) -> tuple[Line, ...]:
        """Return the screen's lines, each in spans of one style, without blanks at its end."""
        return tuple(_spans(row) for row in self.rows)

    def _character(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._row += 1
            if self._row == len(self.rows):
                self.rows.append([])
            if len(self.rows) > self.height:
                del self.rows[0]
                self._row -= 1
                self.scrolled += 1
        elif character.isprintable():
            row = self.rows[self._row]
            row += [(" ", Style())] * (self._column - len(row))
            row[self._column : self._column + 1] = [(character, self._style)]
            self._column += 1

    def _control(self, command: str, arguments: str) -> None:
        if command == "m":
            for number in map(int, (arguments or "0").split(";")):
                self._style = _styled(self._style, number)
        elif command == "A":
            self._row = max(0, self._row - int(arguments or 1))
        elif command == "K":
            del self.rows[self._row][0 if arguments == "2" else self._column :]
        elif command not in "hl":  # the cursor is hidden or shown
            raise ValueError(f"unknown to this terminal: ESC [ {arguments} {command}")


def _styled(style: Style, number: int) -> Style:
    if number == 0:
        return Style()
    if number in (1, 2):
        return replace(style, bold=style.bold or number == 1, dim=style.dim or number == 2)
    if number == 22:
        return replace(style, bold=False, dim=False)
    if number == 39:
        return replace(style, colour="")
    if 30 <= number <= 37 or 90 <= number <= 97:
        return replace(style, colour=COLOURS[number % 10])
    return style


def _spans(row: list[tuple[str, Style]]) -> Line:
    spans: list[Span] = []
    for character, style in row:
        if spans and spans[-1].style == style:
            spans[-1] = Span(spans[-1].text + character, style)
        else:
            spans.append(Span(character, style))
    while spans and not spans[-1].text.strip():
        spans.pop()
    if spans:
        spans[-1] = replace(spans[-1], text=spans[-1].text.rstrip())
    return tuple(spans)
