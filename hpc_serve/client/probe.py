"""Asks a replica's engine whether it is there, and measures how long a record has not been renewed.

An engine is believed when it answers /health and proves that it knows the service's API key. The key itself is not
sent: after an engine has died, its port may belong to another user. status.py decides what an answer means.
`http.client` ignores proxy variables.
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

from hpc_serve.client.status import ProbeResult, ProbeStatus
from hpc_serve.job.gate import CHALLENGE_HEADER, DRAINING_HEADER, PROOF_HEADER, prove
from hpc_serve.rendezvous.record import EndpointRecord

PROBE_TIMEOUT_S = 3.0

# After one address has answered, how long to wait for an address that the record prefers.
_PREFERENCE_S = 0.1

_BEST_FIRST: tuple[ProbeStatus, ...] = get_args(ProbeStatus)
_NO_ANSWER = ProbeResult(status="no answer", detail="no answer in time")


def probe(host: str, port: int, api_key: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> ProbeResult:
    """Ask one address for its health, and for a proof that it knows `api_key`, which is not sent."""
    challenge = secrets.token_hex(16).encode()
    try:
        with contextlib.closing(http.client.HTTPConnection(host, port, timeout=timeout_s)) as connection:
            connection.request("GET", "/health", headers={CHALLENGE_HEADER.decode(): challenge.decode()})
            response = connection.getresponse()
    except (OSError, http.client.HTTPException, ValueError) as error:
        return ProbeResult(status="no answer", host=host, detail=str(error) or type(error).__name__)
    proof = response.getheader(PROOF_HEADER.decode(), "").encode("latin-1")
    if not hmac.compare_digest(proof, prove(api_key.encode(), challenge)):
        return ProbeResult(status="other key" if proof else "not ours", host=host, detail=f"HTTP {response.status}")
    if response.getheader(DRAINING_HEADER[0].decode()) == DRAINING_HEADER[1].decode():
        return ProbeResult(status="draining", host=host)
    if response.status != 200:
        return ProbeResult(status="unhealthy", host=host, detail=f"/health answers {response.status}")
    return ProbeResult(status="ready", host=host)


def probe_record(record: EndpointRecord, api_key: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> ProbeResult:
    """Ask all addresses of a replica at once. Of those that are its engine, the one that the record prefers counts."""
    hosts = record.hosts
    results: queue.SimpleQueue[tuple[int, ProbeResult]] = queue.SimpleQueue()

    def ask(rank: int) -> None:
        results.put((rank, probe(hosts[rank], record.port, api_key, timeout_s=timeout_s)))

    for rank in range(len(hosts)):
        _in_background(ask, rank)
    heard: dict[int, ProbeResult] = {}
    # Connecting, sending and reading may each take `timeout_s`.
    deadline = time.monotonic() + 2 * timeout_s
    while len(heard) < len(hosts) and (left_s := deadline - time.monotonic()) > 0:
        try:
            rank, result = results.get(timeout=left_s)
        except queue.Empty:
            break
        heard[rank] = result
        if ours := [rank for rank in sorted(heard) if heard[rank].is_ours]:
            if all(rank in heard for rank in range(ours[0])):
                return heard[ours[0]]
            deadline = min(deadline, time.monotonic() + _PREFERENCE_S)
    best_first = sorted(heard, key=lambda rank: (_BEST_FIRST.index(heard[rank].status), rank))
    return heard[best_first[0]] if best_first else _NO_ANSWER


def probe_records(
    records: Sequence[EndpointRecord], api_key: str, *, timeout_s: float = PROBE_TIMEOUT_S
) -> dict[str, ProbeResult]:
    """Ask several replicas at once; the results by record name."""
    results: dict[str, ProbeResult] = {}

    def ask(record: EndpointRecord) -> None:
        results[record.name] = probe_record(record, api_key, timeout_s=timeout_s)

    for thread in [_in_background(ask, record) for record in records]:
        thread.join()
    return results


class LeaseWatch:
    """How long each record has not been renewed, by this process's own clock: the writer's clock may differ."""

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
    # Daemons: a probe of an address that drops packets must not delay the end of the program.
    thread = threading.Thread(target=call, args=args, daemon=True, name="hpc-serve-probe")
    thread.start()
    return thread
