"""Adjusts the number of a service's replicas: a duty of the program beside the launcher (service_keeper.py).

The programs of all replicas have it, and one of them decides at a time: the one that rendezvous/elastic.py names. It
looks at the engines, asks elastic.py what follows, and adds replicas or lets one drain. A replica whose service is
asleep drains, whoever decided that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import HpcServeError, RendezvousError
from hpc_serve.job.engine.health import EngineAddress, read_load
from hpc_serve.rendezvous.drain import DrainRequest, ask_to_drain, drain_file_of
from hpc_serve.rendezvous.elastic import Elastic, change_elastic, read_elastic
from hpc_serve.submit.services.elastic import (
    Add,
    ElasticJudge,
    Leave,
    ReplicaBounds,
    ReplicaLoad,
    ServiceLook,
    Sleep,
    Step,
    Windows,
)
from hpc_serve.submit.services.handover import ELASTIC, pause_s
from hpc_serve.submit.services.live_replicas import live_replicas
from hpc_serve.submit.services.own_run import OwnRun
from hpc_serve.submit.services.stop import stop
from hpc_serve.submit.slurm.scheduler import SchedulerView
from hpc_serve.submit.status.job_status import StatusReport
from hpc_serve.submit.status.status_reader import read_status
from hpc_serve.trust.connection import Identity

_log = logging.getLogger("hpc_serve.adjust")
_LOOK_S = 5.0
_ASK_SLURM_S = 15.0
_RENEW_S = 10.0
_LEASE_S = 30.0
_DRAIN_S = 600.0
_CANCEL_S = 20.0
_MOST_AT_ONCE = 8
_COMING = ("pending", "starting")


@dataclass(kw_only=True)
class Adjuster(OwnRun):
    """What one run of a job does for the number of its service's replicas. `bounds` are those of its script."""

    bounds: ReplicaBounds
    windows: Windows = field(default_factory=Windows)
    clock: Callable[[], float] = time.monotonic
    _slurm: SchedulerView = field(default_factory=lambda: SchedulerView(max_age_s=_ASK_SLURM_S), init=False)
    _judge: ElasticJudge | None = field(default=None, init=False)
    _seen: tuple[str, int] | None = field(default=None, init=False)
    _seen_s: float = field(default=0.0, init=False)
    _renewed_s: float = field(default=float("-inf"), init=False)

    def step(self, now: float) -> float | None:
        """Do what is due at `now`; returns in how many seconds to look again, None when nothing is left to do.

        Raises HpcServeError where something did not work; it can be tried again.
        """
        own = self.own_record()
        if own is not None and (own.state == "draining" or own.is_final or self.own_drain_request() is not None):
            self.finish()
            return None
        seen = read_elastic(self.store, self.service)
        if seen is not None and seen.state == "asleep" and own is not None:
            self._fall_asleep(now)
            return 0.0
        if own is None or own.state != "ready" or (seen is not None and seen.state == "stopped"):
            return self._look_s
        if seen is None or seen.decider != self.own_name:
            self._judge = None
        if seen is None or self._judge is None:
            return 0.0 if self._take_over(seen) else self._look_s
        self._decide(seen, self._judge, now)
        return self._look_s

    def finish(self, *, was_cancelled: bool = False) -> None:
        """Let another job decide from now on. Raises HpcServeError."""
        if self._judge is not None:
            self._judge = None
            self._change(lambda found: replace(found, decider=""))

    # -- who decides

    def _take_over(self, seen: Elastic | None) -> bool:
        """Become the one who decides, if nobody is; whether this is so."""
        key = (seen.decider, seen.counter) if seen is not None else ("", 0)
        if key != self._seen:
            self._seen, self._seen_s = key, self.clock()
        is_free = key[0] in ("", self.own_name) or self.clock() - self._seen_s >= _LEASE_S
        if not is_free:
            return False

        def take(found: Elastic | None) -> Elastic | None:
            found = found or Elastic(**vars(self.bounds))
            if (found.decider, found.counter) != key or found.state != "awake":
                return None
            return replace(found, decider=self.own_name, counter=found.counter + 1)

        taken = change_elastic(self.store, self.service, take)
        if taken is None:
            return False
        _log.info("this job decides how many replicas there are: %d to %d", taken.least, taken.most)
        now_s = self.clock()
        self._judge = ElasticJudge(self.windows, self.own_name, now_s, most_running=taken.most_running)
        self._renewed_s = now_s
        return True

    def _change(self, change: Callable[[Elastic], Elastic]) -> Elastic | None:
        """Change what is written while this job decides; None if it does not any more."""

        def mine(found: Elastic | None) -> Elastic | None:
            if found is None or found.decider != self.own_name:
                return None
            return replace(change(found), counter=found.counter + 1)

        changed = change_elastic(self.store, self.service, mine)
        self._renewed_s = self.clock()
        if changed is None and self._judge is not None:
            _log.info("another job decides how many replicas there are")
            self._judge = None
        return changed

    # -- what is decided

    def _decide(self, seen: Elastic, judge: ElasticJudge, now: float) -> None:
        report = self._read_status()
        live = live_replicas(self.store, report.replicas)
        judge.note(self._look(live, report), self.clock())
        after = _note_starts(seen, report, now)
        if after != seen or self.clock() - self._renewed_s >= _RENEW_S or judge.most_running > seen.most_running:
            most_running = max(judge.most_running, seen.most_running)
            changed = self._change(lambda found: replace(_note_starts(found, report, now), most_running=most_running))
            if changed is None:
                return
            seen = changed
        may_add = now >= seen.next_try_at and not seen.is_submitting(now)
        bounds = ReplicaBounds(least=seen.least, most=seen.most, idle_stop_s=seen.idle_stop_s)
        found = judge.decide(bounds, may_add=may_add)
        if found is not None:
            self._carry_out(found, live, now)

    def _carry_out(self, step: Step, live: Sequence[ReplicaStatus], now: float) -> None:
        if isinstance(step, Add):
            self._add(step, now)
        elif isinstance(step, Sleep):
            coming = [status for status in live if status.state in _COMING]
            ending = tuple(status.job_id for status in coming)
            if self._change(lambda found: replace(found, state="asleep", ending=ending).with_decision(now, step.why)):
                _log.info("the service falls asleep: %s", step.why)
                self._cancel(coming)
        elif step.is_coming:
            spared = sorted((one for one in live if one.state in _COMING), key=lambda one: _COMING.index(one.state))
            if self._tell(f"cancelled job {spared[0].job_id}", step, now):
                self._cancel(spared[:1])
        elif self._tell("let one leave", step, now):
            (leaving,) = (one.record for one in live if one.record is not None and one.record.name == step.name)
            _drain(drain_file_of(self.store, leaving), step.why, now)

    def _tell(self, what: str, step: Leave, now: float) -> bool:
        _log.info("%s: %s", what, step.why)
        return self._change(lambda found: found.with_decision(now, f"{what}: {step.why}")) is not None

    def _add(self, step: Add, now: float) -> None:
        if self._change(lambda found: replace(found, submitting=step.count, submitting_at=now)) is None:
            return
        try:
            from hpc_serve.submit.services.services import add_replicas

            jobs = add_replicas(self.store, self.service, step.count, like=self.job_id)
        except HpcServeError as error:
            problem = f"{_count(step.count)} could not be added: {error}"
            _log.warning("%s", problem)
            self._change(lambda found: _failed(replace(found, submitting=0), problem, now))
            return
        ids = tuple(job.job_id for job in jobs)
        text = f"added {_count(step.count)}: {step.why}"
        _log.info("%s (%s)", text, ", ".join(ids))
        self._change(
            lambda found: replace(found, submitting=0, starting=(*found.starting, *ids)).with_decision(now, text)
        )

    def _fall_asleep(self, now: float) -> None:
        """Let our own run drain, unless somebody has woken the service by now."""

        def drain(found: Elastic | None) -> None:
            if found is not None and found.state == "asleep":
                why = found.decided[-1].text if found.decided else "nobody uses it"
                _drain(self.own_drain_file, why, now)

        change_elastic(self.store, self.service, drain)

    def _cancel(self, statuses: Sequence[ReplicaStatus]) -> None:
        if statuses:
            stop(self.store, statuses, drain_s=0, timeout_s=_CANCEL_S)

    # -- what is seen

    def _read_status(self) -> StatusReport:
        return read_status(self.store, self.service, slurm=self._slurm)

    def _look(self, live: Sequence[ReplicaStatus], report: StatusReport) -> ServiceLook:
        serving = [status for status in live if status.state not in _COMING]
        api_key = self.store.read_api_key(self.service)
        with ThreadPoolExecutor(_MOST_AT_ONCE) as threads:
            loads = list(threads.map(lambda status: _load(status, api_key), serving))
        names = [status.record.name if status.record else status.job_id for status in serving]
        return ServiceLook(
            loads=dict(zip(names, loads, strict=True)),
            coming=len(live) - len(serving),
            draining=sum(status.state == "draining" for status in report.replicas),
            is_complete=not report.problems,
        )

    @property
    def _look_s(self) -> float:
        return min(_LOOK_S, max(0.5, self.windows.add_after_s / 4))


def _drain(path: Path, why: str, now: float) -> None:
    ask_to_drain(path, DrainRequest(by=f"{ELASTIC}: {why}", deadline_s=_DRAIN_S, requested_at=now))


def _load(status: ReplicaStatus, api_key: str) -> ReplicaLoad | None:
    """What the engine of a replica says; None if it cannot be asked."""
    record, host = status.record, status.host
    if status.state != "ready" or record is None or host is None:
        return None
    try:
        address = EngineAddress(host=host, port=record.port, identity=Identity.of(record, api_key))
    except RendezvousError:
        return None
    found = read_load(address)
    if found is None:
        return None
    return ReplicaLoad(
        running=found.running,
        waiting=found.waiting,
        under_way=found.requests.under_way,
        counts={found.requests.gate: found.requests.count},
    )


def _note_starts(seen: Elastic, report: StatusReport, now: float) -> Elastic:
    """Return `seen` with the ends and the starts of the jobs that were added. A job that was stopped has not failed."""
    replicas = {status.job_id: status for status in report.replicas}
    for job_id in seen.starting:
        status = replicas.get(job_id)
        if status is not None and status.state == "failed":
            seen = _failed(seen, f"job {job_id}, which was added, {status.sentence}", now)
        elif status is not None and status.state == "ready":
            seen = replace(seen, failures=0, problem="", next_try_at=0.0)
        if status is None or status.is_over or status.state == "ready":
            seen = replace(seen, starting=tuple(other for other in seen.starting if other != job_id))
    return seen


def _failed(seen: Elastic, problem: str, now: float) -> Elastic:
    failures = seen.failures + 1
    return replace(seen, failures=failures, problem=problem, next_try_at=now + pause_s(failures))


def _count(number: int) -> str:
    return "one" if number == 1 else str(number)
