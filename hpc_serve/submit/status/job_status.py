"""Adds what the scheduler says of a job to the status of its replica, and says in words how far a start is. Pure.

The client's status.py has derived the state from the record and the probe already. Here it changes only where the
scheduler knows more: a job that waits, has ended, is ending, or cannot be asked for. status_reader.py decides when to
ask the scheduler. The head of a run decides how far the start is, and how long it takes (`job/progress.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.rendezvous.wanted import Wanted
from hpc_serve.submit.slurm.slurm import UNKNOWN, JobState
from hpc_serve.submit.slurm.slurm_messages import ended_sentence, pending_cure, pending_sentence
from hpc_serve.units import GIB, MIB, SOON_S, about, duration

# -- the words about a start

# Stages whose names are not words for people.
_WORDS = {"capture": "KV cache and graphs", "server": "first answer"}
_LEAST_SHOWN_S = 1.0
_FIRST_REPEAT_S = 60.0
_PARTS_TOLD = 4


def progress_words(status: ReplicaStatus) -> str:
    """Return how fast a start loads and when it is ready; "" for a replica that does not start.

    "1.2 GiB/s, ready in about 3 min", "weights loaded in about 2 min, time left not known".
    """
    start = status.start
    if status.state != "starting" or start is None or not start.stage:
        return ""
    loads = start.stage == "weights"
    rate = _rate(start.bytes_per_s) if (loads or start.stage == "staging") and start.bytes_per_s else ""
    if start.time_left_s is not None:
        left = f"ready in {about(start.time_left_s - status.record_age_s)}"
    elif loads and start.weights_left_s is not None:
        left = f"weights loaded in {about(start.weights_left_s - status.record_age_s)}, time left not known"
    else:
        left = "time left not known"
    return ", ".join(words for words in (rate, left) if words)


def detail_words(status: ReplicaStatus) -> str:
    """Return the detail of a status with what is known of the progress of its start."""
    progress = progress_words(status)
    return f"{status.detail}, {progress}" if progress and status.detail and not status.reason else status.detail


def stage_seconds(status: ReplicaStatus) -> dict[str, float]:
    """Return the seconds of each stage of a start, in order: the queue, the finished stages, the present stage."""
    start = status.start
    if start is None:
        return {}
    took = {_WORDS.get(name, name): seconds for name, seconds in start.took_s.items()}
    if status.submitted_at and status.started_at:
        took = {"queued": max(0.0, status.started_at - status.submitted_at), **took}
    if start.stage and status.updated_at:
        until = status.updated_at + (status.record_age_s if status.state == "starting" else 0.0)
        took[_WORDS.get(start.stage, start.stage)] = max(0.0, until - start.since)
    return took


def stages_words(status: ReplicaStatus) -> str:
    """Return the finished stages of a start and the present stage, with their times; "" if there is none to tell.

    "queued 12 s, engine 31 s, weights 1 min 5 s (14.9 GiB, 235 MiB/s), compile for 20 s"
    """
    start = status.start
    if start is None:
        return ""
    present = _WORDS.get(start.stage, start.stage)
    words = []
    for name, seconds in stage_seconds(status).items():
        if name == present:
            words += [f"{name} for {duration(seconds)}"] if status.state == "starting" else []
        elif seconds >= _LEAST_SHOWN_S:
            words.append(f"{name} {duration(seconds)}{_loaded(status) if name == 'weights' else ''}")
    return ", ".join(words)


class CoarseChanges:
    """Decides whether a replica's status has changed enough to be told again.

    Enough is another stage, another quarter of the count, half of the time left, or twice the time in a stage.
    """

    def __init__(self) -> None:
        self._told: tuple[object, ...] | None = None
        self._told_left_s = math.inf
        self._repeat_after_s = _FIRST_REPEAT_S

    def is_one(self, status: ReplicaStatus) -> bool:
        """Return whether the status is to be told. Later changes count from the told status."""
        stage = (status.name, status.restart, status.state, status.stage, status.reason, _quarter(status))
        start, is_new = status.start, stage != self._told
        if start is not None and start.stage and status.state == "starting":
            left_s = math.inf if start.time_left_s is None else max(start.time_left_s, SOON_S)
            in_stage_s = (status.updated_at or 0.0) - start.since
            is_halved = left_s < math.inf and 2 * left_s <= self._told_left_s
            if is_new or is_halved or in_stage_s >= self._repeat_after_s:
                is_new, self._told_left_s = True, left_s
                self._repeat_after_s = max(_FIRST_REPEAT_S, 2 * in_stage_s)
        self._told = stage
        return is_new


def _quarter(status: ReplicaStatus) -> int:
    progress = status.progress
    if progress is None or not progress.total:
        return 0
    return min(_PARTS_TOLD * progress.done // progress.total, _PARTS_TOLD - 1)


def _loaded(status: ReplicaStatus) -> str:
    start = status.start
    if start is None or not start.bytes_per_s:
        return ""
    size = f"{start.checkpoint_bytes / GIB:.1f} GiB, " if start.checkpoint_bytes else ""
    return f" ({size}{_rate(start.bytes_per_s)})"


def _rate(bytes_per_s: float) -> str:
    if bytes_per_s >= GIB:
        return f"{bytes_per_s / GIB:.1f} GiB/s"
    return f"{bytes_per_s / MIB:.0f} MiB/s"


# -- the scheduler's word

# A job that runs for so long has published a record.
RECORD_EXPECTED_WITHIN_S = 60.0

# Ends that Slurm brings about. Its word says more than the signal that a launcher saw.
_ENDED_BY_SLURM = ("CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")


@dataclass(frozen=True, kw_only=True)
class StatusReport:
    """The replicas of a home, and `problems`: files that are not trusted, a scheduler that does not answer.

    `elsewhere` are jobs that only Slurm knows: they carry a service's name, and have no record in this home. They are
    shown, and nothing is done to them. `wanted` says what is wanted of a service, by its name, and was decided of late.
    """

    replicas: tuple[ReplicaStatus, ...]
    elsewhere: tuple[ReplicaStatus, ...] = ()
    problems: tuple[str, ...] = ()
    wanted: Mapping[str, Wanted] = field(default_factory=dict)

    @property
    def everywhere(self) -> tuple[ReplicaStatus, ...]:
        """Return the replicas of this home and those elsewhere, oldest first."""
        return tuple(sorted((*self.replicas, *self.elsewhere), key=lambda status: status.began_or_ended_at))

    @property
    def live_elsewhere(self) -> tuple[ReplicaStatus, ...]:
        """Return the jobs elsewhere that are not over."""
        return tuple(status for status in self.elsewhere if not status.is_over)


def without_successors(replicas: Iterable[ReplicaStatus]) -> list[ReplicaStatus]:
    """Return the replicas without those that only wait to take over from another of `replicas`."""
    replicas = list(replicas)
    successors = {status.successor_job_id for status in replicas}
    return [status for status in replicas if status.job_id not in successors]


def add_job_state(status: ReplicaStatus, job: JobState | None) -> ReplicaStatus:
    """Return the replica with the scheduler's state of its job; None if the scheduler adds nothing."""
    if job is None:
        return status
    status = replace(status, scheduler_state=job.state, time_left=job.time_left if job.is_running else None)
    was_requeued = job.is_pending or (status.is_over and job.restart > status.restart)
    if status.record is None or was_requeued:
        return _of_job_alone(_before_its_next_run(status, job), job)
    if status.is_over:
        state = "failed" if job.state == "NODE_FAIL" else status.state  # its launcher may have seen a signal alone
        return replace(status, state=state, reason=_end_reason(status, job))
    if job.is_over:
        return _ended(status, job)
    if status.state == "ready":
        return status
    if job.state == "COMPLETING":
        return _ending(status)
    if job.state == "SUSPENDED":
        return replace(status, state="unresponsive", reason="Slurm has suspended its job (SUSPENDED)")
    if job.state == UNKNOWN:
        return _without_scheduler(status, job)
    if status.state == "unknown":
        return replace(status, state="unresponsive", reason=f"{status.reason}; its job still runs")
    if status.is_overdue:
        age = f"its record was last renewed {status.record_age_s:.0f} s ago"
        return replace(status, reason="; ".join(words for words in (status.reason, age) if words))
    return status


def explain_missing_record(
    status: ReplicaStatus, job: JobState, *, home: Path, is_by_hand: bool = False, other_home: Path | None = None
) -> ReplicaStatus:
    """Say so when a job should have published a record in `home` by now, and has not.

    A job `is_by_hand` that is known by its name in the queue alone: nobody can tell whether it serves.
    """
    if status.state != "starting" or job.run_time_s <= RECORD_EXPECTED_WITHIN_S:
        return status
    where = (
        f"there is no record of it in {home} after {job.run_time_s / 60:.0f} min: "
        "its script has not come so far, or it has another HPC_SERVE_HOME"
    )
    if not is_by_hand:
        return replace(status, reason=where)
    if other_home is not None:
        where = f"its records are not in {home}: set HPC_SERVE_HOME={other_home}"
    return replace(status, state="unknown", stage="", reason=f"Slurm runs it, but {where}")


def _of_job_alone(status: ReplicaStatus, job: JobState) -> ReplicaStatus:
    if job.is_pending:
        # Slurm may name a time for a job that only a person can let go.
        stays = "held" in job.reason.lower() or pending_cure(job.reason, job.job_id)
        expected = f"; expected to start at {job.start_time}" if job.start_time and not stays else ""
        if job.waits_for_one_of_several_partitions:
            sentence = f"waiting; one of its partitions ({job.partition}) cannot run it ({job.reason}){expected}"
            return replace(status, state="pending", reason=sentence)
        sentence = pending_sentence(job.reason) + expected
        return replace(status, state="pending", reason=sentence, pending_reason=job.reason)
    if job.is_over:
        return _ended(status, job)
    if job.state == UNKNOWN:
        return replace(status, state="unknown", reason=job.detail)
    if job.state == "COMPLETING":
        return _ending(status)
    stage = "its nodes are being prepared" if job.state == "CONFIGURING" else "its script has begun"
    return replace(status, state="starting", stage=stage)


def _before_its_next_run(status: ReplicaStatus, job: JobState) -> ReplicaStatus:
    """Return what remains true of a replica when its job begins anew, or has published nothing."""
    return ReplicaStatus(
        job=status.job,
        state="unknown",
        restart=max(job.restart, status.restart),
        replica=status.replica,
        submitted_at=status.submitted_at,
        log_dir=status.log_dir,
        batch_log=status.batch_log,
        scheduler_state=status.scheduler_state,
        time_left=status.time_left,
        predicted=status.predicted,
        machine=status.machine,
    )


def _end_reason(status: ReplicaStatus, job: JobState) -> str:
    """Why a replica ended. Its launcher saw a signal, or a part that ended; Slurm may know the cause."""
    if job.state not in _ENDED_BY_SLURM:
        return status.reason
    if status.state == "stopped":
        return ended_sentence(job)
    return status.reason if job.state == "CANCELLED" else f"{status.reason}; {ended_sentence(job)}"


def _ending(status: ReplicaStatus) -> ReplicaStatus:
    return replace(status, state="draining", stage="stopping", progress=None, reason="Slurm ends its job (COMPLETING)")


def _ended(status: ReplicaStatus, job: JobState) -> ReplicaStatus:
    """Return the status of a job that is over although no record says so."""
    return replace(
        status,
        state="stopped" if job.state in ("CANCELLED", "COMPLETED") else "failed",
        stage="",
        progress=None,
        reason=ended_sentence(job),
        exit_code=job.exit_code,
        batch_log=status.batch_log or job.batch_log,
        ended_at=job.ended_at or status.updated_at,
    )


def _without_scheduler(status: ReplicaStatus, job: JobState) -> ReplicaStatus:
    """The scheduler does not answer: a record that is renewed and an engine that answers are believed, no others."""
    has_no_answer = status.state == "unresponsive" and status.probe is not None and status.probe.status == "no answer"
    if has_no_answer or status.state == "unknown":
        return replace(status, state="unknown", reason=f"{status.reason}, and {job.detail}")
    if status.is_overdue and status.state != "unresponsive":
        return replace(status, state="unknown", reason=job.detail)
    return status


def never_starts(status: ReplicaStatus) -> bool:
    """Return whether a job waits in the queue for what only a person can change."""
    return status.state == "pending" and bool(pending_cure(status.pending_reason, status.job_id))
