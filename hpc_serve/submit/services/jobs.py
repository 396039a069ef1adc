"""The jobs of a service as values, which of them count for what is wanted, and their load over time. Pure.

A job counts as long as Slurm says that it waits or runs, or does not answer. It does not count once it drains, was told
to end, or ends sooner than its successor would be ready. `LoadHistory` says whether requests wait, and what the
replicas had to carry. Unknown is not idle: where one replica could not be asked, the times begin anew. what_is.py finds
the jobs and asks the engines; reconcile.py decides what follows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hpc_serve.rendezvous.gate_headers import EngineLoad
from hpc_serve.rendezvous.record import DEFAULT_MACHINE
from hpc_serve.rendezvous.wanted import Wanted
from hpc_serve.units import read_seconds

if TYPE_CHECKING:
    from hpc_serve.client.replicas.status import ReplicaStatus

# The times of a service that is looked at less often than this begin anew.
_LONGEST_GAP_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Windows:
    """For how long requests must wait before replicas are added, and the others carry the load before one leaves."""

    add_after_s: float = 20.0
    leave_after_s: float = 600.0


def windows_of(environ: Mapping[str, str]) -> Windows:
    """Return the windows that the environment asks for. Raises InvalidRequestError."""
    return Windows(
        add_after_s=read_seconds(environ, "HPC_SERVE_ADD_AFTER_S", Windows.add_after_s),
        leave_after_s=read_seconds(environ, "HPC_SERVE_LEAVE_AFTER_S", Windows.leave_after_s),
    )


@dataclass(frozen=True, kw_only=True)
class LoadSummary:
    """The load of a service until now. `is_known` says that each replica could be asked.

    `surplus` requests wait without room for `surplus_s` seconds at least, `waiting` now. At most `peak` requests ran or
    waited at once in the last window, of which `known_s` seconds were seen. There was none for `idle_s` seconds.
    """

    is_known: bool
    most_running: int
    waiting: int
    surplus: int
    surplus_s: float
    peak: int
    known_s: float
    idle_s: float


class LoadHistory:
    """The looks at one service. Times are seconds of one monotonic clock.

    `most_running` requests were seen to run on one replica at once, so that each is believed to carry as many.
    """

    def __init__(self, windows: Windows, now_s: float, *, most_running: int = 0) -> None:
        self.most_running = most_running
        self._windows = windows
        self._names: frozenset[str] = frozenset()
        self._was_known = False
        self._looked_at_s = self._used_at_s = self._known_since_s = now_s
        self._counts: dict[tuple[str, str], int] = {}
        self._surplus: deque[tuple[float, int]] = deque()
        self._peaks: deque[tuple[float, int]] = deque()

    def note(self, loads: Mapping[str, EngineLoad | None], now_s: float, *, is_complete: bool = True) -> LoadSummary:
        """Take in a look that ended now: the load of each ready replica by its name; None: it could not be asked."""
        if now_s - self._looked_at_s > _LONGEST_GAP_S:
            self.begin_anew(now_s)
            self._used_at_s = now_s
        known = {name: load for name, load in loads.items() if load is not None}
        is_known = is_complete and bool(loads) and len(known) == len(loads)
        self.most_running = max((self.most_running, *(load.running for load in known.values())))
        was_used = self._is_new(known) or any(load.requests.under_way or load.running > 1 for load in known.values())
        if was_used or not is_known:
            self._used_at_s = now_s
        if not (is_known and self._was_known):
            self._known_since_s = now_s
            self._peaks.clear()
        self._peaks.append((now_s, sum(load.running + load.waiting for load in known.values())))
        while self._peaks[0][0] < now_s - self._windows.leave_after_s:
            self._peaks.popleft()
        room = sum(max(0, self.most_running - load.running) for load in known.values() if not load.waiting)
        waiting = sum(load.waiting for load in known.values())
        if loads.keys() != self._names or waiting <= room or not is_complete:
            self._surplus.clear()
        if waiting > room and is_complete:
            self._surplus.append((now_s, waiting - room))
        self._names, self._was_known, self._looked_at_s = frozenset(loads), is_known, now_s
        return LoadSummary(
            is_known=is_known,
            most_running=self.most_running,
            waiting=waiting,
            surplus=min((waits for _, waits in self._surplus), default=0),
            surplus_s=now_s - self._surplus[0][0] if self._surplus else 0.0,
            peak=max(requests for _, requests in self._peaks),
            known_s=now_s - self._known_since_s,
            idle_s=now_s - self._used_at_s,
        )

    def begin_anew(self, now_s: float) -> None:
        """Forget the windows, since another number of replicas is wanted."""
        self._known_since_s = now_s
        self._surplus.clear()
        self._peaks.clear()

    def _is_new(self, known: Mapping[str, EngineLoad]) -> bool:
        """Whether a request has come since the last look."""
        now = {(name, load.requests.gate): load.requests.count for name, load in known.items()}
        is_new = any(self._counts.get(key) != count for key, count in now.items())
        self._counts |= now
        return is_new


# -- jobs

# A job's state by its replicas; Slurm's own word is `JobState.state` (submit/slurm/slurm.py).
# pending and starting: it serves nobody yet. unclear: it serves nobody now, and may again.
ServiceJobState = Literal["pending", "starting", "unclear", "ready", "draining", "over"]

_START_FACTOR = 1.2  # starts of one service differ by how busy the filesystem is
_MARGIN_S = 60.0  # sbatch's manual: the notice of --signal may come up to a minute early


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job of a service, with `replicas` replicas, of which `live` are not over. `requests` run or wait in it.

    `ends_at` is its time limit in seconds since the epoch (None: not known, or none), `limit_s` the whole of it.
    `start_s` is how long it took to be ready (None: never was), `waited_s` how long it waited in the queue.
    `predecessor` is the job from which it takes over. `why_over` is a sentence.
    `machine` is the kind of machine that it is for. `is_own` says that the program that decides runs in it.
    `is_settled` says that it has served for long enough that a later failure is not one of its start.
    """

    job_id: str
    state: ServiceJobState
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
        return self.state != "over"

    def due_at(self, notice_s: float) -> float:
        """When its successor is due: so long before its end as that will wait and start, the notice, and a margin.

        The wait in the queue is this job's own, at most half of its limit. A run that was never ready has none.

        >>> job = Job(job_id="1", state="ready", ends_at=43200, limit_s=43200, waited_s=600, start_s=300)
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
    """Return the jobs that count: none that drains, ends, hands over, or waits to take over from one that counts."""
    staying = [
        job
        for job in what_is.jobs
        if job.is_live and job.state != "draining" and job.job_id not in wanted.ending and not is_due(job, wanted, now)
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
