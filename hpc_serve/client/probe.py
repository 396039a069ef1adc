"""Is a replica there now? A record is a hint; this asks the engine, and watches whether the record is renewed.

An engine is believed when its /health answers and proves that it knows the service's API key: the port of an engine
that died may be another user's by now, and the key must not be sent to them. What follows from it is left to
`discovery`. Proxy variables are ignored: `http.client` knows none.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import get_args

from hpc_serve.client.views import Answer, ProbeStatus
from hpc_serve.job.gate import CHALLENGE_HEADER, DRAINING_HEADER, PROOF_HEADER, prove
from hpc_serve.rendezvous.record import EndpointRecord

PROBE_TIMEOUT_S = 3.0

# How long a host that answered waits for one that its record prefers.
_PREFERENCE_S = 0.1

_ORDER: tuple[ProbeStatus, ...] = get_args(ProbeStatus)
_SILENT = Answer(verdict="silent", detail="no answer in time")


def probe(host: str, port: int, api_key: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> Answer:
    """Ask one address for its health, and for a proof that it knows `api_key`, which is not sent."""
    challenge = secrets.token_hex(16).encode()
    try:
        with contextlib.closing(http.client.HTTPConnection(host, port, timeout=timeout_s)) as connection:
            connection.request("GET", "/health", headers={CHALLENGE_HEADER.decode(): challenge.decode()})
            response = connection.getresponse()
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Answer(verdict="silent", host=host, detail=str(error) or type(error).__name__)
    proof = response.getheader(PROOF_HEADER.decode(), "").encode("latin-1")
    if not hmac.compare_digest(proof, prove(api_key.encode(), challenge)):
        return Answer(verdict="other key" if proof else "stranger", host=host, detail=f"HTTP {response.status}")
    if response.getheader(DRAINING_HEADER[0].decode()) == DRAINING_HEADER[1].decode():
        return Answer(verdict="draining", host=host)
    if response.status != 200:
        return Answer(verdict="unhealthy", host=host, detail=f"/health answers {response.status}")
    return Answer(verdict="live", host=host)


def probe_record(record: EndpointRecord, api_key: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> Answer:
    """Ask all addresses of a replica at once; the first that is this engine answers for it, preferred ones first."""
    hosts = record.hosts
    answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()

    def ask(rank: int) -> None:
        answers.put((rank, probe(hosts[rank], record.port, api_key, timeout_s=timeout_s)))

    for rank in range(len(hosts)):
        _in_background(ask, rank)
    heard: dict[int, Answer] = {}
    # The timeout is one of each step (connect, send, read): an address can take several of them.
    deadline = time.monotonic() + 2 * timeout_s
    while len(heard) < len(hosts) and (left_s := deadline - time.monotonic()) > 0:
        try:
            rank, answer = answers.get(timeout=left_s)
        except queue.Empty:
            break
        heard[rank] = answer
        if ours := [rank for rank in sorted(heard) if heard[rank].is_ours]:
            if all(rank in heard for rank in range(ours[0])):
                return heard[ours[0]]
            deadline = min(deadline, time.monotonic() + _PREFERENCE_S)
    best_first = sorted(heard, key=lambda rank: (_ORDER.index(heard[rank].verdict), rank))
    return heard[best_first[0]] if best_first else _SILENT


def probe_records(
    records: Sequence[EndpointRecord], api_key: str, *, timeout_s: float = PROBE_TIMEOUT_S
) -> dict[str, Answer]:
    """Ask several replicas at once; the answers by record name."""
    answers: dict[str, Answer] = {}

    def ask(record: EndpointRecord) -> None:
        answers[record.name] = probe_record(record, api_key, timeout_s=timeout_s)

    for thread in [_in_background(ask, record) for record in records]:
        thread.join()
    return answers


class LeaseWatch:
    """How long each record has not been renewed, by this process's own clock: the writer's may be another time."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def age_s(self, record: EndpointRecord, now_s: float) -> float:
        """Seconds since the record's counter was last seen to change; 0 at the first look."""
        counter, since_s = self._seen.get(record.name, (-1, now_s))
        if counter != record.counter:
            since_s = now_s
            self._seen[record.name] = (record.counter, now_s)
        return now_s - since_s


def _in_background(call: Callable[..., None], *args: object) -> threading.Thread:
    # Daemons: a probe of an address that swallows packets must not hold up the end of the program.
    thread = threading.Thread(target=call, args=args, daemon=True, name="hpc-serve-probe")
    thread.start()
    return thread
