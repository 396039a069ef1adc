"""Where the client's code runs: in a thread, in an event loop of asyncio, or in a process that was forked.

All that waits is written once, as coroutines. In an event loop they are awaited. In a thread `run_blocking` runs them:
all that they await there blocks the thread, so they never hand over to a loop. `InThread` and `InLoop` are the two ways
to wait.

A forked process makes its own connections, threads and locks. Two processes that read from one connection take each
other's answers, and a lock that another thread held at the fork stays locked for ever. Locks inside of OpenSSL cannot
be made anew. It takes one to make and to free each connection and each context, so that what runs at a fork does
neither: a forked process that never uses a client is not held up by the one that it inherits.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

# -- forked processes


class _Inherited(Protocol):
    """Something that is made anew in a forked process."""

    def after_fork(self) -> None: ...


_all: weakref.WeakSet[_Inherited] = weakref.WeakSet()
_left: list[object] = []


def renew_after_fork(thing: _Inherited) -> None:
    """Have `after_fork` called in each process that is forked from now on, before its own code runs."""
    _all.add(thing)


def leave_behind(inherited: object) -> None:
    """In a forked process: have something neither used nor freed, as it holds connections of the other process."""
    _left.append(inherited)


def _renew() -> None:
    for thing in list(_all):
        thing.after_fork()


os.register_at_fork(after_in_child=_renew)

# -- threads and event loops


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
