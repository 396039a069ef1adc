"""Several processes that accept on one listener, for a gateway that has more to carry than one core can.

Each worker is a gateway of its own. The process that started them takes the signals and passes them on through a pipe
to each worker, whose end also tells that this process is gone. A worker that ends by itself is started again.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the ssh that started it has ended
_AGAIN_S = 1.0

_log = logging.getLogger(__name__)


def run_workers(count: int, work: Callable[[int, int], None], on_start: Callable[[], None]) -> None:
    """Run `work(number, pipe)` in so many processes, and return when all have ended after a signal.

    At each signal a byte comes from the pipe. `on_start` is called when all have begun.
    """
    pipes = {number: os.pipe() for number in range(count)}
    numbers: dict[int, int] = {}
    is_told = False

    def tell(*of_signal: object) -> None:
        nonlocal is_told
        is_told = True
        for _, told in pipes.values():
            os.write(told, b".")

    def start(number: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if pid := os.fork():
            numbers[pid] = number
        else:
            _be_worker(lambda: work(number, pipes[number][0]), [told for _, told in pipes.values()])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    for one in SIGNALS:
        signal.signal(one, tell)
    for number in pipes:
        start(number)
    on_start()
    while numbers:
        pid, status = os.wait()
        number = numbers.pop(pid)
        if not is_told:
            _log.error("worker %d has ended (%d) and is started again", number, os.waitstatus_to_exitcode(status))
            time.sleep(_AGAIN_S)
        if not is_told:
            start(number)


def _be_worker(work: Callable[[], None], ends: list[int]) -> None:
    code = 1
    try:
        for end in ends:  # only the process that started the workers holds them
            os.close(end)
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        work()
        code = 0
    except Exception:
        _log.exception("a worker failed")
    finally:
        os._exit(code)  # what is to be removed at the end is for the process that made it
