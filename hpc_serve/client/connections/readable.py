"""Whether a connection has something to read."""

from __future__ import annotations

import select
from typing import Any


def is_readable(connected: Any) -> bool:
    """Return whether bytes, or the end of a connection, have come; True for a socket that is closed."""
    if (number := connected.fileno()) < 0:
        return True
    asked = select.poll()
    asked.register(number, select.POLLIN)
    return bool(asked.poll(0))
