"""When a job needs its successor. Pure: keep_up.py looks at the clock and does what is due."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_serve.rendezvous.drain import DrainRequest
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.submit.slurm.slurm import JobState

KEEP_UP = "hpc-serve keep-up"
ELASTIC = "hpc-serve elastic"
# Who ends a replica so that nothing shall take over from it: a person, or the job that decides how many there are.
_FOR_GOOD = ("hpc-serve stop", ELASTIC)
_START_FACTOR = 1.2  # starts of one service differ by how busy the filesystem is
# sbatch's manual: the notice of --signal may come up to a minute early.
_MARGIN_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0


@dataclass(frozen=True, kw_only=True)
class JobTimes:
    """A run of a job, in seconds since the epoch: when it was submitted, when it began, when it must end."""

    submitted_at: float
    began_at: float
    ends_at: float

    @property
    def queue_wait_s(self) -> float:
        return max(0.0, self.began_at - self.submitted_at)

    @property
    def limit_s(self) -> float:
        return self.ends_at - self.began_at


def times_of(job: JobState, *, seen_since: float) -> JobTimes | None:
    """The times of a job that runs, as Slurm tells them; None if it has no time limit, or is not known.

    `seen_since` is when this program began, by the clock of its node. A job cannot have begun later than that: where
    Slurm says so, the node's clock is behind, and the job ends earlier by that clock.
    """
    if job.started_at is None or job.ended_at is None or job.is_over:
        return None
    behind_s = max(0.0, job.started_at - seen_since)
    submitted_at = job.submitted_at if job.submitted_at is not None else job.started_at
    return JobTimes(
        submitted_at=submitted_at - behind_s, began_at=job.started_at - behind_s, ends_at=job.ended_at - behind_s
    )


def due_at(times: JobTimes, *, start_s: float, notice_s: float) -> float:
    """When to submit the successor: so long before the end as it will wait and start, and the notice and a margin.

    `start_s` is how long this run took to be ready. The wait in the queue is this job's own, at most half of its limit.

    >>> job = JobTimes(submitted_at=-600, began_at=0, ends_at=43200)
    >>> (43200 - due_at(job, start_s=300, notice_s=120)) / 60
    19.0
    """
    wait_s = min(times.queue_wait_s, times.limit_s / 2)
    return times.ends_at - notice_s - _START_FACTOR * start_s - wait_s - _MARGIN_S


def pause_s(tries: int) -> float:
    """How long to wait after so many tries.

    >>> [pause_s(tries) for tries in (1, 2, 3, 9)]
    [30.0, 60.0, 120.0, 600.0]
    """
    return min(_FIRST_PAUSE_S * 2.0 ** (max(tries, 1) - 1), _LONGEST_PAUSE_S)


def was_stopped(request: DrainRequest | None, record: EndpointRecord | None) -> bool:
    """Whether a replica is ended by `hpc-serve stop` or `scale`, or as it is not needed: nothing takes over then."""
    if request is not None and request.by.startswith(_FOR_GOOD):
        return True
    is_ending = record is not None and record.state in ("draining", "stopped")
    return is_ending and record is not None and (record.reason or "").startswith(_FOR_GOOD)
