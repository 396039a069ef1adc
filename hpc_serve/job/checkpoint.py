"""How large the files of a model's weights are that lie in a folder, and how much of them is in the page cache.

vLLM says the same size once it opens them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

_KINDS = ("*.safetensors", "*.bin", "*.pt")
_SAMPLES = 512


def weights_in(folder: Path) -> list[Path]:
    """The files of the weights in `folder`, of the first kind that is there, in the order in which vLLM loads them.

    None if there are none to be seen.
    """
    for kind in _KINDS:
        with contextlib.suppress(OSError):
            if files := sorted((path for path in folder.glob(kind) if path.stat().st_size), key=_by_numbers):
                return files
    return []


def file_sizes(files: Sequence[Path]) -> list[int]:
    """The size of each; none if one cannot be read."""
    with contextlib.suppress(OSError):
        return [path.stat().st_size for path in files]
    return []


def cached_part(files: Sequence[Path]) -> float | None:
    """How much of them this node has in its page cache, from 0 to 1, by samples. Nothing is read from a disk.

    None where that is not to be known: no files, or a filesystem that always waits, as network filesystems do.
    """
    found: list[bool] = []
    each = max(1, _SAMPLES // max(1, len(files)))
    with contextlib.suppress(OSError):
        for path in files:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.fstat(file).st_size
                found += [_is_cached(file, size * place // each) for place in range(each)]
            finally:
                os.close(file)
        return sum(found) / len(found) if found else None
    return None


def _is_cached(file: int, offset: int) -> bool:
    """Raises OSError where the filesystem cannot answer."""
    try:
        return os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


def _by_numbers(path: Path) -> list[tuple[int, str]]:
    """Text by text and numbers by number: part-2 comes before part-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]
