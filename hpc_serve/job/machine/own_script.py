"""Whether a command is the script that an installer made for a package of this Python, and can be run in process."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def is_own_script(command: str | None, module: str) -> bool:
    """Return whether a command is the script of this Python's environment that runs `module`."""
    if command is None:
        return False
    try:
        first, *others = Path(command).read_text().splitlines()
    except (OSError, ValueError):
        return False
    is_this = first.startswith("#!") and os.path.dirname(first[2:].strip()) == os.path.dirname(sys.executable)
    return is_this and any(module in line for line in others)
