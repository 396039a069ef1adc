"""How large the files of a model's weights are that lie in a folder. vLLM says the same once it opens them."""

from __future__ import annotations

import contextlib
from pathlib import Path

_KINDS = ("*.safetensors", "*.bin", "*.pt")


def checkpoint_bytes(folder: Path) -> int:
    """The bytes of the weights in `folder`, of the first kind of file that is there; 0 if there are none to be seen."""
    for kind in _KINDS:
        with contextlib.suppress(OSError):
            if size := sum(path.stat().st_size for path in folder.glob(kind)):
                return size
    return 0
