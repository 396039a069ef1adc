"""Asks engines for a sign of life: on a connection that is kept, and if that stays silent on a new one beside it.

The connections are verified as all others are (`trust.connection`). Any answer is a sign of life; whether the engine
may be used is what a probe asks (`probe`).
"""

from __future__ import annotations

import contextlib
import http.client
import queue
import socket
import struct
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from hpc_serve.client.replicas.fork import leave_behind
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.probe import in_background
from hpc_serve.errors import RecordError
from hpc_serve.trust.connection import VerifiedConnection
from hpc_serve.vllm.metrics import EngineFigures, read_figures

SECOND_S = 0.15  # until a second connection is tried beside the first
_MOST_CONNECTIONS = 3  # one after the other, where they fail
_MARGIN_S = 0.3
# In Linux's struct tcp_info: the packets that were not acknowledged yet, and those that had to be sent again.
_TCP_INFO = struct.Struct("=24xI72xI")


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What came of a question; `figures` are None where none were asked for, or none came.

    `is_answer` is False where it was not answered. `was_sent_again`: the network had lost a packet of it, or carried it
    so slowly that the kernel sent it twice. `took_s` is how long it took, a new connection included.
    """

    figures: EngineFigures | None = None
    is_answer: bool = True
    was_sent_again: bool = False
    took_s: float = 0.0


class Questions:
    """The kept connections of one client. For one thread at a time."""

    def __init__(self) -> None:
        self._kept: dict[ReplicaAddress, VerifiedConnection] = {}

    def ask(self, replicas: Mapping[ReplicaAddress, bool], answer_s: float) -> dict[str, Sign]:
        """Ask replicas side by side; what came of it by record name. True: what the engine says of its work, too.

        Of a replica that does not answer there is a sign only if the network is to blame, as far as this kernel knows.
        Each has `answer_s` seconds, on two connections side by side if the first one stays silent.
        """
        answers: queue.SimpleQueue[tuple[ReplicaAddress, Sign | None, VerifiedConnection | None]] = queue.SimpleQueue()

        def ask(replica: ReplicaAddress, wants_figures: bool, kept: VerifiedConnection | None) -> None:
            answers.put((replica, *_ask(replica, kept, wants_figures=wants_figures, answer_s=answer_s)))

        for replica, wants_figures in replicas.items():
            in_background(ask, replica, wants_figures, self._kept.pop(replica, None))
        signs = {}
        ends_at_s = time.monotonic() + answer_s + _MARGIN_S
        with contextlib.suppress(queue.Empty):  # who has not answered by then is not waited for
            for _ in replicas:
                replica, sign, connection = answers.get(timeout=max(ends_at_s - time.monotonic(), 0.001))
                if connection is not None:
                    self._kept[replica] = connection
                if sign is not None:
                    signs[replica.name] = sign
        return signs

    def keep(self, replicas: Collection[ReplicaAddress]) -> None:
        """Close the connections to all replicas but these."""
        for replica in self._kept.keys() - replicas:
            self._kept.pop(replica).close()

    def after_fork(self) -> None:
        """In a forked process the connections are those of the other one."""
        leave_behind([connection.sock for connection in self._kept.values()])
        self.keep(())


def _ask(
    replica: ReplicaAddress, kept: VerifiedConnection | None, *, wants_figures: bool, answer_s: float
) -> tuple[Sign | None, VerifiedConnection | None]:
    """The first answer, and the connection that it came on."""
    began_at_s = time.monotonic()
    ends_at_s = began_at_s + answer_s
    answers, paths = _Answers(), list[_Path]()
    under_way = 0

    def ask(path: _Path) -> None:
        connection = path.connection
        sign = _sign(connection, replica, answers, wants_figures=wants_figures, ends_at_s=ends_at_s)
        path.remember()
        answers.put(sign, connection)

    def was_sent_again() -> bool:
        # The first has been silent for SECOND_S once there are two. A host acknowledges what it gets at once.
        return any(path.was_sent_again for path in paths) or (len(paths) > 1 and paths[0].is_unacknowledged)

    try:
        while (left_s := ends_at_s - time.monotonic()) > 0 and (len(paths) < _MOST_CONNECTIONS or under_way):
            if len(paths) < _MOST_CONNECTIONS and under_way < 2:
                tried = kept if kept is not None and not paths else _new(replica, left_s)
                paths.append(_Path(tried))
                in_background(ask, paths[-1])
                under_way += 1
            with contextlib.suppress(queue.Empty):
                sign, connection = answers.get(left_s if under_way == 2 else min(SECOND_S, left_s))
                under_way -= 1
                if sign is not None:
                    took_s = time.monotonic() - began_at_s
                    return replace(sign, was_sent_again=was_sent_again(), took_s=took_s), connection
        sign = Sign(is_answer=answers.is_alive, was_sent_again=was_sent_again(), took_s=answer_s)
        return (sign if sign.is_answer or sign.was_sent_again else None), None
    finally:
        answers.close()


class _Path:
    """What the kernel says of the packets of one connection, from now on. It says nothing where it is not Linux's."""

    def __init__(self, connection: VerifiedConnection) -> None:
        self.connection = connection
        self._is_over = False
        self._remembered = 0, 0
        self._sent_again_before = self._packets()[1]

    def remember(self) -> None:
        """The connection may be closed from now on."""
        self._remembered = self._packets()
        self._is_over = True

    @property
    def is_unacknowledged(self) -> bool:
        if self.connection.sock is None and not self._is_over:
            return True  # the kernel still waits for the other one's first packet
        return max(self._packets()[0], self._remembered[0]) > 0

    @property
    def was_sent_again(self) -> bool:
        return max(self._packets()[1], self._remembered[1]) > self._sent_again_before

    def _packets(self) -> tuple[int, int]:
        """How many are not acknowledged yet, and how many were sent again."""
        open_socket = self.connection.sock
        if open_socket is None or not hasattr(socket, "TCP_INFO"):
            return 0, 0
        try:
            unacknowledged, sent_again = _TCP_INFO.unpack(
                open_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            )
        except (OSError, struct.error):  # it has been closed, or the kernel says less
            return 0, 0
        return unacknowledged, sent_again


class _Answers:
    """Of several connections; those that answer once nobody waits any more are closed.

    `is_alive`: the engine has answered, and may not have said what it does.
    """

    def __init__(self) -> None:
        self.is_alive = False
        self._lock = threading.Lock()
        self._is_closed = False
        self._queue: queue.SimpleQueue[tuple[Sign | None, VerifiedConnection | None]] = queue.SimpleQueue()

    def put(self, sign: Sign | None, connection: VerifiedConnection) -> None:
        with self._lock:
            if sign is not None and not self._is_closed:
                self._queue.put((sign, connection))
                return
        connection.close()
        self._queue.put((None, None))

    def get(self, timeout_s: float) -> tuple[Sign | None, VerifiedConnection | None]:
        return self._queue.get(timeout=max(timeout_s, 0.001))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            while not self._queue.empty():
                _, connection = self._queue.get()
                if connection is not None:
                    connection.close()


def _sign(
    connection: VerifiedConnection,
    replica: ReplicaAddress,
    answers: _Answers,
    *,
    wants_figures: bool,
    ends_at_s: float,
) -> Sign | None:
    try:
        _get(connection, replica, "/health", ends_at_s)
    except (OSError, http.client.HTTPException, ValueError, RecordError):
        return None
    answers.is_alive = True
    try:
        text = _get(connection, replica, "/metrics", ends_at_s) if wants_figures else ""
    except (OSError, http.client.HTTPException, ValueError):
        connection.close()  # the next question finds it closed, and connects anew
        return Sign()
    return Sign(figures=read_figures(text) if text else None)


def _new(replica: ReplicaAddress, answer_s: float) -> VerifiedConnection:
    return VerifiedConnection(replica.host, replica.port, replica.identity, timeout_s=answer_s)


def _get(connection: VerifiedConnection, replica: ReplicaAddress, path: str, ends_at_s: float) -> str:
    if connection.sock is not None:
        connection.sock.settimeout(max(ends_at_s - time.monotonic(), 0.001))
    connection.request("GET", path, headers={"Authorization": f"Bearer {replica.identity.api_key}"})
    response = connection.getresponse()
    text = response.read().decode(errors="replace")
    return text if response.status == 200 else ""
