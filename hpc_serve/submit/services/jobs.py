"""The jobs of a service as values, and which of them count for what is wanted.

Pure: what_is.py finds the jobs, reconcile.py decides what follows. A job counts as long as Slurm says that it waits or
runs, or does not answer. It does not count once it drains, was told to end, or ends sooner than its successor would be
ready.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hpc_serve.rendezvous.record import DEFAULT_MACHINE
from hpc_serve.rendezvous.wanted import Wanted
from hpc_serve.submit.services.load import LoadSummary

if TYPE_CHECKING:
    from hpc_serve.client.replicas.status import ReplicaStatus

# pending and starting: it serves nobody yet. unclear: it serves nobody now, and may again.
JobStage = Literal["pending", "starting", "unclear", "ready", "draining", "over"]

_START_FACTOR = 1.2  # starts of one service differ by how busy the filesystem is
_MARGIN_S = 60.0  # sbatch's manual: the notice of --signal may come up to a minute early


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job of a service, with `replicas` replicas, of which `live` are not over. `requests` run or wait in it.

    `ends_at` is its time limit in seconds since the epoch (None: not known, or none), `limit_s` the whole of it.
    `start_s` is how long it took to be ready (None: never was), `waited_s` how long it waited in the queue.
    `predecessor` is the job from which it takes over. `why_over` is a sentence.
    `machine` is the kind of machine that it is for.
    `is_settled` says that it has served for long enough that a later failure is not one of its start.
    """

    job_id: str
    stage: JobStage
    replicas: int = 1
    live: tuple[ReplicaStatus, ...] = ()
    requests: int = 0
    ends_at: float | None = None
    limit_s: float = math.inf
    waited_s: float = 0.0
    start_s: float | None = None
    predecessor: str = ""
    why_over: str = ""
    is_settled: bool = False
    is_own: bool = False
    machine: str = DEFAULT_MACHINE

    @property
    def is_live(self) -> bool:
        return self.stage != "over"

    def due_at(self, notice_s: float) -> float:
        """When its successor is due: so long before its end as that will wait and start, the notice, and a margin.

        The wait in the queue is this job's own, at most half of its limit. A run that was never ready has none.

        >>> job = Job(job_id="1", stage="ready", ends_at=43200, limit_s=43200, waited_s=600, start_s=300)
        >>> (43200 - job.due_at(120)) / 60
        19.0
        """
        if self.ends_at is None or self.start_s is None:
            return math.inf
        return self.ends_at - notice_s - _START_FACTOR * self.start_s - min(self.waited_s, self.limit_s / 2) - _MARGIN_S


@dataclass(frozen=True, kw_only=True)
class WhatIs:
    """The jobs of a service, oldest first. `load` is None where nobody looked at the engines for a while.

    A look that is not `is_complete` may have missed some: then no job is submitted or ended.
    """

    jobs: tuple[Job, ...] = ()
    load: LoadSummary | None = None
    is_complete: bool = True


def counted(wanted: Wanted, what_is: WhatIs, now: float) -> list[Job]:
    """The jobs that count: not those that drain, end, hand over, or only wait to take over from one that counts."""
    staying = [
        job
        for job in what_is.jobs
        if job.is_live and job.stage != "draining" and job.job_id not in wanted.ending and not is_due(job, wanted, now)
    ]
    ids = {job.job_id for job in staying}
    before = {job.job_id: job.predecessor for job in what_is.jobs}

    def is_ahead(job: Job) -> bool:
        seen, job_id = {job.job_id}, job.predecessor
        while job_id and job_id not in seen:
            if job_id in ids:
                return True
            seen.add(job_id)
            job_id = before.get(job_id, "")
        return False

    return [job for job in staying if not is_ahead(job)]


def is_due(job: Job, wanted: Wanted, now: float) -> bool:
    return wanted.keep_up and now >= job.due_at(wanted.notice_s)
