"""Asks engines for a sign of life: on a connection that is kept, and if that stays silent on a new one.

The connections are verified as all others are (`trust.connection`). Any answer is a sign of life; whether the engine
may be used is what a probe asks (`probe`).
"""

from __future__ import annotations

import contextlib
import http.client
import queue
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hpc_serve.client.pool import ReplicaAddress
from hpc_serve.client.probe import in_background
from hpc_serve.errors import RecordError
from hpc_serve.trust.connection import VerifiedConnection
from hpc_serve.vllm.metrics import EngineFigures, read_figures

_MARGIN_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Sign:
    """An answer; `figures` are None where none were asked for, or none came."""

    figures: EngineFigures | None = None


class Questions:
    """The kept connections of one client. For one thread at a time."""

    def __init__(self) -> None:
        self._kept: dict[ReplicaAddress, VerifiedConnection] = {}

    def ask(self, replicas: Mapping[ReplicaAddress, bool], answer_s: float) -> dict[str, Sign]:
        """Ask replicas side by side; the answers by record name. True: what the engine says of its work, too.

        Each has `answer_s` seconds on each of two connections.
        """
        answers: queue.SimpleQueue[tuple[ReplicaAddress, Sign | None, VerifiedConnection | None]] = queue.SimpleQueue()

        def ask(replica: ReplicaAddress, wants_figures: bool, kept: VerifiedConnection | None) -> None:
            answers.put((replica, *_ask(replica, kept, wants_figures=wants_figures, answer_s=answer_s)))

        for replica, wants_figures in replicas.items():
            in_background(ask, replica, wants_figures, self._kept.pop(replica, None))
        signs = {}
        ends_at_s = time.monotonic() + 2 * answer_s + _MARGIN_S
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


def _ask(
    replica: ReplicaAddress, kept: VerifiedConnection | None, *, wants_figures: bool, answer_s: float
) -> tuple[Sign | None, VerifiedConnection | None]:
    """The answer, and the connection that it came on."""
    ends_at_s = time.monotonic() + 1.5 * answer_s
    for connection in (kept, _new(replica, answer_s), _new(replica, answer_s)):
        if connection is None:
            continue
        if time.monotonic() > ends_at_s:
            break
        try:
            _get(connection, replica, "/health", answer_s)
        except (OSError, http.client.HTTPException, ValueError, RecordError):
            connection.close()
            continue
        try:
            text = _get(connection, replica, "/metrics", answer_s) if wants_figures else ""
        except (OSError, http.client.HTTPException, ValueError):
            connection.close()
            return Sign(), None
        return Sign(figures=read_figures(text) if text else None), connection
    return None, None


def _new(replica: ReplicaAddress, answer_s: float) -> VerifiedConnection:
    return VerifiedConnection(replica.host, replica.port, replica.identity, timeout_s=answer_s)


def _get(connection: VerifiedConnection, replica: ReplicaAddress, path: str, answer_s: float) -> str:
    if connection.sock is not None:
        connection.sock.settimeout(answer_s)
    connection.request("GET", path, headers={"Authorization": f"Bearer {replica.identity.api_key}"})
    response = connection.getresponse()
    text = response.read().decode(errors="replace")
    return text if response.status == 200 else ""
