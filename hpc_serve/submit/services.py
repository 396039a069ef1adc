"""The verbs: submit a service, wait for it, stop it, find it. No printing, no command line.

`submit` does everything that can fail before it claims a name, and leaves no claim behind if sbatch refuses. What has
become of a service is look.py's to find out; here it is acted upon.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpc_serve.errors import InvalidRequestError, ServiceFailedError, ServiceNotFoundError, WaitTimeoutError
from hpc_serve.plan import ServePlan
from hpc_serve.rendezvous.claims import claim, release
from hpc_serve.rendezvous.record import EndpointRecord, JobEnd, SubmittedJob
from hpc_serve.rendezvous.store import ABANDONED_AFTER_S, JobEntry, ServiceStore, default_home
from hpc_serve.submit import scheduler
from hpc_serve.submit.local import local_job_state, process_start_time, stop_local_job
from hpc_serve.submit.look import job_of, look
from hpc_serve.submit.planning import plan_service
from hpc_serve.submit.preflight import check_files, check_stand_in, make_log_dir
from hpc_serve.submit.render import devices_per_node, render_script
from hpc_serve.submit.request import ServeRequest
from hpc_serve.submit.scheduler import SchedulerView
from hpc_serve.submit.slurm import UNKNOWN
from hpc_serve.submit.slurm_messages import ended_sentence
from hpc_serve.submit.status import ServiceStatus

_RECORDS_S = 1.0
_SCHEDULER_S = 5.0  # a controller serves a whole site: it is asked less often than our own files
_RECORD_MAY_FOLLOW_S = 5.0  # a record's last state may reach us after the scheduler's, on a shared filesystem
_LOCAL_GRACE_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """A job that was handed over, and its plan. `others` are replicas of the same service that were not over then."""

    job: SubmittedJob
    plan: ServePlan
    others: tuple[ServiceStatus, ...] = ()


def submit(request: ServeRequest, *, environ: Mapping[str, str] = os.environ) -> Submission:
    """Check the request, claim its name, and hand its script to the scheduler.

    Raises HpcServeError of every kind; then nothing is submitted and the name is free.
    """
    store = ServiceStore(default_home(environ))
    request = dataclasses.replace(request, log_dir=request.log_dir or str(store.log_dir(request.service)))
    check_stand_in(request, environ)
    plan = plan_service(request, stand_in=environ.get("HPC_SERVE_MODEL"))
    script = render_script(request, plan)
    check_files(request, plan, environ)
    store.ensure_service(request.service)
    log_dir = make_log_dir(request)
    slurm = SchedulerView()
    is_over = _over_by_scheduler(store, request.service, slurm)
    store.sweep(request.service, is_over=is_over)
    claim(store, request.service, plan.model, is_over=is_over)
    try:
        others = tuple(one for one in look(store, request.service, slurm=slurm).services if not one.is_over)
        store.ensure_api_key(request.service)
        job = _hand_over(request, plan, script, log_dir, store.service_dir(request.service) / "scripts")
        try:
            store.write_submitted(job)
        except BaseException:
            _end(job)
            raise
    except BaseException:
        release(store, request.service, plan.model)
        raise
    return Submission(job=job, plan=plan, others=others)


def _hand_over(request: ServeRequest, plan: ServePlan, script: str, log_dir: Path, folder: Path) -> SubmittedJob:
    from hpc_serve.submit import executor  # submitit takes longer to import than all the rest

    if request.cluster == "local":
        done = executor.start_locally(script, folder, log_dir)
    else:
        done = executor.submit_to_slurm(script, folder)
    return SubmittedJob(
        service=request.service,
        model=plan.model,
        cluster=request.cluster,
        job_id=done.job_id,
        submitted_at=time.time(),
        script=str(done.script),
        log_path=str(log_dir / f"{done.job_id}.log"),
        user=scheduler.user_name(),
        num_nodes=plan.layout.num_nodes,
        gpus_per_node=devices_per_node(plan),
        pid=done.pid,
        pid_start_time=process_start_time(done.pid) if done.pid else None,
        host=socket.gethostname() if done.pid else None,
        predicted=_figures(plan),
    )


def wait(
    store: ServiceStore,
    service: str,
    *,
    job_id: str | None = None,
    timeout_s: float | None = None,
    on_change: Callable[[ServiceStatus], None] = lambda status: None,
) -> ServiceStatus:
    """Return once a replica of the service (or its job `job_id`) is ready; `on_change` hears of each new stage.

    Raises ServiceFailedError when every job of it has ended, WaitTimeoutError after `timeout_s` seconds,
    ServiceNotFoundError if there is none.
    """
    slurm = SchedulerView(max_age_s=_SCHEDULER_S)
    deadline = time.monotonic() + timeout_s if timeout_s is not None else None
    told: ServiceStatus | None = None
    silent_end_s: float | None = None
    while True:
        status = _foremost(look(store, service, slurm=slurm).services, job_id)
        if status is None:
            raise not_found(store, service)
        if told is None or _progress_key(status) != _progress_key(told):
            on_change(status)
            told = status
        if status.state == "ready":
            return status
        if status.is_over:
            silent_end_s = silent_end_s or time.monotonic()
            if (
                status.end_reported_by_job and _has_left(status)
            ) or time.monotonic() - silent_end_s > _RECORD_MAY_FOLLOW_S:
                raise ServiceFailedError(failure_report(_as_slurm_saw_it(store, status)))
        if deadline is not None and time.monotonic() >= deadline:
            raise WaitTimeoutError(
                f"{service} is not ready after {timeout_s:.0f} s, its job goes on: {status.sentence}. "
                f"Wait again with `hpc-serve wait {service}`, or end it with `hpc-serve stop {service}`."
            )
        time.sleep(_RECORDS_S)


def stop(store: ServiceStore, found: Sequence[ServiceStatus], *, timeout_s: float = 120.0) -> tuple[ServiceStatus, ...]:
    """End the jobs that `find` found, those that are over already apart, and return how they ended, once they have.

    The end of a job that had published nothing is written down, since clients do not ask Slurm, and Slurm forgets.
    Raises SchedulerError, InvalidRequestError for one that was started by hand, WaitTimeoutError.
    """
    live = [status for status in found if not status.is_over]
    services = dict.fromkeys(status.service for status in found)
    notes = {note.job_id: note for service in services for note in store.read_submitted(service)}
    for job_id in dict.fromkeys(status.job_id for status in live):
        note = notes.get(job_id)
        if note is not None and note.cluster == "local":
            stop_local_job(note, grace_s=_LOCAL_GRACE_S)
        elif next(status.cluster for status in live if status.job_id == job_id) == "local":
            raise InvalidRequestError(f"{job_id} was started by hand: end its script where it runs (Ctrl-C or kill).")
        else:
            scheduler.cancel(job_id)
    ended = tuple(_until_over(store, status, notes.get(status.job_id), timeout_s) for status in live)
    for status in (*(status for status in found if status.is_over), *ended):
        _write_down(store, status, notes.get(status.job_id))
    return ended


def find(store: ServiceStore, target: str) -> list[ServiceStatus]:
    """What there is of a service, or of a job by its id, oldest first. Raises ServiceNotFoundError."""
    found = look(store, target).services or [s for s in look(store).services if s.job_id == target]
    if not found:
        raise not_found(store, target)
    return list(found)


def not_found(store: ServiceStore, target: str) -> ServiceNotFoundError:
    """The error that lists what there is."""
    report = look(store)
    names = [status.service for status in report.services]
    known = f"There are: {', '.join(dict.fromkeys(names))}." if names else "Nothing is there yet."
    problems = "".join(f"\nNot trusted: {problem}" for problem in report.problems)
    return ServiceNotFoundError(f"There is no service or job {target!r} in {store.home}. {known}{problems}")


def failure_report(status: ServiceStatus) -> str:
    """How a replica ended, with its last log lines and where to read on."""
    words = "".join(f"\n    {line}" for line in status.last_log_lines[-10:])
    last = f"\nLast log lines:{words}" if words else ""
    logs = ", ".join(status.log_places)
    return f"{status.service} (job {status.job_id}) {status.sentence}{last}\nLogs: {logs}"


def _figures(plan: ServePlan) -> dict[str, float]:
    estimate = dataclasses.asdict(plan.memory).items()
    return {name: value for name, value in estimate if isinstance(value, (int, float)) and not isinstance(value, bool)}


def _end(job: SubmittedJob) -> None:
    if job.cluster == "local":
        stop_local_job(job, grace_s=_LOCAL_GRACE_S)
    else:
        scheduler.cancel(job.job_id)


def _over_by_scheduler(store: ServiceStore, service: str, slurm: SchedulerView) -> Callable[[JobEntry], bool]:
    """Whether what holds a service's name is over, by asking the scheduler."""
    notes = {note.job_id: note for note in store.read_submitted(service)}

    def is_over(holder: JobEntry) -> bool:
        job = job_of(holder, notes.get(holder.job_id), slurm)
        if job is not None and job.state == UNKNOWN and isinstance(holder, EndpointRecord):
            return time.time() - holder.updated_at > ABANDONED_AFTER_S
        return job is None or job.is_over

    return is_over


def _has_left(status: ServiceStatus) -> bool:
    """Whether a job with a reported end is really over: one that Slurm still clears away may be about to run again."""
    if status.cluster != "slurm":
        return True
    job = scheduler.job_state(status.job_id)
    return job.is_over or job.state == UNKNOWN


def _foremost(statuses: Sequence[ServiceStatus], job_id: str | None) -> ServiceStatus | None:
    """The one to wait for: one that is ready, else the latest that may become so, else the latest."""
    candidates = [status for status in statuses if job_id in (None, status.job_id)]
    ready = [status for status in candidates if status.state == "ready"]
    coming = [status for status in candidates if not status.is_over]
    best = ready or coming or candidates
    return best[-1] if best else None


def _progress_key(status: ServiceStatus) -> tuple[object, ...]:
    return (status.job_id, status.restart, status.state, status.stage, status.progress, status.reason)


def _until_over(
    store: ServiceStore, status: ServiceStatus, note: SubmittedJob | None, timeout_s: float
) -> ServiceStatus:
    deadline = time.monotonic() + timeout_s
    while True:
        is_local = note is not None and note.cluster == "local"
        job = local_job_state(note) if is_local and note else scheduler.job_state(status.job_id)
        seen = [found for found in look(store, status.service).services if _same(found, status)]
        status = seen[0] if seen else status
        if job.is_over and not seen:  # submitted by hand, and it had not begun
            return dataclasses.replace(status, state="stopped", reason=ended_sentence(job))
        if job.is_over and status.is_over:
            return status
        if time.monotonic() >= deadline:
            detail = f" ({job.detail})" if job.detail else ""
            raise WaitTimeoutError(
                f"job {status.job_id} was told to end {timeout_s:.0f} s ago and is still {job.state}{detail}; "
                f"look with `squeue --jobs={status.job_id}`."
            )
        time.sleep(_RECORDS_S)


def _write_down(store: ServiceStore, status: ServiceStatus, note: SubmittedJob | None) -> None:
    if note is None or note.end is not None or status.started_at is not None:
        return
    end = JobEnd(
        state="failed" if status.state == "failed" else "stopped",
        reason=status.reason,
        at=status.updated_at or time.time(),
        exit_code=status.exit_code,
    )
    store.write_submitted(dataclasses.replace(note, end=end))


def _as_slurm_saw_it(store: ServiceStore, status: ServiceStatus) -> ServiceStatus:
    """The same end, once Slurm has cleared the job away and can tell what brought it about."""
    now = look(store, status.service).services
    return next((one for one in now if _same(one, status) and one.is_over), status)


def _same(one: ServiceStatus, other: ServiceStatus) -> bool:
    return (one.job_id, one.replica) == (other.job_id, other.replica)
