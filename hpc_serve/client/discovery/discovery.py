"""Finds the ready replicas of one service, again and again: reads its records, probes its engines, fills the pool.

A watch decides when to read, whom to probe, and when a replica is lost that has requests under way. probe.py says what
a probe is worth. The pool chooses the replica for a request, and the caller decides how long to wait. The scheduler is
never asked. Lists, and callers that name no service, have all services of a store read at once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from hpc_serve.background import in_background
from hpc_serve.client.discovery.lost_replicas import LookResult, LostReplicas
from hpc_serve.client.discovery.reading import RecordReader, Search
from hpc_serve.client.discovery.wake import Waker
from hpc_serve.client.replicas.event_loops import renew_after_fork
from hpc_serve.client.replicas.pool import LastReplica, ReplicaAddress, ReplicaPool
from hpc_serve.client.replicas.probe import (
    FRESH_S,
    MOST_MISSED,
    REVERIFY_S,
    WITHOUT_ENGINE,
    LeaseWatch,
    Proofs,
    probe_records,
)
from hpc_serve.client.replicas.status import ProbeResult, ReplicaStatus, ServiceStatus, assess_replica, assess_submitted
from hpc_serve.errors import HpcServeError
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ServiceRecords, ServiceStore, is_gone
from hpc_serve.trust.connection import Identity

REFRESH_S = 10.0
PROBE_S = 2.0  # a probe of a replica that is to be used waits so long for each answer
_OTHERS = 2  # so many replicas are asked beside one whose requests wait
_Probe = Callable[[Sequence[EndpointRecord], str], dict[str, ProbeResult]]
_NOT_YET = ProbeResult(status="no answer", detail="it has not answered yet")
_log = logging.getLogger("hpc_serve.client")


class ServiceWatch:
    """What is known of one service, and its pool of ready replicas. Safe to share between threads.

    `find_one` and `refresh` wait for files and probes, `is_being_stopped` for files.
    """

    def __init__(
        self,
        store: ServiceStore,
        service: str,
        *,
        probe: _Probe | None = None,
        clock: Callable[[], float] = time.monotonic,
        may_wake: bool = False,
    ) -> None:
        store.service_dir(service)  # a name that cannot be one is refused here
        self.store = store
        self.service = service
        self.pool = ReplicaPool(clock=clock)
        self.lost = LostReplicas(self.pool, self._look_after, self._ask_others, clock=clock)
        self.last_replica = LastReplica()
        self.waker = Waker(store, service, may_wake=may_wake)
        self.status = ServiceStatus(service=service, home=str(store.home))
        self.api_key = ""
        self._probe = probe or _probe
        self._clock = clock
        self._lease = LeaseWatch()
        self._proofs = Proofs()
        self._reader = RecordReader(store, service, self._proofs)
        self._refreshed_at_s = float("-inf")
        self._searched_at_s = float("-inf")
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """In a forked process, locks may be held by threads that are not there."""
        self._refresh_lock = threading.Lock()
        self._search_lock = threading.Lock()
        self._refreshing: Future[None] | None = None
        self._proofs.after_fork()
        self.pool.after_fork()
        self.lost.after_fork()

    def __repr__(self) -> str:
        return f"ServiceWatch({self.service!r} in {str(self.store.home)!r})"

    @property
    def model(self) -> str:
        """The name to ask the engines for: the first under which all live ones serve, or all ready ones."""
        known = [(replica, replica.record) for replica in self.status.replicas if replica.record is not None]
        live = [record for replica, record in known if not replica.is_over]
        ready = [record for replica, record in known if replica.state == "ready"] or [record for _, record in known]
        for records in (live, ready):
            for name in records[-1].served_model_names if records else ():
                if all(name in record.served_model_names for record in records):
                    return name
        return ready[-1].model if ready else ""

    def find_one(self) -> bool:
        """Look for a ready replica among the records, the newest first; return whether there is one.

        Returns with the first that answers. The others get into the pool when they answer, or at the next refresh,
        which is due with the first request.
        """
        asked_at_s = self._clock()
        with self._search_lock:
            if self._searched_at_s > asked_at_s:  # another thread searched while this one waited for the lock
                return bool(self.pool)
            self._searched_at_s = self._clock()
            search = Search(read=lambda files: _ready_ones(self._reader.read(files)), ask=self._ask)
            try:
                self.api_key = self._reader.api_key(self.api_key)
                search.run(self._reader.files())
            except HpcServeError:  # `refresh` knows what that means
                return False
            if not search.is_ready:
                return False
            # What the search found counts as what is known, until the next refresh.
            records = tuple(record for record, _ in search.answers.values())
            probes = {name: result or _NOT_YET for name, (_, result) in search.answers.items()}
            self.status = self._assess(ServiceRecords(service=self.service, records=records), probes)
            return True

    def _ask(self, record: EndpointRecord) -> ProbeResult:
        result = self._judge(record, self._probe([record], self.api_key)[record.name])
        if result.status == "ready":
            self.pool.offer(_address(record, result, self.api_key))
        return result

    def refresh(self, *, is_complete: bool = False) -> ServiceStatus:
        """Read the records, probe the engines that need it, and refill the pool. Raises StoreError.

        Replicas that have ended are in the status if it `is_complete`, or if none is ready.
        """
        asked_at_s = self._clock()
        with self._refresh_lock:
            if self._refreshed_at_s > asked_at_s:  # another thread refreshed while this one waited for the lock
                return self.status
            self._refreshed_at_s = self._clock()
            return self._refresh(is_complete=is_complete)

    def pick(self, tried: Set[str] = frozenset(), begins: list[int] | None = None) -> ReplicaAddress | None:
        """Take a replica not in `tried`, as the pool does; refreshes in the background when that is due."""
        if self._is_refresh_due and (self._refreshing is None or self._refreshing.done()):
            with suppress(RuntimeError):  # no more threads for this user: later
                self._refreshing = in_background(self._refresh_if_possible)
        return self.pool.take(tried, begins)

    def mark_suspect(self, replica: ReplicaAddress) -> None:
        """Offer a replica no more until it has been probed again, and last for a while then."""
        self._proofs.doubt(replica.name)
        self.pool.lose(replica)
        self.pool.drop(replica.name)

    def is_being_stopped(self, replica: ReplicaAddress) -> bool:
        """Whether the replica's record says that it drains or was stopped. Reads the record."""
        record = self._reader.record(replica.name)
        return record is not None and record.state in ("draining", "stopped")

    def _ask_others(self, names: Set[str]) -> None:
        """Ask a few replicas that are not in `names`, each in a thread of its own."""
        proven = self._proofs.proven
        for name in sorted(proven.keys() - names, key=lambda name: name not in self.pool)[:_OTHERS]:
            in_background(self._ask, proven[name])

    def _look_after(self, names: Set[str]) -> LookResult:
        """Look at the replicas in `names`, whose requests wait: which of them are lost. Raises StoreError."""
        with self._refresh_lock:
            if is_due := self._is_refresh_due:
                self._refreshed_at_s = self._clock()
            status = self._refresh(asked_for=names, only_those=not is_due)
        replicas = {replica.record.name: replica for replica in status.replicas if replica.record is not None}
        lost = {}
        for name in names:
            if (replica := replicas.get(name)) is None:
                lost[name] = "its record was removed, and its engine does not answer"
            elif replica.record is not None and replica.record.state in WITHOUT_ENGINE:
                lost[name] = f"its record says that it is {replica.sentence}"
            elif self._proofs.missed(name) >= MOST_MISSED:
                lost[name] = replica.reason
        return LookResult(lost=lost, is_in_doubt=any(self._proofs.missed(name) == 1 for name in names))

    @property
    def _is_refresh_due(self) -> bool:
        return self._clock() - self._refreshed_at_s > REFRESH_S

    def _refresh_if_possible(self) -> None:
        try:
            self.refresh()
        except HpcServeError as error:  # go on with the replicas that are known
            _log.debug("looking for replicas of %s: %s", self.service, error)

    def _refresh(
        self, *, asked_for: Set[str] = frozenset(), only_those: bool = False, is_complete: bool = False
    ) -> ServiceStatus:
        found = self._reader.records(asked_for, is_complete=is_complete)
        probes = self._probe_ready(_ready_ones(found.records), asked_for, only_those=only_those)
        status = self._assess(found, probes)
        if not status.ready and not is_complete:
            status = self._assess(self._reader.records(asked_for, is_complete=True), probes)
        self.status = status
        usable = [(replica.record, replica.probe) for replica in status.usable]
        addresses = [
            _address(record, probe, self.api_key)
            for record, probe in usable
            # A request may have failed meanwhile at one that is ready. One that hangs is offered if no other is ready.
            if record and probe and (probe.status == "hung" or self._proofs.is_proved(record.name))
        ]
        self.pool.fill(addresses)
        for address in addresses:
            if self._proofs.missed(address.name):
                self.pool.lose(address)
        return status

    def _assess(self, found: ServiceRecords, probes: dict[str, ProbeResult]) -> ServiceStatus:
        now_s, wall_s = self._clock(), time.time()
        replicas = [
            assess_replica(
                record,
                probe=probes.get(record.name),
                lease_age_s=self._lease.age_s(record, now_s),
                wall_age_s=wall_s - record.updated_at,
            )
            for record in found.records
        ]
        replicas += map(assess_submitted, found.without_record())
        gone = {job.job_id for job in found.submitted if is_gone(job)}
        known = [_failed(one) if one.job_id in gone and one.state != "ready" else one for one in replicas]
        return ServiceStatus(
            service=self.service,
            home=str(self.store.home),
            replicas=tuple(sorted(known, key=lambda replica: replica.began_or_ended_at)),
            problems=found.problems,
        )

    def _probe_ready(
        self, records: Sequence[EndpointRecord], asked_for: Set[str], *, only_those: bool
    ) -> dict[str, ProbeResult]:
        """Probe the replicas in `asked_for`, those not verified lately, and those that do not renew their record.

        A replica that has never answered and does not renew its record is asked once a minute. With
        `only_those`, every other replica that was asked before keeps that answer, however old.
        """
        if not records:
            return {}
        self.api_key = self._reader.api_key(self.api_key)
        now_s, proven = self._clock(), self._proofs.proven
        results = {}
        for record in records:
            known = self._proofs.known(record, self._lease.age_s(record, now_s), now_s)
            is_stale = record.name not in proven and record.is_overdue(time.time())
            within_s = math.inf if only_those else REVERIFY_S if is_stale else FRESH_S
            known = known or self._proofs.last(record, now_s, within_s=within_s)
            if known is not None and record.name not in asked_for:
                results[record.name] = known
        to_ask = {record.name: record for record in records if record.name not in results}
        if to_ask:
            fresh = self._probe(list(to_ask.values()), self.api_key)
            results |= {name: self._judge(to_ask[name], result) for name, result in fresh.items()}
        return results

    def _judge(self, record: EndpointRecord, result: ProbeResult) -> ProbeResult:
        if result.status == "ready":
            self.lost.note_answer(record.name)
        was_heard = self.lost.was_heard(record.name)
        return self._proofs.judge(record, result, self._clock(), was_heard=was_heard)


def _probe(records: Sequence[EndpointRecord], api_key: str) -> dict[str, ProbeResult]:
    return probe_records(records, api_key, timeout_s=PROBE_S)


def _failed(status: ReplicaStatus) -> ReplicaStatus:
    """Return the status of a replica whose process has ended, which has said so itself or not."""
    return status if status.is_over else replace(status, state="failed", reason="its process has ended")


def _ready_ones(records: Sequence[EndpointRecord]) -> list[EndpointRecord]:
    return [record for record in records if record.state == "ready"]


def _address(record: EndpointRecord, result: ProbeResult, api_key: str) -> ReplicaAddress:
    assert result.host is not None
    return ReplicaAddress(
        name=record.name,
        host=result.host,
        port=record.port,
        identity=Identity.of(record, api_key),
        signs=record.signs,
        adapters=frozenset(record.adapter_names),
    )


def discover_services(store: ServiceStore) -> tuple[ServiceStatus, ...]:
    """Every service of the store with all its replicas, all read and probed at the same time. Raises StoreError."""
    return _each_service(store, lambda watch: watch.refresh(is_complete=True))


def find_ready_services(store: ServiceStore) -> tuple[ServiceStatus, ...]:
    """The same, without waiting for the other replicas of a service of which one is ready."""
    return _each_service(store, lambda watch: watch.status if watch.find_one() else watch.refresh())


def _each_service(store: ServiceStore, find: Callable[[ServiceWatch], ServiceStatus]) -> tuple[ServiceStatus, ...]:
    def read(service: str) -> ServiceStatus:
        try:
            return find(ServiceWatch(store, service))
        except HpcServeError as error:
            return ServiceStatus(service=service, home=str(store.home), problems=(str(error),))

    reading = [in_background(read, service) for service in store.services()]
    return tuple(one.result() for one in reading)
