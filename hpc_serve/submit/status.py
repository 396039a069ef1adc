"""What has become of each service: its records and notes, joined with what the scheduler and the engine say now.

A record is believed for what only it knows (stage, last words). Whether a job exists is the scheduler's to say, whether
the engine answers is found out by asking it; where neither answers, the state is unknown.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hpc_serve.client.liveness import probe_records
from hpc_serve.client.views import Answer
from hpc_serve.errors import InvalidRequestError, RendezvousError
from hpc_serve.rendezvous.names import validate_service_name
from hpc_serve.rendezvous.record import EndpointRecord, NodeRecord, Progress, SubmittedJob
from hpc_serve.rendezvous.store import ServiceRecords, ServiceStore
from hpc_serve.submit import scheduler
from hpc_serve.submit.local import local_job_state
from hpc_serve.submit.logs import log_files, tail
from hpc_serve.submit.scheduler import SchedulerView
from hpc_serve.submit.sentences import ended_sentence, pending_sentence
from hpc_serve.submit.slurm import UNKNOWN, JobState

State = Literal["pending", "starting", "ready", "unresponsive", "draining", "stopped", "failed", "unknown"]
JOB_NAME_PREFIX = "hpc-serve-"
_LAST_LINES = 10
_NEWS_S = 1.0


@dataclass(frozen=True, kw_only=True)
class ServiceStatus:
    """One replica of a service, or its job while there is none yet.

    `reason` is a sentence for people; `has_last_word` says that the job itself told how it ended. `address` is the host
    and port that answered, or that the record names. Times are seconds since the epoch; `measured` and `predicted` hold
    figures in bytes, seconds and tokens.
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
    last_words: tuple[str, ...] = ()
    has_last_word: bool = False
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
    def moment_s(self) -> float:
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

    def log_files(self) -> list[Path]:
        """The job's logs that exist now."""
        return log_files(self.job_id, Path(self.log_dir), Path(self.batch_log) if self.batch_log else None)


@dataclass(frozen=True, kw_only=True)
class StatusReport:
    """All that was found. `problems` are files that were not trusted, and a scheduler that did not answer."""

    services: tuple[ServiceStatus, ...]
    problems: tuple[str, ...] = ()


def look(store: ServiceStore, service: str | None = None, *, slurm: SchedulerView | None = None) -> StatusReport:
    """The state of one service, or of all, oldest first. Raises StoreError, InvalidRequestError."""
    slurm = slurm or SchedulerView()
    found = [store.read(name) for name in ([validate_service_name(service)] if service else store.services())]
    statuses = [status for records in found for status in _of_service(store, records, slurm)]
    statuses.sort(key=lambda status: status.moment_s)
    seen = {status.job_id for status in statuses}
    statuses += [status for status in _by_hand(store, slurm, service) if status.job_id not in seen]
    problems = [problem for records in found for problem in records.problems]
    if slurm.problem and any(status.cluster == "slurm" and not status.is_over for status in statuses):
        problems.append(slurm.problem)
    return StatusReport(services=tuple(statuses), problems=tuple(problems))


def _of_service(store: ServiceStore, found: ServiceRecords, slurm: SchedulerView) -> Iterator[ServiceStatus]:
    notes = {note.job_id: note for note in found.submitted}
    last_restart = {record.job_id: record.restart for record in found.records}  # the records are in order of time
    records = [record for record in found.records if record.restart == last_restart[record.job_id]]
    jobs = {record.job_id: job_of(record, notes.get(record.job_id), slurm) for record in records}
    answers = _probe(store, found.service, [r for r in records if _may_answer(r, jobs[r.job_id])])
    for record in records:
        note = notes.get(record.job_id)
        yield _of_record(store, record, note, jobs[record.job_id], answers.get(record.name))
    for note in found.without_record():
        yield _of_note(store, note, job_of(note, note, slurm))


def job_of(entry: EndpointRecord | SubmittedJob, note: SubmittedJob | None, slurm: SchedulerView) -> JobState | None:
    """What the scheduler says of an entry's job; None where the entry itself says how it ended."""
    if isinstance(entry, EndpointRecord) and entry.is_final:
        return _next_run(entry, slurm) if entry.cluster == "slurm" else None
    if entry.cluster == "slurm":
        job = slurm.state(entry.job_id, submitted_at=note.submitted_at if note else None)
        if isinstance(entry, EndpointRecord) and job.is_pending:  # it was requeued, or has begun since we asked
            return slurm.queued(entry.job_id, max_age_s=_NEWS_S) or job
        return job
    if note is not None and note.pid is not None:
        return local_job_state(note)
    return JobState(job_id=entry.job_id, state=UNKNOWN, detail="it was not started by `hpc-serve submit`")


def _next_run(record: EndpointRecord, slurm: SchedulerView) -> JobState | None:
    """The job of a record that has ended, if it was requeued and waits or runs again."""
    queued = slurm.queued(record.job_id)
    if queued is None or queued.is_pending:
        return queued
    job = scheduler.job_state(record.job_id)
    return job if job.is_running and job.restart > record.restart else None


def _may_answer(record: EndpointRecord, job: JobState | None) -> bool:
    return record.state in ("ready", "draining") and not (job and (job.is_over or job.is_pending))


def _probe(store: ServiceStore, service: str, records: Sequence[EndpointRecord]) -> dict[str, Answer]:
    if not records:
        return {}
    try:
        return probe_records(records, store.read_api_key(service))
    except RendezvousError as error:  # without its key no engine can prove that it is ours
        return {record.name: Answer(verdict="silent", detail=str(error)) for record in records}


def _of_record(
    store: ServiceStore, record: EndpointRecord, note: SubmittedJob | None, job: JobState | None, answer: Answer | None
) -> ServiceStatus:
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
        last_words=record.last_words,
        log_dir=log_dir,
        batch_log=note.log_path if note else None,
        scheduler_state=job.state if job else "",
        time_left=job.time_left if job and job.is_running else None,
        measured=record.measured,
        predicted=record.predicted or (note.predicted if note else {}),
    )
    if job is not None and (record.is_final or job.is_pending):  # it was requeued, and has said nothing since
        return _of_job_alone(_of_no_run(status, restart=max(job.restart, record.restart)), job)
    if record.state in ("stopped", "failed"):
        return replace(status, state=record.state, has_last_word=True)
    if job is not None and job.is_over:
        return _ended(status, job)
    if answer is not None:
        return _answered(status, record, job, answer)
    if job is not None and job.state == UNKNOWN and not _is_fresh(record):
        return replace(status, reason=job.detail)
    reason = "" if _is_fresh(record) else f"its record was last renewed {_age(record)} ago"
    return replace(status, state="starting", reason=reason)


def _of_no_run(status: ServiceStatus, *, restart: int) -> ServiceStatus:
    """What remains true of a replica when its job begins anew."""
    kept = ("service", "job_id", "state", "cluster", "model", "num_nodes", "gpus_per_node", "submitted_at", "log_dir")
    values = {name: getattr(status, name) for name in (*kept, "batch_log", "predicted")}
    return ServiceStatus(**values, restart=restart)


def _of_note(store: ServiceStore, note: SubmittedJob, job: JobState | None) -> ServiceStatus:
    assert job is not None
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
    return _of_job_alone(status, job)


def _by_hand(store: ServiceStore, slurm: SchedulerView, service: str | None) -> Iterator[ServiceStatus]:
    """Jobs in the queue that a person gave to sbatch, known by their name until they publish a record."""
    for job in slurm.queue():
        name = job.name.removeprefix(JOB_NAME_PREFIX)
        if not job.name.startswith(JOB_NAME_PREFIX) or service not in (None, name):
            continue
        try:
            log_dir = str(store.log_dir(name))
        except InvalidRequestError:  # no service has such a name
            continue
        yield _of_job_alone(ServiceStatus(service=name, job_id=job.job_id, state="unknown", log_dir=log_dir), job)


def _of_job_alone(status: ServiceStatus, job: JobState) -> ServiceStatus:
    status = replace(status, scheduler_state=job.state, time_left=job.time_left if job.is_running else None)
    if job.is_pending:
        expected = f"; expected to start at {job.start_time}" if job.start_time else ""
        return replace(status, state="pending", reason=pending_sentence(job.reason) + expected)
    if job.is_over:
        return _ended(status, job)
    if job.state == UNKNOWN:
        return replace(status, reason=job.detail)
    stage = "its nodes are being prepared" if job.state == "CONFIGURING" else "its script has begun"
    return replace(status, state="starting", stage=stage)


def _answered(status: ServiceStatus, record: EndpointRecord, job: JobState | None, answer: Answer) -> ServiceStatus:
    if answer.verdict == "live":
        return replace(status, state="draining" if record.state == "draining" else "ready")
    if answer.verdict == "draining":
        return replace(status, state="draining")
    if answer.verdict == "unhealthy":
        return replace(status, state="unresponsive", reason=f"the engine is not well: {answer.detail}")
    if answer.verdict in ("stranger", "other key"):
        return replace(status, state="unresponsive", reason=f"another program answers at {status.address}")
    reason = f"nobody answers at {status.address} from here ({answer.detail})"
    if job is not None and job.state == UNKNOWN:
        return replace(status, state="unknown", reason=f"{reason}, and {job.detail}")
    reason += f"; its record was last renewed {_age(record)} ago"
    return replace(status, state="unresponsive", reason=reason)


def _ended(status: ServiceStatus, job: JobState) -> ServiceStatus:
    """A job that is over although no record says so: what the scheduler and the logs say about it."""
    words = status.last_words or tuple(line for path in status.log_files()[:2] for line in tail(path, _LAST_LINES))
    return replace(
        status,
        state="stopped" if job.state == "CANCELLED" else "failed",
        stage="",
        progress=None,
        reason=ended_sentence(job),
        exit_code=job.exit_code,
        last_words=words,
        batch_log=status.batch_log or job.batch_log,
    )


def _is_fresh(record: EndpointRecord) -> bool:
    # Clocks differ between hosts: this only decides what is said, never whether a service is alive.
    return abs(time.time() - record.updated_at) < 2 * record.lease_s


def _age(record: EndpointRecord) -> str:
    return f"{max(0.0, time.time() - record.updated_at):.0f} s"
