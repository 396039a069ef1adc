"""Reads how services are: their records, their engines' answers, and the scheduler's knowledge of their jobs.

This decides who is asked, and when: an engine only where it may exist, Slurm as seldom as possible, and once more only
when an engine that should answer does not. client/replicas/status.py and job_status.py decide what the answers mean.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.replicas.probe import probe_records
from hpc_serve.client.replicas.status import (
    ProbeResult,
    ReplicaStatus,
    ServiceStatus,
    assess_replica,
    assess_submitted,
    not_found,
)
from hpc_serve.errors import HpcServeError, RendezvousError, ServiceNotFoundError
from hpc_serve.redact import redact, redact_lines
from hpc_serve.rendezvous.claims import read_wanted
from hpc_serve.rendezvous.fields import array_of, is_service_name
from hpc_serve.rendezvous.record import EndpointRecord, SubmittedJob, followers_of
from hpc_serve.rendezvous.store import JobEntry, ServiceRecords, ServiceStore
from hpc_serve.rendezvous.wanted import Wanted
from hpc_serve.submit.logs import files_of, known_secrets, tail
from hpc_serve.submit.request.bounds import chain_sentence
from hpc_serve.submit.slurm import scheduler
from hpc_serve.submit.slurm.scheduler import SchedulerView, local_job_state
from hpc_serve.submit.slurm.slurm import UNKNOWN, JobState
from hpc_serve.submit.status.job_status import (
    RECORD_EXPECTED_WITHIN_S,
    StatusReport,
    add_job_state,
    explain_missing_record,
)

JOB_NAME_PREFIX = "hpc-serve-"
_LAST_LINES = 10
_JUST_ASKED_S = 1.0
_RECENT_S = 24 * 3600.0


def read_status(store: ServiceStore, service: str | None = None, *, slurm: SchedulerView | None = None) -> StatusReport:
    """Return the replicas of a service of ours, or of all, oldest first. Raises StoreError, InvalidRequestError."""
    slurm = slurm or SchedulerView()
    found = [store.read(name) for name in (store.services() if service is None else [service])]
    slurm.note_old_ends({job_id: at for records in found for job_id, at in old_jobs(records).items()})
    replicas = [status for records in found for status in _of_service(store, records, slurm)]
    elsewhere = list(_by_hand(store, slurm, service, known={status.job_id for status in replicas}))
    replicas = list(_with_successors(replicas, [job for records in found for job in records.submitted]))
    problems = [problem for records in found for problem in records.problems]
    if slurm.problem and any(status.job.cluster == "slurm" and not status.is_over for status in replicas):
        problems.append(slurm.problem)
    wanted = {records.service: _wanted(store, records.service, problems) for records in found}
    secrets = functools.cache(lambda service: known_secrets(service, store, os.environ))
    with_logs = functools.partial(_with_logs, store, secrets)
    return StatusReport(
        replicas=tuple(sorted(map(with_logs, replicas), key=lambda status: status.began_or_ended_at)),
        elsewhere=tuple(map(with_logs, elsewhere)),
        problems=tuple(problems),
        wanted={name: one for name, one in wanted.items() if one is not None},
    )


def _wanted(store: ServiceStore, service: str, problems: list[str]) -> Wanted | None:
    """Return what is wanted of a service; `problems` gets why a file of it cannot be read."""
    try:
        return read_wanted(store, service)
    except HpcServeError as error:
        problems.append(str(error))
        return None


def read_any_status(store: ServiceStore, service: str | None, *, slurm: SchedulerView | None = None) -> StatusReport:
    """Return the replicas of one service, also of one that another user shares, or of all. Raises as `read_status`."""
    if store.owner is None or service is None:
        return read_status(store, service, slurm=slurm)
    seen = ServiceWatch(store, service).refresh(is_complete=True)  # Slurm and logs tell users of their own jobs alone
    return StatusReport(replicas=seen.replicas, problems=seen.problems)


def find_report(store: ServiceStore, name_or_id: str) -> StatusReport:
    """Return the report on a service, on a job or an array by its id, or on one replica of a job by its name.

    Raises ServiceNotFoundError.
    """
    report = read_any_status(store, name_or_id)
    if report.everywhere:
        return report
    report = read_status(store)
    here, elsewhere = (
        tuple(one for one in found if is_of_job(one, name_or_id)) for found in (report.replicas, report.elsewhere)
    )
    if here or elsewhere:
        return replace(report, replicas=here, elsewhere=elsewhere)
    raise not_found_error(store, name_or_id)


def find(store: ServiceStore, name_or_id: str) -> list[ReplicaStatus]:
    """Return what `find_report` finds, to be shown: oldest first, other homes included. Raises ServiceNotFoundError."""
    return list(find_report(store, name_or_id).everywhere)


def replicas_here(store: ServiceStore, report: StatusReport) -> list[ReplicaStatus]:
    """Return the replicas of the report that a command may change: replicas of this home, and ended ones.

    Raises ServiceNotFoundError, with the home to set, if all are jobs that live elsewhere.
    """
    found = [status for status in report.everywhere if status not in report.live_elsewhere]
    if not found:
        raise ServiceNotFoundError("\n".join(elsewhere_sentence(store, status) for status in report.live_elsewhere))
    return found


def elsewhere_sentence(store: ServiceStore, status: ReplicaStatus) -> str:
    """Say why nothing is done to a job without a record in this home, and what to do. Slurm is asked for its home."""
    home = _other_home(store, scheduler.job_state(status.job_id), status.service)
    setting = f"HPC_SERVE_HOME={home}" if home else "the HPC_SERVE_HOME that it was submitted with"
    return (
        f"{status.service} (job {status.name}) has no record in {store.home}, so nothing was done: set {setting}, "
        f"or end it without a drain: hpc-serve stop {status.name} --now"
    )


def not_found_error(store: ServiceStore, name_or_id: str) -> ServiceNotFoundError:
    """Return the error that lists the existing services."""
    report, home = read_status(store), str(store.home)
    names = dict.fromkeys(status.service for status in report.everywhere)
    others = [
        ServiceStatus(service=name, home=home, replicas=tuple(one for one in report.everywhere if one.service == name))
        for name in names
    ]
    missing = ServiceStatus(service=name_or_id, home=home, problems=report.problems)
    return ServiceNotFoundError(not_found(missing, others, wanted="service or job"))


def is_of_job(status: ReplicaStatus, job_id: str) -> bool:
    """Return whether a replica is that job's, or of one of the tasks of that array, or has that name (`123-2`)."""
    return job_id in (status.job_id, array_of(status.job_id), status.name)


def is_same_replica(one: ReplicaStatus, other: ReplicaStatus) -> bool:
    return (one.job_id, one.replica) == (other.job_id, other.replica)


def scheduled_job(entry: JobEntry, submitted: SubmittedJob | None, slurm: SchedulerView) -> JobState | None:
    """Return the scheduler's state of an entry's job; None if it adds nothing to the end in the entry."""
    if isinstance(entry, EndpointRecord) and entry.is_final:
        return _after_its_end(entry, slurm) if entry.cluster == "slurm" else None
    if isinstance(entry, SubmittedJob) and entry.end is not None:
        return slurm.queued(entry.job_id) if entry.cluster == "slurm" else None
    if entry.cluster == "slurm":
        job = slurm.state(entry.job_id, submitted_at=submitted.submitted_at if submitted else None)
        if isinstance(entry, EndpointRecord) and job.is_pending:  # it was requeued, or has begun since Slurm was asked
            return slurm.queued(entry.job_id, max_age_s=_JUST_ASKED_S) or job
        return job
    if submitted is not None and submitted.pid is not None:
        return local_job_state(submitted)
    return JobState(job_id=entry.job_id, state=UNKNOWN, detail="it was not started by `hpc-serve submit`")


def old_jobs(found: ServiceRecords) -> dict[str, float]:
    """Return the Slurm jobs that wrote nothing for a day and whose end is not known, each with the time it began.

    One question for each job of the last months would take minutes: SchedulerView.note_old_ends asks once for all.
    """
    before = time.time() - _RECENT_S
    records = [one for one in found.records if not one.is_final and one.updated_at < before]
    waiting = [job for job in found.awaiting_record() if job.submitted_at < before]
    begun = {record.job_id: record.started_at for record in records if record.cluster == "slurm"}
    return begun | {job.job_id: job.submitted_at for job in waiting if job.cluster == "slurm"}


def _of_service(store: ServiceStore, found: ServiceRecords, slurm: SchedulerView) -> Iterator[ReplicaStatus]:
    submitted = {job.job_id: job for job in found.submitted}
    records = _last_runs(found)
    jobs = {record.name: scheduled_job(record, submitted.get(record.job_id), slurm) for record in records}
    probes = _probe(store, found.service, [r for r in records if _may_answer(r, jobs[r.name])])
    # One answer that is missed says little of a replica that renews its record: a machine may stand still.
    renewed = [record for record in records if not record.is_overdue(time.time())]
    silent = [record for record in renewed if record.name in probes and probes[record.name].status == "no answer"]
    probes |= _probe(store, found.service, silent)
    unwell = [record.job_id for record in records if record.name in probes and not probes[record.name].is_well]
    if unwell:  # the job may have been told to stop since its record was read
        slurm.ask_again_for(unwell)
        records = _last_runs(store.read(found.service))
        jobs = {record.name: scheduled_job(record, submitted.get(record.job_id), slurm) for record in records}
    for record in records:
        status = assess_replica(
            record,
            submitted=submitted.get(record.job_id),
            probe=probes.get(record.name),
            wall_age_s=time.time() - record.updated_at,
        )
        yield add_job_state(status, jobs[record.name])
    for entry, replica in _without_record(found, records):
        status, job = assess_submitted(entry, replica), scheduled_job(entry, entry, slurm)
        status = add_job_state(status, job)
        yield explain_missing_record(status, job, home=store.home) if job is not None else status


def _with_successors(replicas: Sequence[ReplicaStatus], submitted: Sequence[SubmittedJob]) -> Iterator[ReplicaStatus]:
    """Add to each live replica the job that takes over from it."""
    states = {status.job_id: status.state for status in replicas if not status.is_over}
    for status in replicas:
        coming = [job_id for job_id in followers_of([status.job_id], submitted) if job_id in states]
        if coming and not status.is_over:
            sentence = chain_sentence([(job_id, states[job_id]) for job_id in coming])
            status = replace(status, successor=sentence, successor_job_id=coming[0])
        yield status


def _last_runs(found: ServiceRecords) -> list[EndpointRecord]:
    last_restart = {record.job_id: record.restart for record in found.records}  # the records are in order of time
    return [record for record in found.records if record.restart == last_restart[record.job_id]]


def _without_record(found: ServiceRecords, records: Sequence[EndpointRecord]) -> Iterator[tuple[SubmittedJob, int]]:
    """Return replicas of submitted jobs without a record in the last run, each as its job and its number."""
    waiting = found.without_record()
    published = {(record.job_id, record.replica) for record in records}
    begun = {record.job_id for record in records}
    for job in found.submitted:
        for replica in range(job.replicas_per_job):
            if job in waiting or (job.job_id in begun and (job.job_id, replica) not in published):
                yield job, replica


def _after_its_end(record: EndpointRecord, slurm: SchedulerView) -> JobState | None:
    """The job of a record that has ended: waiting or running again if it was requeued, else as Slurm saw it end."""
    queued = slurm.queued(record.job_id)
    if queued is None:
        ended_by_signal = record.state == "stopped" and time.time() - record.updated_at < _RECENT_S
        return slurm.end(record.job_id, since=record.started_at if ended_by_signal else None)
    if queued.is_pending:
        return queued
    job = scheduler.job_state(record.job_id)
    return job if job.is_running and job.restart > record.restart else None


def _may_answer(record: EndpointRecord, job: JobState | None) -> bool:
    return record.state == "ready" and not (job and (job.is_over or job.is_pending))


def _probe(store: ServiceStore, service: str, records: Sequence[EndpointRecord]) -> dict[str, ProbeResult]:
    if not records:
        return {}
    try:
        return probe_records(records, store.read_api_key(service))
    except RendezvousError as error:  # without its key no engine can prove that it is ours
        return {record.name: ProbeResult(status="no answer", detail=str(error)) for record in records}


def _by_hand(
    store: ServiceStore, slurm: SchedulerView, service: str | None, *, known: Collection[str]
) -> Iterator[ReplicaStatus]:
    """Jobs that a person gave to sbatch, by their name in the queue, while they have no record in this home."""
    for job in slurm.jobs():
        name = job.name.removeprefix(JOB_NAME_PREFIX)
        if not job.name.startswith(JOB_NAME_PREFIX) or not is_service_name(name):
            continue
        if service not in (None, name) or job.job_id in known or (job.is_over and store.is_forgotten(name, job.job_id)):
            continue
        if job.is_over:
            detail = slurm.state(job.job_id, submitted_at=job.submitted_at)  # exit code, and where its output is
            job = replace(detail, ended_at=job.ended_at) if detail.state == job.state else job
        elif job.run_time_s > RECORD_EXPECTED_WITHIN_S:
            job = replace(job, batch_log=slurm.batch_log(job.job_id))
        other_home = _other_home(store, job, name)
        if other_home is not None and job.is_over:
            continue
        named = SubmittedJob(
            service=name, model="", cluster="slurm", job_id=job.job_id, submitted_at=job.submitted_at or 0.0
        )
        status = ReplicaStatus(job=named, state="unknown", submitted_at=job.submitted_at, batch_log=job.batch_log)
        status = add_job_state(status, job)
        yield explain_missing_record(status, job, home=store.home, is_by_hand=True, other_home=other_home)


def _other_home(store: ServiceStore, job: JobState, service: str) -> Path | None:
    """Return another HPC_SERVE_HOME that `submit` handed the job over from, as far as the place of its output tells."""
    parts = Path(job.batch_log or "").parent.parts
    if parts[-3:] != ("services", service, "logs"):
        return None
    home = Path(*parts[:-3])
    return None if home.resolve() == store.home.resolve() else home


def _with_logs(store: ServiceStore, secrets_of: Callable[[str], Sequence[str]], status: ReplicaStatus) -> ReplicaStatus:
    """Return the same with its log folder and, where no record tells how it ended, with the last lines of its logs.

    `secrets_of` gives what must not be shown of a service, and is taken out of its words.
    """
    status = replace(status, log_dir=status.log_dir or str(store.log_dir(status.service)))
    ended_without_record = status.is_over and (status.record is None or not status.record.is_final)
    lines: Iterable[str] = status.last_log_lines
    if ended_without_record and not lines:
        lines = [line for path in files_of(status)[:2] for line in tail(path, _LAST_LINES)]
    if not lines and not status.reason:
        return status
    secrets = secrets_of(status.service)
    reason, lines = redact(status.reason, secrets), tuple(redact_lines(lines, secrets))
    return replace(status, reason=reason, last_log_lines=lines)
