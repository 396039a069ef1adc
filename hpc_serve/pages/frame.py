"""The frame of every page: one file that needs no other, with a policy that forbids the browser to load any.

A page may have one script and one style, which the policy names by their hashes: nothing that others wrote can become
part of the page, even if it were put in unescaped. Text is escaped by markupsafe where it is put in.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

COLOURS = 8
"""Series have the classes s0 to s7 of frame.css, whose colour is `currentColor`: darker on paper, lighter on a dark
screen."""
_NUMBER = re.compile(r"-|[-+]?[0-9][0-9.,]*( \S+)?")
_STYLE = Path(__file__).with_name("frame.css")


def document(
    title: str,
    body: Markup,
    *,
    style: str = "",
    script: str = "",
    data: object = None,
    asks_its_host: bool = False,
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
