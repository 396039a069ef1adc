"""Several processes behind one address, for a gateway that has more to carry than one core can.

Each worker is a whole gateway. The process that started them accepts connections and gives each worker one in
turn: where all accept, the first to wake takes a whole burst. It takes the signals, too, and starts a worker again that
ends by itself. The end of its channel tells a worker that this process is gone.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the ssh that started it has ended
CONNECTION, STOP = b"c", b"s"
_AGAIN_S = 1.0

_log = logging.getLogger(__name__)


def receive(channel: socket.socket) -> tuple[bytes, socket.socket | None]:
    """Return what has come through a worker's channel: CONNECTION, with it if it could be taken, STOP, or the end."""
    told, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    return told, socket.socket(fileno=descriptors[0]) if descriptors else None


class Workers:
    """So many processes that run `work(number, channel)`."""

    def __init__(self, count: int, listener: socket.socket, work: Callable[[int, socket.socket], None]) -> None:
        self._listener = listener
        self._work = work
        self._channels = [socket.socketpair() for _ in range(count)]
        self._numbers: dict[int, int] = {}
        self._is_told = False

    def run(self, on_start: Callable[[], None]) -> None:
        """Return when all have ended after a signal. `on_start` is called when connections are accepted."""
        for one in SIGNALS:
            signal.signal(one, self._tell)
        for number in range(len(self._channels)):
            self._start(number)
        on_start()
        turns = cycle(ours for ours, _ in self._channels)
        wake, bell = socket.socketpair()
        bell.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *of_signal: None)
        before = signal.set_wakeup_fd(bell.fileno())
        self._listener.setblocking(False)
        with wake, bell, selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_told:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._listener in ready:
                    self._accept(next(turns))
                if wake in ready:
                    wake.recv(4096)
                    self._start_again()
            signal.set_wakeup_fd(before)
        self._listener.close()
        while self._numbers:
            self._numbers.pop(os.wait()[0])

    def _tell(self, *of_signal: object) -> None:
        self._is_told = True
        for ours, _ in self._channels:
            ours.send(STOP)

    def _accept(self, channel: socket.socket) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:  # it has left already, or there are too many files
            if not isinstance(error, BlockingIOError | ConnectionAbortedError):
                _log.warning("a connection is not accepted: %s", error.strerror)
                time.sleep(_AGAIN_S)
            return
        with accepted:
            socket.send_fds(channel, [CONNECTION], [accepted.fileno()])

    def _start_again(self) -> None:
        """Start those again that have ended by themselves."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                number, code = self._numbers.pop(ended[0]), os.waitstatus_to_exitcode(ended[1])
                if not self._is_told:
                    _log.error("worker %d has ended (%d), and is started again", number, code)
                    time.sleep(_AGAIN_S)
                    self._start(number)

    def _start(self, number: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if pid := os.fork():
            self._numbers[pid] = number
        else:
            self._be(number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _be(self, number: int) -> None:
        """Be a worker until it ends."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in SIGNALS:
                signal.signal(one, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            for ours, _ in self._channels:  # only the process that started the workers holds them
                ours.close()
            self._listener.close()
            self._work(number, self._channels[number][1])
            code = 0
        except Exception:
            _log.exception("a worker failed")
        finally:
            os._exit(code)  # what is to be removed at the end is for the process that made it
