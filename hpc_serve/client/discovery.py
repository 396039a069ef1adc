"""Finds the ready replicas of one service, again and again: reads its records, probes its engines, fills the pool.

This decides when to read, whom to probe, and when a replica is lost that has requests under way. The pool chooses the
replica for a request, and the caller decides how long to wait. The scheduler is never asked.

Unknown is not over: a replica that has proved itself stays, on its last record, while its record cannot be read or is
not there, as long as its engine proves itself again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from hpc_serve.client.fork import renew_after_fork
from hpc_serve.client.pool import ReplicaAddress, ReplicaPool
from hpc_serve.client.probe import LeaseWatch, probe_records
from hpc_serve.client.request_watch import RequestWatch, Verdict
from hpc_serve.client.status import ProbeResult, ReplicaStatus, ServiceStatus, assess_replica, assess_submitted
from hpc_serve.errors import HpcServeError, RecordError, StoreError
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ServiceRecords, ServiceStore
from hpc_serve.trust.connection import Identity

REFRESH_S = 10.0
REVERIFY_S = 60.0
PROBE_S = 2.0  # a probe of a replica that is to be used waits so long for each answer

# An engine that is busy may miss one probe. A replica that had answered before is given up at the second in a row.
MOST_MISSED = 2
_IS_MISSED = ("no answer", "not ours")

# States of a record in which a replica has no engine that could finish a request.
_WITHOUT_ENGINE: Set[str] = frozenset({"starting", "unresponsive", "stopped", "failed"})

Probe = Callable[[Sequence[EndpointRecord], str], dict[str, ProbeResult]]

_log = logging.getLogger("hpc_serve.client")


class ServiceWatch:
    """What is known of one service, and its pool of ready replicas. Safe to share between threads.

    `refresh` waits for files and probes, `is_being_stopped` for files.
    """

    def __init__(
        self,
        store: ServiceStore,
        service: str,
        *,
        probe: Probe | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        store.service_dir(service)  # a name that cannot be one is refused here
        self.store = store
        self.service = service
        self.pool = ReplicaPool()
        self.requests = RequestWatch(self._look_after)
        self.status = ServiceStatus(service=service, home=str(store.home))
        self.api_key = ""
        self._probe = probe or _probe
        self._clock = clock
        self._wall_clock = wall_clock
        self._lease = LeaseWatch()
        self._verified: dict[str, tuple[ProbeResult, float]] = {}
        self._missed: dict[str, int] = {}
        self._proven: dict[str, EndpointRecord] = {}
        self._refresh_lock = threading.Lock()
        self._refreshed_at_s = float("-inf")
        self._background_lock = threading.Lock()
        renew_after_fork(self)

    def __repr__(self) -> str:
        return f"ServiceWatch({self.service!r} in {str(self.store.home)!r})"

    @property
    def model(self) -> str:
        """The name to ask the engines for: the first that all of them serve under."""
        replicas = self.status.ready or self.status.replicas
        records = [replica.record for replica in replicas if replica.record is not None]
        for name in records[-1].served_model_names if records else ():
            if all(name in record.served_model_names for record in records):
                return name
        return records[-1].model if records else ""

    def refresh(self) -> ServiceStatus:
        """Read the records, probe the engines that need it, and refill the pool. Raises StoreError."""
        asked_at_s = self._clock()
        with self._refresh_lock:
            if self._refreshed_at_s > asked_at_s:  # another thread refreshed while this one waited for the lock
                return self.status
            return self._refresh()

    def pick(self, tried: Set[str] = frozenset()) -> ReplicaAddress | None:
        """Take the least loaded replica not in `tried`; refreshes in the background when that is due."""
        if self._clock() - self._refreshed_at_s > REFRESH_S and self._background_lock.acquire(blocking=False):
            threading.Thread(target=self._refresh_in_background, daemon=True, name="hpc-serve-refresh").start()
        return self.pool.take(tried)

    def mark_suspect(self, replica: ReplicaAddress) -> None:
        """Offer a replica no more until it has been probed again."""
        self._verified.pop(replica.name, None)
        self.pool.drop(replica.name)

    def is_being_stopped(self, replica: ReplicaAddress) -> bool:
        """Whether the replica's record says that it drains or was stopped. Reads the records."""
        try:
            records = self.store.read(self.service).records
        except HpcServeError:
            return False
        return any(record.name == replica.name and record.state in ("draining", "stopped") for record in records)

    def after_fork(self) -> None:
        """Called in a forked process."""
        self._refresh_lock = threading.Lock()
        self._background_lock = threading.Lock()
        self.pool.after_fork()
        self.requests.after_fork()

    def _look_after(self, names: Set[str]) -> Verdict:
        """Refresh with a probe of each replica in `names`, which have requests under way. Raises StoreError."""
        with self._refresh_lock:
            status = self._refresh(names)
            missed = {name: count for name, count in self._missed.items() if name in names}
        replicas = {replica.record.name: replica for replica in status.replicas if replica.record is not None}
        lost = {}
        for name in names:
            if (replica := replicas.get(name)) is None:
                lost[name] = "its record was removed, and its engine does not answer"
            elif replica.record is not None and replica.record.state in _WITHOUT_ENGINE:
                lost[name] = f"its record says that it is {replica.sentence}"
            elif missed.get(name, 0) >= MOST_MISSED:
                lost[name] = replica.reason
        return Verdict(lost=lost, is_in_doubt=1 in missed.values())

    def _refresh(self, asked_for: Set[str] = frozenset()) -> ServiceStatus:
        self._refreshed_at_s = self._clock()
        self.status = self._read_status(asked_for)
        ready = [_address(replica, self.api_key) for replica in self.status.ready]
        self.pool.fill(ready, doubtful={name for name, count in self._missed.items() if count})
        return self.status

    def _refresh_in_background(self) -> None:
        try:
            self.refresh()
        except HpcServeError as error:  # go on with the replicas that are known
            _log.debug("looking for replicas of %s: %s", self.service, error)
        finally:
            self._background_lock.release()

    def _read_status(self, asked_for: Set[str]) -> ServiceStatus:
        found = self._read_records()
        now_s, wall_s = self._clock(), self._wall_clock()
        ages = {record.name: self._lease.age_s(record, now_s) for record in found.records}
        ready = [record for record in found.records if record.state == "ready"]
        probes = self._probe_ready(ready, ages, now_s, asked_for)
        replicas = [
            assess_replica(
                record,
                probe=probes.get(record.name),
                lease_age_s=ages[record.name],
                wall_age_s=wall_s - record.updated_at,
            )
            for record in found.records
        ]
        replicas += map(assess_submitted, found.without_record())
        return ServiceStatus(
            service=self.service,
            home=str(self.store.home),
            replicas=tuple(sorted(replicas, key=lambda replica: replica.began_or_ended_at)),
            problems=found.problems,
        )

    def _read_records(self) -> ServiceRecords:
        """What can be read, with the last records of proven replicas for those that cannot. Raises StoreError."""
        try:
            found = self.store.read(self.service)
        except StoreError as error:
            if not self._proven:
                raise
            found = ServiceRecords(service=self.service, problems=(str(error),))
        names = {record.name for record in found.records}
        for record in found.records:
            if record.name in self._proven:
                if record.state in _WITHOUT_ENGINE:
                    del self._proven[record.name]
                else:
                    self._proven[record.name] = record
        for name in self._proven.keys() - names - found.unreadable:
            if found.records and self._missed.get(name, 0) >= MOST_MISSED:
                del self._proven[name]
        kept = tuple(record for name, record in self._proven.items() if name not in names)
        return replace(found, records=(*found.records, *kept))

    def _read_api_key(self) -> str:
        """The service's key; the one that the proven replicas took, while the file cannot be read."""
        try:
            return self.store.read_api_key(self.service)
        except (StoreError, RecordError):
            if not self._proven:
                raise
            return self.api_key

    def _probe_ready(
        self, records: Sequence[EndpointRecord], ages: dict[str, float], now_s: float, asked_for: Set[str]
    ) -> dict[str, ProbeResult]:
        """Probe the replicas in `asked_for`, those not verified lately, and those that do not renew their record."""
        names = {record.name for record in records}
        self._missed = {name: count for name, count in self._missed.items() if name in names}
        if not records:
            return {}
        self.api_key = self._read_api_key()
        known = {
            record.name: result
            for record in records
            for result, at_s in [self._verified.get(record.name, (None, 0.0))]
            if result is not None
            and now_s - at_s < REVERIFY_S
            and ages[record.name] <= record.lease_s
            and record.name not in asked_for
        }
        fresh = self._probe([record for record in records if record.name not in known], self.api_key)
        judged = {name: self._judge(name, result, now_s) for name, result in fresh.items()}
        self._proven |= {r.name: r for r in records if r.name in judged and judged[r.name].status == "ready"}
        return {**known, **judged}

    def _judge(self, name: str, result: ProbeResult, now_s: float) -> ProbeResult:
        """What to believe after a probe: its result, or the last good one if it is the first probe that was missed."""
        if result.status == "ready":
            self._missed.pop(name, None)
            self._verified[name] = (result, now_s)
            return result
        if result.status in _IS_MISSED:
            self._missed[name] = 0 if self.requests.was_heard(name) else self._missed.get(name, 0) + 1
        if name in self._verified and result.status in _IS_MISSED and self._missed.get(name, 0) < MOST_MISSED:
            good, _ = self._verified[name]
            self._verified[name] = (good, float("-inf"))
            return good
        self._verified.pop(name, None)
        return result


def _probe(records: Sequence[EndpointRecord], api_key: str) -> dict[str, ProbeResult]:
    return probe_records(records, api_key, timeout_s=PROBE_S)


def _address(replica: ReplicaStatus, api_key: str) -> ReplicaAddress:
    record = replica.record
    assert record is not None
    assert replica.host is not None
    return ReplicaAddress(name=record.name, host=replica.host, port=record.port, identity=Identity.of(record, api_key))


def discover_services(store: ServiceStore) -> tuple[ServiceStatus, ...]:
    """Every service of the store, all read and probed at the same time. Raises StoreError."""
    found: dict[str, ServiceStatus] = {}

    def read(service: str) -> None:
        try:
            found[service] = ServiceWatch(store, service).refresh()
        except HpcServeError as error:
            found[service] = ServiceStatus(service=service, home=str(store.home), problems=(str(error),))

    services = store.services()
    threads = [threading.Thread(target=read, args=(service,), daemon=True) for service in services]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tuple(found[service] for service in services)
