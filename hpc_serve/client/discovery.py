"""One service, looked at again and again: its records read, its engines asked, the live ones kept in a pool.

It decides when to look and whom to ask; which replica a request goes to is the pool's choice, how long to be patient
the caller's. It never touches the scheduler.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence, Set

from hpc_serve.client.pool import ReplicaPool, Target
from hpc_serve.client.probe import LeaseWatch, probe_records
from hpc_serve.client.views import Answer, ReplicaView, ServiceView, assess_replica
from hpc_serve.errors import HpcServeError
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ServiceStore

REFRESH_S = 10.0
REVERIFY_S = 60.0

Probe = Callable[[Sequence[EndpointRecord], str], dict[str, Answer]]

_log = logging.getLogger("hpc_serve.client")


class ServiceWatch:
    """Safe to share between threads. `look` waits for files and probes, `is_being_stopped` for files."""

    def __init__(
        self,
        store: ServiceStore,
        service: str,
        *,
        probe: Probe = probe_records,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        store.service_dir(service)  # a name that cannot be one is refused here
        self.store = store
        self.service = service
        self.pool = ReplicaPool()
        self.view = ServiceView(service=service, home=str(store.home))
        self.api_key = ""
        self._probe = probe
        self._clock = clock
        self._wall_clock = wall_clock
        self._lease = LeaseWatch()
        self._verified: dict[str, tuple[Answer, float]] = {}
        self._looking = threading.Lock()
        self._looked_at_s = float("-inf")
        self._refreshing = threading.Lock()

    def __repr__(self) -> str:
        return f"ServiceWatch({self.service!r} in {str(self.store.home)!r})"

    @property
    def model(self) -> str:
        """The name to ask the engines for: the first that all of them serve under."""
        records = [replica.record for replica in self.view.live or self.view.replicas]
        for name in records[-1].served_model_names if records else ():
            if all(name in record.served_model_names for record in records):
                return name
        return records[-1].model if records else ""

    def look(self) -> ServiceView:
        """Read the records, ask the engines that need asking, and refill the pool. Raises StoreError."""
        asked_at_s = self._clock()
        with self._looking:
            if self._looked_at_s > asked_at_s:  # another thread looked while this one waited for its turn
                return self.view
            self._looked_at_s = self._clock()
            self.view = self._look()
            self.pool.fill(_target(replica) for replica in self.view.live)
            return self.view

    def pick(self, tried: Set[str] = frozenset()) -> Target | None:
        """Take the least loaded replica not in `tried`; looks again in the background when the last look is old."""
        if self._clock() - self._looked_at_s > REFRESH_S and self._refreshing.acquire(blocking=False):
            threading.Thread(target=self._refresh, daemon=True, name="hpc-serve-refresh").start()
        return self.pool.take(tried)

    def doubt(self, target: Target) -> None:
        """Offer a replica no more until it has been asked again."""
        self._verified.pop(target.name, None)
        self.pool.drop(target.name)

    def is_being_stopped(self, target: Target) -> bool:
        """Whether the replica's record says that it drains or was stopped: what it answers now is its farewell."""
        try:
            records = self.store.read(self.service).records
        except HpcServeError:
            return False
        return any(record.name == target.name and record.state in ("draining", "stopped") for record in records)

    def _refresh(self) -> None:
        try:
            self.look()
        except HpcServeError as error:  # the replicas known so far may be well: go on with them
            _log.debug("looking for replicas of %s: %s", self.service, error)
        finally:
            self._refreshing.release()

    def _look(self) -> ServiceView:
        found = self.store.read(self.service)
        now_s, wall_s = self._clock(), self._wall_clock()
        ages = {record.name: self._lease.age_s(record, now_s) for record in found.records}
        ready = [record for record in found.records if record.state == "ready"]
        answers = self._ask(ready, ages, now_s) if ready else {}
        return ServiceView(
            service=self.service,
            home=str(self.store.home),
            replicas=tuple(
                assess_replica(
                    record,
                    lease_age_s=ages[record.name],
                    wall_age_s=wall_s - record.updated_at,
                    answer=answers.get(record.name),
                )
                for record in found.records
            ),
            queued=found.awaiting_record(),
            withdrawn=tuple(job for job in found.without_record() if job.end is not None),
            problems=found.problems,
        )

    def _ask(self, ready: list[EndpointRecord], ages: dict[str, float], now_s: float) -> dict[str, Answer]:
        """Probe whom we have not believed lately, or whose record is not renewed."""
        self.api_key = self.store.read_api_key(self.service)
        known = {
            record.name: answer
            for record in ready
            for answer, at_s in [self._verified.get(record.name, (None, 0.0))]
            if answer is not None and now_s - at_s < REVERIFY_S and ages[record.name] <= record.lease_s
        }
        answers = self._probe([record for record in ready if record.name not in known], self.api_key)
        for name, answer in answers.items():
            if answer.verdict == "live":
                self._verified[name] = (answer, now_s)
            else:
                self._verified.pop(name, None)
        return {**known, **answers}


def _target(replica: ReplicaView) -> Target:
    assert replica.host is not None
    return Target(name=replica.record.name, host=replica.host, port=replica.record.port)


def discover_services(store: ServiceStore) -> tuple[ServiceView, ...]:
    """Every service of the store, looked at once, all at the same time. Raises StoreError."""
    views: dict[str, ServiceView] = {}

    def look(service: str) -> None:
        try:
            views[service] = ServiceWatch(store, service).look()
        except HpcServeError as error:
            views[service] = ServiceView(service=service, home=str(store.home), problems=(str(error),))

    services = store.services()
    threads = [threading.Thread(target=look, args=(service,), daemon=True) for service in services]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tuple(views[service] for service in services)
