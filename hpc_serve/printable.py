"""Text of others (records, logs, answers) as a terminal may show it: no character that moves its cursor or worse."""

from __future__ import annotations

import json
import re
from typing import Any

# C0 but tab and newline, DEL, C1, what ends a line, and what reorders text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Return `text` with its control characters written out.

    >>> printable("a\x1b[2J")
    'a\\x1b[2J'
    """
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def json_text(value: Any, *, indent: int | None = None) -> str:
    r"""Return a value as JSON that a terminal may show.

    >>> json_text("\x9b31m \u202e Z\u00fcrich")
    '"\\u009b31m \\u202e Zürich"'
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _CONTROL.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
