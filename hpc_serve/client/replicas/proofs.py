"""What the replicas of one service have proved to this client: by which probe, when, and on which record.

This decides how long a proof counts, when a replica is given up, and which records stand in for those that cannot be
read. Unknown is not over: a replica that has proved itself stays, on its last record, while its record cannot be read
or is not there, as long as its engine proves itself again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from hpc_serve.client.replicas.status import ProbeResult
from hpc_serve.rendezvous.entries import ServiceRecords
from hpc_serve.rendezvous.record import EndpointRecord

REVERIFY_S = 60.0

# A result of a probe that was made for another caller a moment ago.
FRESH_S = 1.0

# An engine that is busy may miss one probe. A replica that had answered before is given up at the second in a row.
MOST_MISSED = 2
_IS_MISSED = ("no answer", "not ours")

# States of a record in which a replica has no engine that could finish a request.
WITHOUT_ENGINE: Set[str] = frozenset({"starting", "unresponsive", "stopped", "failed"})


@dataclass(frozen=True)
class _Answer:
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

    verified: _Answer | None = None
    asked: _Answer | None = None
    missed: int = 0
    record: EndpointRecord | None = None


class Proofs:
    """Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._replicas: dict[str, _Known] = {}

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
        answer = _Answer(result, now_s, _engine(record))
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
        """What was read, with the last records of the proven replicas whose own could not be read."""
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

    def after_fork(self) -> None:
        """In a forked process the lock may be one that a thread of the other process holds."""
        self._lock = threading.RLock()


def _engine(record: EndpointRecord) -> tuple[int, str | None]:
    return record.port, record.certificate


def _fresh(answer: _Answer | None, record: EndpointRecord, now_s: float, within_s: float) -> ProbeResult | None:
    """Return the result of an answer of this record's engine, if it is not too old."""
    if answer is None or answer.engine != _engine(record) or now_s - answer.at_s >= within_s:
        return None
    return answer.result
