"""Reads what other people have made, as a model's files are: regular files alone, bounded in size and in depth.

A named pipe in a file's place would hang its reader, a huge index would fill the memory, and deep JSON would end it by
a RecursionError. A name in an index must stay below its folder. The callers say what an error means.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_INDEX_BYTES = 100 << 20
_MOST_LEVELS = 100


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read it. Raises OSError, also for a pipe, a device or a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Return what a regular file holds. Raises OSError, and ValueError if that is more than `most_bytes`."""
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it is longer than {most_bytes:,} bytes")
    return content


def read_json(path: Path) -> Any:
    """Return the JSON of a file of a model, as its index. Raises OSError, and ValueError where it cannot be used."""
    return parse_json(read_bounded(path, MAX_INDEX_BYTES))


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for one that is nested too deeply.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: it is nested too deeply
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    inside = [value]
    for _ in range(_MOST_LEVELS):
        levels = (one.values() if isinstance(one, dict) else one for one in inside if isinstance(one, dict | list))
        inside = [part for level in levels for part in level]
        if not inside:
            return value
    raise ValueError("it is nested too deeply")


def is_plain_path(path: str) -> bool:
    """Return whether a path of a listing or an index stays below its folder.

    >>> is_plain_path("2_Dense/model.safetensors"), is_plain_path("../x"), is_plain_path("/etc/x")
    (True, False, False)
    """
    return path.isprintable() and all(part not in ("", ".", "..") for part in path.split("/"))
