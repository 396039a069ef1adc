"""Looks: reads what is written about services, asks the scheduler about their jobs and the engines whether they answer.

What the three answers mean together is status.py's to say. An engine is asked only where it may be there, Slurm as
seldom as can be, and again only when an engine that should answer does not.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_serve.client.probe import probe_records
from hpc_serve.client.views import Answer
from hpc_serve.errors import InvalidRequestError, RendezvousError
from hpc_serve.rendezvous.names import validate_service_name
from hpc_serve.rendezvous.record import EndpointRecord, SubmittedJob
from hpc_serve.rendezvous.store import ServiceRecords, ServiceStore
from hpc_serve.submit import scheduler
from hpc_serve.submit.local import local_job_state
from hpc_serve.submit.scheduler import SchedulerView
from hpc_serve.submit.slurm import UNKNOWN, JobState
from hpc_serve.submit.status import (
    RECORD_EXPECTED_WITHIN_S,
    ServiceStatus,
    StatusReport,
    of_job_by_hand,
    of_note,
    of_record,
)

JOB_NAME_PREFIX = "hpc-serve-"
_NEWS_S = 1.0
_RECENT_S = 24 * 3600.0


def look(store: ServiceStore, service: str | None = None, *, slurm: SchedulerView | None = None) -> StatusReport:
    """The state of one service, or of all, oldest first. Raises StoreError, InvalidRequestError."""
    slurm = slurm or SchedulerView()
    found = [store.read(name) for name in ([validate_service_name(service)] if service else store.services())]
    statuses = [status for records in found for status in _of_service(store, records, slurm)]
    statuses += _by_hand(store, slurm, service, seen={status.job_id for status in statuses})
    statuses.sort(key=lambda status: status.began_or_ended_at)
    problems = [problem for records in found for problem in records.problems]
    if slurm.problem and any(status.cluster == "slurm" and not status.is_over for status in statuses):
        problems.append(slurm.problem)
    return StatusReport(services=tuple(statuses), problems=tuple(problems))


def _of_service(store: ServiceStore, found: ServiceRecords, slurm: SchedulerView) -> Iterator[ServiceStatus]:
    notes = {note.job_id: note for note in found.submitted}
    records = _last_runs(found)
    jobs = {record.job_id: job_of(record, notes.get(record.job_id), slurm) for record in records}
    answers = _probe(store, found.service, [r for r in records if _may_answer(r, jobs[r.job_id])])
    unwell = [record.job_id for record in records if record.name in answers and not answers[record.name].is_well]
    if unwell:  # it may have been told to stop since its record was read: whoever knows is asked again
        slurm.ask_again_for(unwell)
        records = _last_runs(store.read(found.service))
        jobs = {record.job_id: job_of(record, notes.get(record.job_id), slurm) for record in records}
    for record in records:
        yield of_record(store, record, notes.get(record.job_id), jobs[record.job_id], answers.get(record.name))
    for note in found.without_record():
        yield of_note(store, note, job_of(note, note, slurm))


def _last_runs(found: ServiceRecords) -> list[EndpointRecord]:
    last_restart = {record.job_id: record.restart for record in found.records}  # the records are in order of time
    return [record for record in found.records if record.restart == last_restart[record.job_id]]


def job_of(entry: EndpointRecord | SubmittedJob, note: SubmittedJob | None, slurm: SchedulerView) -> JobState | None:
    """What the scheduler says of an entry's job; None where it adds nothing to an end that the entry itself tells."""
    if isinstance(entry, EndpointRecord) and entry.is_final:
        return _since_its_end(entry, slurm) if entry.cluster == "slurm" else None
    if isinstance(entry, SubmittedJob) and entry.end is not None:
        return slurm.queued(entry.job_id) if entry.cluster == "slurm" else None
    if entry.cluster == "slurm":
        job = slurm.state(entry.job_id, submitted_at=note.submitted_at if note else None)
        if isinstance(entry, EndpointRecord) and job.is_pending:  # it was requeued, or has begun since we asked
            return slurm.queued(entry.job_id, max_age_s=_NEWS_S) or job
        return job
    if note is not None and note.pid is not None:
        return local_job_state(note)
    return JobState(job_id=entry.job_id, state=UNKNOWN, detail="it was not started by `hpc-serve submit`")


def _since_its_end(record: EndpointRecord, slurm: SchedulerView) -> JobState | None:
    """The job of a record that has ended: if it was requeued and waits or runs again, else as Slurm saw it end."""
    queued = slurm.queued(record.job_id)
    if queued is None:
        is_told_by_signal = record.state == "stopped" and time.time() - record.updated_at < _RECENT_S
        return slurm.end(record.job_id, since=record.started_at if is_told_by_signal else None)
    if queued.is_pending:
        return queued
    job = scheduler.job_state(record.job_id)
    return job if job.is_running and job.restart > record.restart else None


def _may_answer(record: EndpointRecord, job: JobState | None) -> bool:
    return record.state == "ready" and not (job and (job.is_over or job.is_pending))


def _probe(store: ServiceStore, service: str, records: Sequence[EndpointRecord]) -> dict[str, Answer]:
    if not records:
        return {}
    try:
        return probe_records(records, store.read_api_key(service))
    except RendezvousError as error:  # without its key no engine can prove that it is ours
        return {record.name: Answer(verdict="silent", detail=str(error)) for record in records}


def _by_hand(
    store: ServiceStore, slurm: SchedulerView, service: str | None, *, seen: Collection[str]
) -> Iterator[ServiceStatus]:
    """Jobs that a person gave to sbatch, known by their name as long as nothing is written about them here."""
    for job in slurm.jobs():
        name = job.name.removeprefix(JOB_NAME_PREFIX)
        if not job.name.startswith(JOB_NAME_PREFIX) or service not in (None, name) or job.job_id in seen:
            continue
        try:
            log_dir = str(store.log_dir(name))
        except InvalidRequestError:  # no service has such a name
            continue
        if job.is_over:
            detail = slurm.state(job.job_id, submitted_at=job.submitted_at)  # exit code, and where its output is
            job = replace(detail, ended_at=job.ended_at) if detail.state == job.state else job
        elif job.run_time_s > RECORD_EXPECTED_WITHIN_S:
            job = replace(job, batch_log=slurm.batch_log(job.job_id))
        other_home = _home_of(job, name)
        if other_home is not None and other_home.resolve() == store.home.resolve():
            other_home = None
        if other_home is not None and job.is_over:
            continue
        status = ServiceStatus(
            service=name,
            job_id=job.job_id,
            state="unknown",
            submitted_at=job.submitted_at,
            log_dir=log_dir,
            batch_log=job.batch_log,
        )
        yield of_job_by_hand(status, job, home=store.home, other_home=other_home)


def _home_of(job: JobState, service: str) -> Path | None:
    """The HPC_SERVE_HOME that `submit` handed the job over from, where its output lies in the service's own folder."""
    parts = Path(job.batch_log or "").parent.parts
    return Path(*parts[:-3]) if parts[-3:] == ("services", service, "logs") else None
