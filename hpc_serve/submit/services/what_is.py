"""Finds out what the jobs of a service are: from records, engines, drain files and Slurm, as reconcile.py wants it.

Slurm owns the truth about a job: the job is over when Slurm says so, and not while Slurm does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import RendezvousError
from hpc_serve.job.engine.health import EngineAddress, read_load
from hpc_serve.rendezvous.gate_headers import EngineLoad
from hpc_serve.rendezvous.record import SubmittedJob
from hpc_serve.rendezvous.store import ServiceStore, drain_file, read_drain_request, read_submitted
from hpc_serve.submit.services.jobs import Job, LoadHistory, LoadSummary, ServiceJobState, WhatIs
from hpc_serve.submit.services.stop import write_end
from hpc_serve.submit.slurm.scheduler import SchedulerView
from hpc_serve.submit.slurm.slurm import JobState, duration_s
from hpc_serve.submit.status.job_status import StatusReport
from hpc_serve.submit.status.status_reader import read_status
from hpc_serve.trust.connection import Identity

SETTLED_S = 600.0  # a job that has served for so long did not fail at its start
_MOST_AT_ONCE = 8
_COMING = ("pending", "starting")


@dataclass(kw_only=True)
class Looker:
    """Looks at one service, again and again. With a `history` it asks the engines for their load."""

    store: ServiceStore
    service: str
    own_job: str = ""
    history: LoadHistory | None = None
    slurm: SchedulerView = field(default_factory=SchedulerView)
    clock: Callable[[], float] = time.monotonic
    _times: dict[str, tuple[float, float, float]] = field(default_factory=dict, init=False)

    def look(self) -> WhatIs:
        """Read everything, and write down the ends of jobs that published nothing. Raises StoreError."""
        report = read_status(self.store, self.service, slurm=self.slurm)
        submitted = {job.job_id: job for job in read_submitted(self.store.service_dir(self.service), self.service, [])}
        loads = self._loads(report)
        is_complete = self.slurm.problem not in report.problems
        of_job: dict[str, list[ReplicaStatus]] = {}
        for status in report.replicas:
            of_job.setdefault(status.job_id, []).append(status)
            if status.is_over and status.record is None and not self.slurm.problem:
                write_end(self.store, status, submitted.get(status.job_id))
        jobs = tuple(self._job(found, submitted.get(job_id), loads) for job_id, found in of_job.items())
        summary: LoadSummary | None = None
        if self.history is not None:
            summary = self.history.note(loads, self.clock(), is_complete=is_complete)
        return WhatIs(jobs=jobs, load=summary, is_complete=is_complete)

    def _job(
        self, found: Sequence[ReplicaStatus], submitted: SubmittedJob | None, loads: Mapping[str, EngineLoad | None]
    ) -> Job:
        last, now = found[-1], time.time()
        in_queue = self.slurm.queued(last.job_id) if last.job.cluster == "slurm" else None
        state = self._state(found, in_queue)
        ends_at, limit_s, waited_s = self._job_times(last.job_id, in_queue, now)
        starts = [one.record.measured["start_s"] for one in found if one.record and "start_s" in one.record.measured]
        since = [one.record.state_since or now for one in found if one.record and one.state == "ready"]
        names = [one.record.name for one in found if one.record is not None]
        requests = [load.running + load.waiting for name in names if (load := loads.get(name)) is not None]
        return Job(
            job_id=last.job_id,
            state=state,
            replicas=(submitted or last.job).replicas_per_job,
            live=tuple(one for one in found if not one.is_over),
            requests=sum(requests),
            ends_at=ends_at,
            limit_s=limit_s,
            waited_s=waited_s,
            start_s=max(starts, default=None),
            predecessor=submitted.predecessor if submitted is not None else "",
            why_over=last.sentence if state == "over" else "",
            is_settled=state == "ready" and bool(since) and now - max(since) >= SETTLED_S,
            is_own=last.job_id == self.own_job,
            machine=last.machine,
        )

    def _state(self, found: Sequence[ReplicaStatus], in_queue: JobState | None) -> ServiceJobState:
        live = [one for one in found if not one.is_over]
        if not live:  # Slurm may be about to run a job again that has failed
            runs_again = in_queue is not None and any(one.state == "failed" for one in found)
            return "unclear" if runs_again else "over"
        staying = [one for one in live if not self._drains(one)]
        if not staying:
            return "draining"
        if all(one.state == "pending" for one in staying):
            return "pending"
        if any(one.state in _COMING for one in staying):
            return "starting"
        return "ready" if any(one.state == "ready" for one in staying) else "unclear"

    def _drains(self, status: ReplicaStatus) -> bool:
        if status.state == "draining":
            return True
        record = status.record
        return record is not None and read_drain_request(drain_file(self.store, self.service, record.name)) is not None

    def _job_times(self, job_id: str, in_queue: JobState | None, now: float) -> tuple[float | None, float, float]:
        """Its end, its whole limit, and its wait in the queue; the last known ones while Slurm does not answer.

        The end is counted from the time left, so that the clocks of Slurm's host and this one may differ.
        """
        if in_queue is not None and in_queue.is_running and in_queue.time_left:
            left_s = duration_s(in_queue.time_left)
            began_at, submitted_at = in_queue.started_at, in_queue.submitted_at
            waited_s = max(0.0, began_at - submitted_at) if began_at and submitted_at else 0.0
            if left_s or in_queue.time_left.startswith("0:"):
                asked_at = now - self.slurm.age_s
                self._times[job_id] = (asked_at + left_s, in_queue.run_time_s + left_s, waited_s)
            else:  # UNLIMITED
                self._times.pop(job_id, None)
        return self._times.get(job_id) or (None, float("inf"), 0.0)

    def _loads(self, report: StatusReport) -> dict[str, EngineLoad | None]:
        """The load of each replica that serves; None where it cannot be asked."""
        if self.history is None:
            return {}
        serving = [
            one
            for one in report.replicas
            if one.record is not None and not one.is_over and one.state not in _COMING and not self._drains(one)
        ]
        api_key = self.store.read_api_key(self.service)
        with ThreadPoolExecutor(_MOST_AT_ONCE) as threads:
            loads = list(threads.map(lambda status: _load(status, api_key), serving))
        return {one.record.name: load for one, load in zip(serving, loads, strict=True) if one.record is not None}


def _load(status: ReplicaStatus, api_key: str) -> EngineLoad | None:
    record, host = status.record, status.host
    if status.state != "ready" or record is None or host is None:
        return None
    try:
        return read_load(EngineAddress(host=host, port=record.port, identity=Identity.of(record, api_key)))
    except RendezvousError:
        return None
