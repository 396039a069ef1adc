"""Calls in threads of their own. What a call returns or raises is its future's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_background(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> Future[T]:
    """Call a function in a thread of its own, which does not delay the end of the program; return the future result."""
    future: Future[T] = Future()

    def work() -> None:
        future.set_running_or_notify_cancel()  # who gives it up cannot cancel it any more
        try:
            future.set_result(call(*args, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True, name="hpc-serve-background").start()
    return future
