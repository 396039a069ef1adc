"""How large the files of a model's weights are that lie in a folder. vLLM says the same size once it opens them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from hpc_serve.hub.local_weights import weight_files


def weight_sizes(folder: Path) -> list[int]:
    """Return the sizes of the weights' files in `folder`, in the order of vLLM's loading; none if one is unseen."""
    with contextlib.suppress(OSError):
        files = sorted(weight_files(folder), key=_by_numbers)
        return [size for path in files if (size := path.stat().st_size)]
    return []


def _by_numbers(path: Path) -> list[tuple[int, str]]:
    """Text by text and numbers by number: part-2 comes before part-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]
