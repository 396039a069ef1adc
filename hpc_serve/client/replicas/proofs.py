"""What the replicas of one service have proved to this client: by which probe, when, and on which record.

This decides how long a proof counts, when a replica is given up, and which records stand in for those that cannot be
read. Unknown is not over: a replica that has proved itself stays, on its last record, while its record cannot be read
or is not there, as long as its engine proves itself again.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Set
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


class Proofs:
    """Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._verified: dict[str, _Answer] = {}
        self._asked: dict[str, _Answer] = {}
        self._missed: dict[str, int] = {}
        self._proven: dict[str, EndpointRecord] = {}

    @property
    def proven(self) -> Mapping[str, EndpointRecord]:
        """The last records of the replicas that have proved themselves and are not known to be over."""
        return self._proven

    def missed(self, name: str) -> int:
        """How many probes in a row a replica has missed."""
        return self._missed.get(name, 0)

    def is_proved(self, name: str) -> bool:
        """Return whether a replica answered well, and no request has failed there since."""
        return name in self._verified

    def known(self, record: EndpointRecord, lease_age_s: float, now_s: float) -> ProbeResult | None:
        """What was proved lately by a replica that renews its record."""
        answer = self._of_engine(self._verified, record)
        is_valid = answer is not None and now_s - answer.at_s < REVERIFY_S and lease_age_s <= record.lease_s
        return answer.result if answer is not None and is_valid else None

    def last(self, record: EndpointRecord, now_s: float, *, within_s: float = FRESH_S) -> ProbeResult | None:
        """What a probe brought a moment ago, whoever asked for it."""
        answer = self._of_engine(self._asked, record)
        return answer.result if answer is not None and now_s - answer.at_s < within_s else None

    def _of_engine(self, answers: Mapping[str, _Answer], record: EndpointRecord) -> _Answer | None:
        answer = answers.get(record.name)
        return answer if answer is not None and answer.engine == _engine(record) else None

    def judge(self, record: EndpointRecord, result: ProbeResult, now_s: float, *, was_heard: bool) -> ProbeResult:
        """What to believe after a probe: its result, or the last good one if it is the first probe that was missed.

        `was_heard`: the replica has just sent something of an answer.
        """
        name = record.name
        with self._lock:
            if result.status == "ready":
                self._missed.pop(name, None)
                self._verified[name] = _Answer(result, now_s, _engine(record))
                self._proven[name] = record
                return self._remember(record, result, now_s)
            if result.status in _IS_MISSED:
                self._missed[name] = 0 if was_heard else self.missed(name) + 1
            good = self._of_engine(self._verified, record)
            if good is not None and result.status in _IS_MISSED and self.missed(name) < MOST_MISSED:
                self._verified[name] = replace(good, at_s=float("-inf"))
                return good.result
            self._verified.pop(name, None)
            return self._remember(record, result, now_s)

    def _remember(self, record: EndpointRecord, result: ProbeResult, now_s: float) -> ProbeResult:
        self._asked[record.name] = _Answer(result, now_s, _engine(record))
        return result

    def doubt(self, name: str) -> None:
        """A request failed there: what was proved counts no more."""
        with self._lock:
            self._verified.pop(name, None)
            self._asked.pop(name, None)

    def keep_known(self, found: ServiceRecords) -> ServiceRecords:
        """What was read, with the last records of the proven replicas whose own could not be read."""
        names = {record.name for record in found.records}
        with self._lock:
            for record in found.records:
                if record.state in WITHOUT_ENGINE:
                    self._forget(record.name)
                elif record.name in self._proven:
                    self._proven[record.name] = record
            for name in self._proven.keys() - names - found.unreadable:
                if found.records and self.missed(name) >= MOST_MISSED:
                    del self._proven[name]
            kept = tuple(record for name, record in self._proven.items() if name not in names)
            self._forget_all_but(names | found.unreadable | self._proven.keys())
        return replace(found, records=(*found.records, *kept))

    def _forget(self, name: str) -> None:
        self._proven.pop(name, None)
        self._verified.pop(name, None)
        self._asked.pop(name, None)
        self._missed.pop(name, None)

    def _forget_all_but(self, names: Collection[str]) -> None:
        for name in (self._verified.keys() | self._asked.keys() | self._missed.keys()) - set(names):
            self._forget(name)

    def after_fork(self) -> None:
        """In a forked process the lock may be one that a thread of the other process holds."""
        self._lock = threading.RLock()


def _engine(record: EndpointRecord) -> tuple[int, str | None]:
    return record.port, record.certificate
