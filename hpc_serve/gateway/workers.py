"""Several processes behind one address, for a gateway that has more to carry than one core can.

Each worker is a whole gateway. The process that started them accepts connections and gives each worker one in
turn: where all accept, the first to wake takes a whole burst. A worker that takes none from its channel, or has ended,
is passed over. That process takes the signals, too, and starts a worker again that ends by itself. The end of its
channel tells a worker that this process is gone.
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle, islice

from hpc_serve.errors import HpcServeError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the ssh that started it has ended
CONNECTION, STOP = b"c", b"s"
_AGAIN_S = 1.0
_FULL_MS = 50
_END_S = 10.0  # a worker has so long to end after its grace

_log = logging.getLogger(__name__)


def receive(channel: socket.socket) -> tuple[bytes, socket.socket | None]:
    """Return what has come through a worker's channel: CONNECTION, with it if it could be taken, STOP, or the end."""
    told, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    return told, socket.socket(fileno=descriptors[0]) if descriptors else None


class Workers:
    """So many processes that run `work(number, channel)`, and end within `grace_s` of a signal or are killed."""

    def __init__(
        self, count: int, listener: socket.socket, work: Callable[[int, socket.socket], None], *, grace_s: float
    ) -> None:
        self._listener = listener
        self._grace_s = min(grace_s, 1e9)  # a timer takes no more
        self._work = work
        self._numbers: dict[int, int] = {}
        self._ended: set[int] = set()
        self._again_at_s = 0.0
        self._is_told = False
        try:
            self._channels = [socket.socketpair() for _ in range(count)]
        except OSError as error:
            raise _too_many(count, error) from error
        for ours, _ in self._channels:
            ours.setblocking(False)
        self._turns = cycle(range(count))
        self._room = select.poll()  # the channels of the workers that run, which have room

    def run(self, on_start: Callable[[], None]) -> None:
        """Return when all have ended after a signal. `on_start` is called when connections are accepted.

        Raises HpcServeError if the system lets no more processes start.
        """
        signal.signal(signal.SIGALRM, self._kill)
        for one in SIGNALS:
            signal.signal(one, self._tell)
        try:
            for number in range(len(self._channels)):
                self._start(number)
        except OSError as error:
            self._tell()
            self._wait()
            raise _too_many(len(self._channels), error) from error
        on_start()
        wake, bell = socket.socketpair()
        bell.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *of_signal: None)
        before = signal.set_wakeup_fd(bell.fileno())
        self._listener.setblocking(False)
        with wake, bell, selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_told:
                ready = {key.fileobj for key, _ in selector.select(_AGAIN_S if self._ended else None)}
                if self._listener in ready:
                    self._accept()
                if wake in ready:
                    wake.recv(4096)
                    self._note_ends()
                if self._ended and time.monotonic() >= self._again_at_s:
                    self._start_again()
            signal.set_wakeup_fd(before)
        self._listener.close()
        self._wait()

    def _wait(self) -> None:
        while self._numbers:
            self._numbers.pop(os.wait()[0])
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _kill(self, *of_signal: object) -> None:
        """Kill the workers that have not ended, as one that is stopped."""
        for pid, number in self._numbers.items():
            _log.error("worker %d does not end, and is killed", number)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _tell(self, *of_signal: object) -> None:
        """Tell the workers to end, the second time at once."""
        signal.setitimer(signal.ITIMER_REAL, _END_S + (0 if self._is_told else self._grace_s))
        self._is_told = True
        for ours, _ in self._channels:
            with suppress(BlockingIOError):  # it was told so often, and takes nothing
                ours.send(STOP)

    def _accept(self) -> None:
        """Give a connection to the next worker that has room."""
        room = {number for number, _ in self._room.poll(_FULL_MS)}
        channels = (self._channels[number][0] for number in islice(self._turns, len(self._channels)))
        channel = next((one for one in channels if one.fileno() in room), None)
        if channel is None:
            return
        try:
            accepted, _ = self._listener.accept()
            with accepted:
                socket.send_fds(channel, [CONNECTION], [accepted.fileno()])
        except OSError as error:  # it has left already, or there are too many files
            if not isinstance(error, BlockingIOError | ConnectionAbortedError):
                _log.warning("a connection is not accepted: %s", error.strerror)
                time.sleep(_AGAIN_S)

    def _note_ends(self) -> None:
        """Note those that have ended by themselves."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                number, code = self._numbers.pop(ended[0]), os.waitstatus_to_exitcode(ended[1])
                if not self._is_told:
                    _log.error("worker %d has ended (%d), and is started again", number, code)
                self._room.unregister(self._channels[number][0])
                self._ended.add(number)
                self._again_at_s = time.monotonic() + _AGAIN_S

    def _start_again(self) -> None:
        """Start those again that have ended by themselves."""
        try:
            while self._ended:
                self._start(number := min(self._ended))
                self._ended.discard(number)
        except OSError as error:
            _log.warning("worker %d is not started again yet: %s", number, error.strerror)
            self._again_at_s = time.monotonic() + _AGAIN_S

    def _start(self, number: int) -> None:
        """Start a worker. Raises OSError."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            if pid := os.fork():
                self._numbers[pid] = number
                self._room.register(self._channels[number][0], select.POLLOUT)
            else:
                self._be(number)
        finally:
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


def _too_many(count: int, error: OSError) -> HpcServeError:
    return HpcServeError(f"{count} workers cannot be started: {error.strerror}. Give fewer --workers.")
