"""Where the client's code runs: in a thread, or in an event loop of asyncio.

All that waits is written once, as coroutines. In an event loop they are awaited. In a thread `run_blocking` runs them:
all that they await there blocks the thread, so they never hand over to a loop. `InThread` and `InLoop` are the two ways
to wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class InThread:
    """How a coroutine waits in a thread: it blocks the thread."""

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return what a function returns that waits for files or probes."""
        return function(*arguments)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs here


class InLoop:
    """How a coroutine waits in an event loop: other tasks go on, and the wait may be cancelled."""

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return what a function returns that waits for files or probes."""
        import anyio.to_thread

        return await anyio.to_thread.run_sync(function, *arguments)

    async def sleep(self, seconds: float) -> None:
        import anyio

        await anyio.sleep(seconds)


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits as in a thread; return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a coroutine waited for an event loop in a thread")
