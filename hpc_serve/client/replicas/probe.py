"""Asks a replica's engine whether it is there, and keeps what the replicas of a service have proved to this client.

Each connection is verified before anything is sent (`trust.connection`): after an engine has died, its port may belong
to another user. status.py decides what an answer means. `http.client` ignores proxy variables.

`Proofs` decides how long a proof counts, when a replica is given up, and which records stand in for those that cannot
be read. Unknown is not over: a replica that has proved itself stays, on its last record, while its record cannot be
read or is not there, as long as its engine proves itself again.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import threading
import time
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import get_args

from hpc_serve.background import in_background
from hpc_serve.client.replicas.status import ProbeResult, ProbeStatus
from hpc_serve.errors import RecordError, error_text
from hpc_serve.rendezvous.gate_headers import is_draining, why_hung
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ServiceRecords
from hpc_serve.trust.connection import Identity, NotOurEngineError, VerifiedConnection

# -- what was proved

REVERIFY_S = 60.0

# A result of a probe that was made for another caller a moment ago.
FRESH_S = 1.0

# An engine that is busy may miss one probe. A replica that had answered before is given up at the second in a row.
MOST_MISSED = 2
_IS_MISSED = ("no answer", "not ours")

# States of a record in which a replica has no engine that could finish a request.
WITHOUT_ENGINE: Set[str] = frozenset({"starting", "unresponsive", "stopped", "failed"})


@dataclass(frozen=True)
class _Probed:
    """What a probe brought, when, and from which engine: one that is started again has the same record's name."""

    result: ProbeResult
    at_s: float
    engine: tuple[int, str | None]


@dataclass
class _Known:
    """What is known of one replica. `verified` is its last good answer, until a request fails there.

    `asked` is what the last probe brought, and `missed` how many in a row brought none. `record` is its last one, once
    it has proved itself.
    """

    verified: _Probed | None = None
    asked: _Probed | None = None
    missed: int = 0
    record: EndpointRecord | None = None


class Proofs:
    """What the replicas of one service have proved, by which probe and when. Safe to share between threads."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Known] = {}
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked process the lock may be one that a thread of the other process holds."""
        self._lock = threading.RLock()

    @property
    def proven(self) -> Mapping[str, EndpointRecord]:
        """The last records of the replicas that have proved themselves and are not known to be over."""
        with self._lock:
            return {name: known.record for name, known in self._replicas.items() if known.record is not None}

    def missed(self, name: str) -> int:
        """How many probes in a row a replica has missed."""
        return self._of(name).missed

    def is_proved(self, name: str) -> bool:
        """Return whether a replica answered well, and no request has failed there since."""
        return self._of(name).verified is not None

    def _of(self, name: str) -> _Known:
        return self._replicas.get(name) or _Known()

    def known(self, record: EndpointRecord, lease_age_s: float, now_s: float) -> ProbeResult | None:
        """What was proved lately by a replica that renews its record."""
        is_renewed = lease_age_s <= record.lease_s
        return _fresh(self._of(record.name).verified, record, now_s, REVERIFY_S) if is_renewed else None

    def last(self, record: EndpointRecord, now_s: float, *, within_s: float = FRESH_S) -> ProbeResult | None:
        """What a probe brought a moment ago, whoever asked for it."""
        return _fresh(self._of(record.name).asked, record, now_s, within_s)

    def judge(self, record: EndpointRecord, result: ProbeResult, now_s: float, *, was_heard: bool) -> ProbeResult:
        """What to believe after a probe: its result, or the last good one if it is the first probe that was missed.

        `was_heard`: the replica has just sent something of an answer.
        """
        answer = _Probed(result, now_s, _engine(record))
        with self._lock:
            known = self._replicas.setdefault(record.name, _Known())
            if result.status == "ready":
                known.verified, known.asked, known.missed, known.record = answer, answer, 0, record
                return result
            if result.status in _IS_MISSED:
                known.missed = 0 if was_heard else known.missed + 1
                good = known.verified
                if good is not None and good.engine == answer.engine and known.missed < MOST_MISSED:
                    known.verified = replace(good, at_s=float("-inf"))
                    return good.result
            known.verified, known.asked = None, answer
            return result

    def doubt(self, name: str) -> None:
        """A request failed there: what was proved counts no more."""
        with self._lock:
            known = self._of(name)
            known.verified = known.asked = None

    def keep_known(self, found: ServiceRecords) -> ServiceRecords:
        """Return what was read. A proven replica whose record could not be read keeps its last record."""
        names = {record.name for record in found.records}
        with self._lock:
            for record in found.records:
                if record.state in WITHOUT_ENGINE:
                    self._replicas.pop(record.name, None)
                elif (known := self._of(record.name)).record is not None:
                    known.record = record
            for name in self._replicas.keys() - names - found.unreadable:
                known = self._replicas[name]
                if known.record is None or (found.records and known.missed >= MOST_MISSED):
                    del self._replicas[name]
            kept = tuple(record for name, record in self.proven.items() if name not in names)
        return replace(found, records=(*found.records, *kept))


def _engine(record: EndpointRecord) -> tuple[int, str | None]:
    return record.port, record.certificate


def _fresh(answer: _Probed | None, record: EndpointRecord, now_s: float, within_s: float) -> ProbeResult | None:
    """Return the result of an answer of this record's engine, if it is not too old."""
    if answer is None or answer.engine != _engine(record) or now_s - answer.at_s >= within_s:
        return None
    return answer.result


# -- asking

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
            return _ask_engine(connection, host)
    except NotOurEngineError as error:
        return ProbeResult(status="not ours", host=host, detail=str(error))
    except (OSError, http.client.HTTPException, ValueError, RecordError) as error:
        return ProbeResult(status="no answer", host=host, detail=error_text(error))


def _ask_engine(connection: VerifiedConnection, host: str) -> ProbeResult:
    health = connection.ask("GET", "/health")
    health.read()
    if is_draining(health.headers):
        return ProbeResult(status="draining", host=host)
    if health.status != 200:
        return ProbeResult(status="unhealthy", host=host, detail=f"/health answers {health.status}")
    if reason := why_hung(health.headers):
        return ProbeResult(status="hung", host=host, detail=reason)
    models = connection.ask("GET", "/v1/models")
    models.read()
    if models.status == 401:
        return ProbeResult(status="other key", host=host, detail="it does not take the service's key")
    return ProbeResult(status="ready", host=host)


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
