"""The event loop that runs here: asyncio's, or trio's."""

from __future__ import annotations

import asyncio
from typing import Any


def running_loop() -> Any:
    """What the event loop that runs here is known by: asyncio's loop, or trio's token."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        import trio  # type: ignore[import-not-found]

        return trio.lowlevel.current_trio_token()


def is_asyncio(loop: Any) -> bool:
    return isinstance(loop, asyncio.AbstractEventLoop)


def has_ended(loop: Any) -> bool:
    return is_asyncio(loop) and loop.is_closed()
