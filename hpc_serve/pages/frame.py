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

from markupsafe import Markup

COLOURS = 8
"""Series have the classes s0 to s7, whose colour is `currentColor`: darker on paper, lighter on a dark screen."""
_LIGHT = ("#1b66a8", "#c05a12", "#2b8049", "#8f3f8a", "#b3332f", "#5f5f5f", "#7a6a10", "#1f7f8c")
_DARK = ("#6bb2f2", "#f2a266", "#76c893", "#d59ad1", "#f28b82", "#b8b8b8", "#d8c65a", "#6fd0de")
_NUMBER = re.compile(r"-|[-+]?[0-9][0-9.,]*( \S+)?")
_STYLE = """
:root{color-scheme:light dark;--ink:#1d1d1f;--soft:#5a5a60;--paper:#fff;--line:#dcdce0;--panel:#f4f4f7;--bad:#b3261e;
--bad-panel:#fdf1f0;--good:#27753c;--note:#fff3bf}
@media (prefers-color-scheme:dark){:root{--ink:#e8e8ec;--soft:#a9a9b2;--paper:#17181b;--line:#3a3b41;--panel:#232429;
--bad:#f28b82;--bad-panel:#3a2222;--good:#7fce96;--note:#4a4116}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:2em auto;padding:0 1em}
h1{font-size:1.5em;margin-bottom:0} h2{font-size:1.2em;margin:1.8em 0 .3em;border-bottom:1px solid var(--line)}
h3{font-size:1em;margin:1.3em 0 .3em} .about,.when,p.note{color:var(--soft)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums} .scroll{overflow-x:auto;
background:linear-gradient(90deg,var(--paper) 40%,transparent) 0 0/3em 100% no-repeat local,
linear-gradient(270deg,var(--paper) 40%,transparent) 100% 0/3em 100% no-repeat local,
linear-gradient(90deg,var(--soft),transparent) 0 0/.8em 100% no-repeat,
linear-gradient(270deg,var(--soft),transparent) 100% 0/.8em 100% no-repeat}
.scroll td:first-child{white-space:nowrap}
td,th{padding:.15em 1.2em .15em 0;text-align:left;vertical-align:top} td.n,th.n{text-align:right}
th{font-weight:600;color:var(--soft)} svg{max-width:100%;height:auto} figure{margin:.8em 0} figcaption{font-size:.9em}
.swatch{display:inline-block;width:.7em;height:.7em;background:currentColor}
svg text{font-size:12px;fill:var(--soft)} svg .grid{stroke:var(--line)} svg .bold{font-weight:600;fill:var(--ink)}
@media (max-width:600px){td,th{padding-right:.8em} table{font-size:.92em}
svg.wide text{font-size:19px} svg.wide .in{font-size:18px}}
"""


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
    css = f"{_STYLE}{_series()}{style}"
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


def _series() -> str:
    light = "".join(f".s{place}{{color:{colour}}}" for place, colour in enumerate(_LIGHT))
    dark = "".join(f".s{place}{{color:{colour}}}" for place, colour in enumerate(_DARK))
    return f"{light}\n@media (prefers-color-scheme:dark){{{dark}}}\n"


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
