"""How large the files of a model's weights are that lie in a folder. vLLM says the same size once it opens them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from hpc_serve.hub.local_weights import weight_files


def weights_in(folder: Path) -> list[Path]:
    """Return the files of the weights in `folder`, in the order of vLLM's loading; none if none can be seen."""
    with contextlib.suppress(OSError):
        return sorted((path for path in weight_files(folder) if path.stat().st_size), key=_by_numbers)
    return []


def file_sizes(files: Sequence[Path]) -> list[int]:
    """Return the size of each; none if one cannot be read."""
    with contextlib.suppress(OSError):
        return [path.stat().st_size for path in files]
    return []


def _by_numbers(path: Path) -> list[tuple[int, str]]:
    """Text by text and numbers by number: part-2 comes before part-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]
