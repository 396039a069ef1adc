"""Sizes as people write them: of memory in bytes, and of a layout of ranks."""

from __future__ import annotations

import re

from hpc_serve.errors import InvalidRequestError

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
