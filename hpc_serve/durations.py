"""Times in words: measured times, and times that are not known well; and times that a variable sets. Pure."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import TypeVar

from hpc_serve.errors import InvalidRequestError

_Default = TypeVar("_Default")

SOON_S = 8.0
"""Less than this is "a few seconds"."""
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def duration(seconds: float) -> str:
    """Return a time in its two largest units.

    >>> [duration(seconds) for seconds in (-3, 0.9, 59, 60, 3725, 9e5)]
    ['0 s', '0 s', '59 s', '1 min', '1 h 2 min', '10 d 10 h']
    """
    left, words = max(0, int(seconds)), list[str]()
    for unit_s, unit in _UNITS:
        if left >= unit_s or (unit == "s" and not words):
            words.append(f"{left // unit_s} {unit}")
            left %= unit_s
    return " ".join(words[:2])


def about(seconds: float) -> str:
    """Return a time that is not known well.

    >>> [about(seconds) for seconds in (3, 12, 42, 100, 700, 9000)]
    ['a few seconds', 'about 10 s', 'about 40 s', 'about 2 min', 'about 12 min', 'about 2.5 h']
    """
    if seconds < SOON_S:
        return "a few seconds"
    if seconds < 95:
        return f"about {round(seconds / 10) * 10} s"
    if seconds < 95 * 60:
        return f"about {round(seconds / 60)} min"
    return f"about {round(seconds / 1800) / 2:g} h"


def read_seconds(
    environ: Mapping[str, str],
    variable: str,
    default: _Default,
    *,
    least: float = 0,
    most: float = math.inf,
    meaning: str = "",
) -> float | _Default:
    """Return the seconds that a variable sets. Raises InvalidRequestError; `meaning` is for its sentence."""
    text = environ.get(variable)
    if not text:
        return default
    with contextlib.suppress(ValueError):
        value = float(text)
        if least <= value <= most and value < math.inf:
            return value
    wanted = f"{least:g} to {most:g}" if most < math.inf else "a number of seconds"
    raise InvalidRequestError(f"{variable}={text}: {meaning}it must be {wanted}.")
