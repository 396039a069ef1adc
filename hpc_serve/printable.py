"""Text of others (records, logs, answers) as a terminal may show it: no character that moves its cursor or worse."""

from __future__ import annotations

import re

# C0 but tab and newline, DEL, C1, and what reorders text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""`text` with its control characters written out.

    >>> printable("a\x1b[2J")
    'a\\x1b[2J'
    """
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)
