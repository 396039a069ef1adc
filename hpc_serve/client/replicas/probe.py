"""Asks a replica's engine whether it is there, and measures how long a record has not been renewed.

Each connection is verified before anything is sent (`trust.connection`): after an engine has died, its port may belong
to another user. status.py decides what an answer means. `http.client` ignores proxy variables.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import get_args

from hpc_serve.background import in_background
from hpc_serve.client.replicas.status import ProbeResult, ProbeStatus
from hpc_serve.errors import RecordError
from hpc_serve.rendezvous.gate_headers import is_draining, why_hung
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.trust.connection import Identity, NotOurEngineError, VerifiedConnection

PROBE_TIMEOUT_S = 3.0

_MOST_AT_ONCE = 64

# After one address has answered, how long to wait for an address that the record prefers.
_PREFERENCE_S = 0.1

_BEST_FIRST: tuple[ProbeStatus, ...] = get_args(ProbeStatus)
_NO_ANSWER = ProbeResult(status="no answer", detail="no answer in time")


def probe(host: str, port: int, identity: Identity, *, timeout_s: float = PROBE_TIMEOUT_S) -> ProbeResult:
    """Ask at one address whether the engine of `identity` is there, whether it is healthy and takes the key."""
    try:
        with contextlib.closing(VerifiedConnection(host, port, identity, timeout_s=timeout_s)) as connection:
            return _ask_engine(connection, host, identity.api_key)
    except NotOurEngineError as error:
        return ProbeResult(status="not ours", host=host, detail=str(error))
    except (OSError, http.client.HTTPException, ValueError, RecordError) as error:
        return ProbeResult(status="no answer", host=host, detail=str(error) or type(error).__name__)


def _ask_engine(connection: VerifiedConnection, host: str, api_key: str) -> ProbeResult:
    with_key = {"Authorization": f"Bearer {api_key}"}
    health = _get(connection, "/health", with_key)
    if is_draining(health.headers):
        return ProbeResult(status="draining", host=host)
    if health.status != 200:
        return ProbeResult(status="unhealthy", host=host, detail=f"/health answers {health.status}")
    if reason := why_hung(health.headers):
        return ProbeResult(status="hung", host=host, detail=reason)
    if _get(connection, "/v1/models", with_key).status == 401:
        return ProbeResult(status="other key", host=host, detail="it does not take the service's key")
    return ProbeResult(status="ready", host=host)


def _get(connection: VerifiedConnection, path: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    response.read()
    return response


def probe_record(record: EndpointRecord, api_key: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> ProbeResult:
    """Ask all addresses of a replica at once.

    If several lead to its engine, return the answer of the address that comes first in the record.
    """
    hosts, identity = record.hosts, Identity.of(record, api_key)
    if len(hosts) == 1:
        return probe(hosts[0], record.port, identity, timeout_s=timeout_s)
    # In threads that no end of the program waits for: an address may drop packets.
    asked = [in_background(probe, host, record.port, identity, timeout_s=timeout_s) for host in hosts]
    pending = set(asked)
    # Connecting, sending and reading may each take `timeout_s`.
    deadline = time.monotonic() + 2 * timeout_s
    while pending and (left_s := deadline - time.monotonic()) > 0:
        pending = wait(pending, left_s, FIRST_COMPLETED).not_done
        preferred = (one.result() for one in itertools.takewhile(Future.done, asked))
        if found := next((result for result in preferred if result.is_ours), None):
            return found
        if any(one.done() and one.result().is_ours for one in asked):
            deadline = min(deadline, time.monotonic() + _PREFERENCE_S)
    heard = [one.result() for one in asked if one.done()]
    return min(heard, key=lambda result: _BEST_FIRST.index(result.status), default=_NO_ANSWER)


def probe_records(
    records: Sequence[EndpointRecord], api_key: str, *, timeout_s: float = PROBE_TIMEOUT_S
) -> dict[str, ProbeResult]:
    """Ask several replicas at once, those first that were renewed last; the results by record name."""
    results: dict[str, ProbeResult] = {}
    left = iter(sorted(records, key=lambda record: record.updated_at, reverse=True))

    def ask() -> None:
        for record in left:
            results[record.name] = probe_record(record, api_key, timeout_s=timeout_s)

    for asking in [in_background(ask) for _ in range(min(len(records), _MOST_AT_ONCE))]:
        asking.result()
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
