"""Sizes and times as people write and read them. Pure.

Sizes are of memory in bytes, and of a layout of ranks. Times are measured, not known well, or set by a variable. A
value that cannot be meant is an error that says what to write.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from typing import TypeVar

from hpc_serve.errors import InvalidRequestError

# -- sizes

MIB = 2**20
GIB = 2**30

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_SMALLEST = MIB


def layout_text(tensor: int, pipeline: int, data: int = 1, *, between: str = " ") -> str:
    """Return the sizes of a layout for a person. Data parallelism is named only where there is any.

    >>> layout_text(8, 2), layout_text(1, 1, 16, between=" x ")
    ('TP=8 PP=2', 'DP=16 x TP=1 x PP=1')
    """
    ranks = [f"DP={data}"] if data > 1 else []
    return between.join([*ranks, f"TP={tensor}", f"PP={pipeline}"])


def parse_size(text: str) -> int:
    """Return the bytes of `79.2GiB` (powers of 1024), `80GB` (powers of 1000) or a plain number of them.

    Raises InvalidRequestError, with what to write, for what is no size or too small to be meant.

    >>> parse_size("1.5GiB"), parse_size("80 gb"), parse_size("2T"), parse_size("8388608")
    (1610612736, 80000000000, 2000000000000, 8388608)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or not (number := float(match[1])):
        raise InvalidRequestError(f"{text!r} is no size: write 79.2GiB, 80GB or a number of bytes.")
    base = 1024 if match[3] else 1000
    size = int(number * base ** ("KMGT".index(match[2].upper()) + 1 if match[2] else 0))
    if size < _SMALLEST:
        cure = "the least is 1MiB" if match[2] else "write the unit, as 80GB or 79.2GiB"
        raise InvalidRequestError(f"{text!r} is {size:,} bytes: {cure}.")
    return size


def format_size(size: int) -> str:
    """Return the shortest word that parse_size reads as these bytes.

    >>> format_size(256 * 2**30), format_size(80 * 10**9)
    ('256GiB', '80GB')
    """
    for unit, scale in (("GiB", GIB), ("GB", 10**9), ("MiB", MIB), ("MB", 10**6)):
        if size % scale == 0:
            return f"{size // scale}{unit}"
    return str(size)


def readable_size(size: int) -> str:
    """Return the bytes for a person who reads them, rounded.

    >>> readable_size(16_060_556_376), readable_size(5 * 2**20), readable_size(1400)
    ('15.0 GiB', '5 MiB', '1 KiB')
    """
    if size >= GIB:
        return f"{size / GIB:.1f} GiB"
    if size >= MIB:
        return f"{size / MIB:.0f} MiB"
    return f"{size / 1024:.0f} KiB"


# -- times and numbers


def number_of(count: int, noun: str, plural: str = "") -> str:
    """Return a number of things in words; `plural` is for a noun that takes no s.

    >>> number_of(1, "node"), number_of(0, "GPU"), number_of(2, "process", "processes")
    ('1 node', '0 GPUs', '2 processes')
    """
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


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


def at_least_one(**numbers: int | None) -> None:
    """Raise InvalidRequestError for a number below 1. None is no number."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise InvalidRequestError(f"{name} is {number}: it must be at least 1.")
