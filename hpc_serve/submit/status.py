"""What has become of a replica: what is written about it, joined with what the scheduler and the engine say now.

A record is believed for what only it knows (stage, last log lines). If a job exists is the scheduler's to say, whether
the engine answers is the engine's; where neither answers, the state is unknown. Who is asked when is look.py's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hpc_serve.client.views import Answer
from hpc_serve.rendezvous.record import EndpointRecord, NodeRecord, Progress, SubmittedJob
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.logs import log_files, tail
from hpc_serve.submit.slurm import UNKNOWN, JobState
from hpc_serve.submit.slurm_messages import ended_sentence, pending_sentence

State = Literal["pending", "starting", "ready", "unresponsive", "draining", "stopped", "failed", "unknown"]
_LAST_LINES = 10
RECORD_EXPECTED_WITHIN_S = 60.0
# Ends that Slurm brings about: its word says more than the signal that a launcher saw.
_BROUGHT_ABOUT = ("CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")


@dataclass(frozen=True, kw_only=True)
class ServiceStatus:
    """One replica of a service, or its job while there is none yet.

    `reason` is a sentence for people. `address` is the host and port that answered, or that the record names.
    `end_reported_by_job` says that the job itself told how it ended. Times are seconds since the epoch; `measured`
    and `predicted` hold figures in bytes, seconds and tokens.
    """

    service: str
    job_id: str
    state: State
    cluster: str = "slurm"
    model: str = ""
    stand_in: str | None = None
    stage: str = ""
    progress: Progress | None = None
    reason: str = ""
    address: str = ""
    nodes: tuple[NodeRecord, ...] = ()
    num_nodes: int = 1
    gpus_per_node: int = 0
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    restart: int = 0
    replica: int = 0
    submitted_at: float | None = None
    started_at: float | None = None
    updated_at: float | None = None
    failed_part: str | None = None
    exit_code: int | None = None
    last_log_lines: tuple[str, ...] = ()
    end_reported_by_job: bool = False
    log_dir: str = ""
    batch_log: str | None = None
    scheduler_state: str = ""
    time_left: str | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.state in ("stopped", "failed")

    @property
    def began_or_ended_at(self) -> float:
        """When it began or, if it is over, when it ended."""
        began_s = self.submitted_at or self.started_at or 0.0
        return (self.updated_at or began_s) if self.is_over else began_s

    @property
    def detail(self) -> str:
        """Stage, failed part and reason, as far as they say more than the state."""
        stage = "" if self.is_over or self.stage == self.state else self.stage
        part = self.failed_part if not self.reason.startswith(f"{self.failed_part} ") else ""
        return ": ".join(words for words in (stage, part, self.reason) if words)

    @property
    def sentence(self) -> str:
        """State and detail in one line."""
        return f"{self.state}: {self.detail}" if self.detail and self.state != "ready" else self.state

    @property
    def log_places(self) -> tuple[str, ...]:
        """Where its logs are or would be: the batch script's if it is apart, and a pattern of the others."""
        pattern = f"{self.log_dir}/{self.job_id}*.log"
        is_apart = self.batch_log is not None and Path(self.batch_log).parent != Path(self.log_dir)
        return (self.batch_log, pattern) if self.batch_log and is_apart else (pattern,)

    def log_files(self) -> list[Path]:
        """The job's logs that exist now."""
        return log_files(self.job_id, Path(self.log_dir), Path(self.batch_log) if self.batch_log else None)


@dataclass(frozen=True, kw_only=True)
class StatusReport:
    """All that was found. `problems` are files that were not trusted, and a scheduler that did not answer."""

    services: tuple[ServiceStatus, ...]
    problems: tuple[str, ...] = ()


def of_record(
    store: ServiceStore, record: EndpointRecord, note: SubmittedJob | None, job: JobState | None, answer: Answer | None
) -> ServiceStatus:
    """A replica: its record, what Slurm says of its job (None: no more than the record does), its engine's answer."""
    log_dir = record.log_dir or str(store.log_dir(record.service))
    host = answer.host if answer and answer.is_ours else next(iter(record.hosts), None)
    status = ServiceStatus(
        service=record.service,
        job_id=record.job_id,
        state="unknown",
        cluster=record.cluster,
        model=record.model,
        stage=record.stage,
        progress=record.progress,
        reason=record.reason or "",
        stand_in=record.stand_in,
        address=f"{host}:{record.port}" if host else "",
        nodes=record.nodes,
        num_nodes=record.num_nodes,
        gpus_per_node=record.gpus_per_node,
        tensor_parallel_size=record.tensor_parallel_size,
        pipeline_parallel_size=record.pipeline_parallel_size,
        restart=record.restart,
        replica=record.replica,
        submitted_at=note.submitted_at if note else None,
        started_at=record.started_at,
        updated_at=record.updated_at,
        failed_part=record.failed_part,
        exit_code=record.exit_code,
        last_log_lines=record.last_log_lines,
        log_dir=log_dir,
        batch_log=note.log_path if note else None,
        scheduler_state=job.state if job else "",
        time_left=job.time_left if job and job.is_running else None,
        measured=record.measured,
        predicted=record.predicted or (note.predicted if note else {}),
    )
    is_of_a_run_before = record.is_final and job is not None and job.restart > record.restart
    if job is not None and (job.is_pending or is_of_a_run_before):  # it was requeued, and has said nothing since
        return _of_job_alone(_of_no_run(status, restart=max(job.restart, record.restart)), job)
    if record.state in ("stopped", "failed"):
        return replace(status, state=record.state, reason=_last_reason(record, job), end_reported_by_job=True)
    if job is not None and job.is_over:
        return _ended(status, job)
    if answer is not None and record.state == "ready":
        return _answered(status, record, job, answer)
    if job is not None and job.state == UNKNOWN and not _is_fresh(record):
        return replace(status, reason=job.detail)
    if job is not None and job.state == "COMPLETING":
        return _ending(status)
    age = "" if _is_fresh(record) else f"its record was last renewed {_age(record)} ago"
    reason = "; ".join(words for words in (record.reason, age) if words)
    return replace(status, state="draining" if record.state == "draining" else "starting", reason=reason)


def _last_reason(record: EndpointRecord, job: JobState | None) -> str:
    """Why a replica ended. Its launcher saw a signal, or a part that went; Slurm may know what that was."""
    reason = record.reason or ""
    if job is None or job.state not in _BROUGHT_ABOUT:
        return reason
    if record.state == "stopped":
        return ended_sentence(job)
    return reason if job.state == "CANCELLED" else f"{reason}; {ended_sentence(job)}"


def _of_no_run(status: ServiceStatus, *, restart: int) -> ServiceStatus:
    """What remains true of a replica when its job begins anew."""
    kept = ("service", "job_id", "state", "cluster", "model", "num_nodes", "gpus_per_node", "submitted_at", "log_dir")
    values = {name: getattr(status, name) for name in (*kept, "batch_log", "predicted")}
    return ServiceStatus(**values, restart=restart)


def of_note(store: ServiceStore, note: SubmittedJob, job: JobState | None) -> ServiceStatus:
    """A job that has published nothing yet; without an answer about the job, its end as it was noted."""
    status = ServiceStatus(
        service=note.service,
        job_id=note.job_id,
        state="unknown",
        cluster=note.cluster,
        model=note.model,
        num_nodes=note.num_nodes,
        gpus_per_node=note.gpus_per_node,
        submitted_at=note.submitted_at,
        log_dir=str(Path(note.log_path).parent if note.log_path else store.log_dir(note.service)),
        batch_log=note.log_path,
        predicted=note.predicted,
    )
    if job is None:
        assert note.end is not None
        return replace(
            status,
            state=note.end.state,
            reason=note.end.reason,
            updated_at=note.end.at,
            exit_code=note.end.exit_code,
            last_log_lines=_log_words(status),
            end_reported_by_job=True,
        )
    status = _of_job_alone(status, job)
    if status.state == "starting" and job.run_time_s > RECORD_EXPECTED_WITHIN_S:
        return replace(status, reason=_nothing_written(job, store.home))
    return status


def of_job_by_hand(status: ServiceStatus, job: JobState, *, home: Path, other_home: Path | None) -> ServiceStatus:
    """A job that is known by its name in the queue alone: whether it serves cannot be seen without a record."""
    status = _of_job_alone(status, job)
    if status.state == "starting" and job.run_time_s > RECORD_EXPECTED_WITHIN_S:
        where = _nothing_written(job, home)
        if other_home is not None:
            where = f"its records are not in {home}: set HPC_SERVE_HOME={other_home}"
        return replace(status, state="unknown", stage="", reason=f"Slurm runs it, but {where}")
    return status


def _nothing_written(job: JobState, home: Path) -> str:
    return (
        f"there is no record of it in {home} after {job.run_time_s / 60:.0f} min: "
        "its script has not come so far, or it has another HPC_SERVE_HOME"
    )


def _of_job_alone(status: ServiceStatus, job: JobState) -> ServiceStatus:
    status = replace(status, scheduler_state=job.state, time_left=job.time_left if job.is_running else None)
    if job.is_pending:
        expected = f"; expected to start at {job.start_time}" if job.start_time else ""
        return replace(status, state="pending", reason=pending_sentence(job.reason) + expected)
    if job.is_over:
        return _ended(status, job)
    if job.state == UNKNOWN:
        return replace(status, reason=job.detail)
    if job.state == "COMPLETING":
        return _ending(status)
    stage = "its nodes are being prepared" if job.state == "CONFIGURING" else "its script has begun"
    return replace(status, state="starting", stage=stage)


def _answered(status: ServiceStatus, record: EndpointRecord, job: JobState | None, answer: Answer) -> ServiceStatus:
    if answer.verdict == "live":
        return replace(status, state="ready")
    if answer.verdict == "draining":
        return replace(status, state="draining")
    if job is not None and job.state == "COMPLETING":
        return _ending(status)
    if answer.verdict == "unhealthy":
        return replace(status, state="unresponsive", reason=f"the engine is not well: {answer.detail}")
    if answer.verdict in ("stranger", "other key"):
        return replace(status, state="unresponsive", reason=f"another program answers at {status.address}")
    reason = f"nobody answers at {status.address} from here ({answer.detail})"
    if job is not None and job.state == UNKNOWN:
        return replace(status, state="unknown", reason=f"{reason}, and {job.detail}")
    reason += f"; its record was last renewed {_age(record)} ago"
    return replace(status, state="unresponsive", reason=reason)


def _ending(status: ServiceStatus) -> ServiceStatus:
    return replace(status, state="draining", stage="stopping", progress=None, reason="Slurm ends its job (COMPLETING)")


def _ended(status: ServiceStatus, job: JobState) -> ServiceStatus:
    """A job that is over although no record says so: what the scheduler and the logs say about it."""
    status = replace(status, batch_log=status.batch_log or job.batch_log)
    return replace(
        status,
        state="stopped" if job.state == "CANCELLED" else "failed",
        stage="",
        progress=None,
        reason=ended_sentence(job),
        exit_code=job.exit_code,
        last_log_lines=status.last_log_lines or _log_words(status),
        updated_at=job.ended_at or status.updated_at,
    )


def _log_words(status: ServiceStatus) -> tuple[str, ...]:
    return tuple(line for path in status.log_files()[:2] for line in tail(path, _LAST_LINES))


def _is_fresh(record: EndpointRecord) -> bool:
    # Clocks differ between hosts: this only decides what is said, never whether a service is alive.
    return abs(time.time() - record.updated_at) < 2 * record.lease_s


def _age(record: EndpointRecord) -> str:
    return f"{max(0.0, time.time() - record.updated_at):.0f} s"
