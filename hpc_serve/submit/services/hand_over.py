"""Hands the script of a job to sbatch, or to this machine, and writes down which jobs came of it; or hands over one
that was submitted before.

A step that fails ends the jobs that were handed over before it: each step notes in `undo` how it is taken back. What
is in the script is decided in `services`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpc_serve.errors import InvalidRequestError, SubmissionRefusedError
from hpc_serve.rendezvous.claims import claim, release
from hpc_serve.rendezvous.entries import JobEntry
from hpc_serve.rendezvous.files import make_private_folder, read_private
from hpc_serve.rendezvous.record import EndpointRecord, SubmittedJob
from hpc_serve.rendezvous.store import ABANDONED_AFTER_S, ServiceStore
from hpc_serve.submit.services.stop import end_job
from hpc_serve.submit.slurm.local import process_start_time
from hpc_serve.submit.slurm.scheduler import SchedulerView
from hpc_serve.submit.slurm.slurm import UNKNOWN, after_start_option, array_options, batch_log_option
from hpc_serve.submit.status.status_reader import old_jobs, scheduled_job


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobScript:
    """What is handed over: the text of a script, and the job that it is, as far as it is known before it has an id.

    The script is kept in `folder`, its log goes to `log_dir`. `undo` takes back what was done.
    """

    text: str
    job: SubmittedJob
    folder: Path
    log_dir: Path
    undo: contextlib.ExitStack

    def as_submitted(self, job_id: str, file: Path) -> SubmittedJob:
        """Return the job with its id and its files."""
        log_path = str(self.log_dir / f"{job_id}.log")
        return dataclasses.replace(
            self.job, job_id=job_id, submitted_at=time.time(), script=str(file), log_path=log_path, end=None
        )


def start_locally(store: ServiceStore, script: JobScript) -> tuple[SubmittedJob, ...]:
    """Run the script on this machine, and return the job."""
    from hpc_serve.submit.slurm import executor

    pid, file = executor.start_locally(script.text, script.folder, script.log_dir)
    job = script.as_submitted(f"local-{pid}", file)
    job = dataclasses.replace(job, pid=pid, pid_start_time=process_start_time(pid), host=socket.gethostname())
    script.undo.callback(end_job, job.job_id, job)
    store.write_submitted(job)
    return (job,)


def submit_to_slurm(
    store: ServiceStore, script: JobScript, *, count: int, anew: bool = False, options: Sequence[str] = ()
) -> tuple[SubmittedJob, ...]:
    """Hand the script to sbatch, once for `count` jobs, and return the jobs.

    A script that is submitted `anew` may have the array of an earlier submission, or none: sbatch is told another.
    `options` are further words for sbatch. Raises SubmissionRefusedError where Slurm will never start the jobs; they
    are cancelled and not shown.
    """
    from hpc_serve.submit.slurm import executor

    if anew:
        options = [*options, *array_options(count), batch_log_option(script.log_dir, is_array=True)]
        script = dataclasses.replace(script, job=dataclasses.replace(script.job, time_limit_s=0.0))
    own_id, file = executor.submit_to_slurm(script.text, script.folder, options)
    is_array = anew or count > 1
    job_ids = [f"{own_id}_{task}" for task in range(count)] if is_array else [own_id]
    jobs = tuple(script.as_submitted(job_id, file) for job_id in job_ids)
    script.undo.callback(end_job, own_id, jobs[0])
    if why := executor.why_it_never_starts(own_id):
        file.unlink(missing_ok=True)
        store.forget(script.job.service, {own_id, *job_ids})
        raise SubmissionRefusedError(f"Slurm would never start the job, so it was cancelled: {why}")
    for job in jobs:
        store.write_submitted(job)
    return jobs


def submit_chains(
    store: ServiceStore, script: JobScript, *, length: int, after_min: int, count: int
) -> tuple[SubmittedJob, ...]:
    """Submit `count` chains of `length` jobs ahead, and return all jobs, chain after chain.

    Each may begin so many minutes after the start of the one before.
    """
    jobs: list[SubmittedJob] = []
    for _ in range(count):
        before = ""
        for _ in range(length):
            one = dataclasses.replace(script, job=dataclasses.replace(script.job, predecessor=before))
            options = [after_start_option(before, after_min)] if before else []
            jobs += submit_to_slurm(store, one, count=1, options=options)
            before = jobs[-1].job_id
    return tuple(jobs)


def add_jobs(
    store: ServiceStore, service: str, count: int, *, predecessor: str = "", machine: str = ""
) -> tuple[SubmittedJob, ...]:
    """Submit `count` more jobs of a service, with the script and the log folder of the last job, or of `predecessor`.

    With a `machine` it is the last job for that kind of machine. They take over from `predecessor`, if there is one.
    Raises HpcServeError of every kind; InvalidRequestError if there is no script of `submit`.
    """
    submitted = [job for job in store.read_submitted(service) if job.cluster == "slurm"]
    ours = [job for job in submitted if machine in ("", job.machine)]
    ours = [job for job in ours if job.job_id == predecessor] or ours
    last = max(ours, key=lambda job: job.submitted_at, default=None)
    if last is None or not last.script or not Path(last.script).exists():
        raise InvalidRequestError(
            f"There is no script of `hpc-serve submit` for {service} to submit again: it was started by hand, "
            "on this machine alone, or its files are gone. Start replicas as you started the first."
        )
    with claimed(store, service, last.model) as (folder, undo):
        text, log_dir = read_private(Path(last.script)), Path(str(last.log_path)).parent
        job = dataclasses.replace(last, predecessor=predecessor)
        script = JobScript(text=text, job=job, folder=folder, log_dir=log_dir, undo=undo)
        return submit_to_slurm(store, script, count=count, anew=True)


@contextlib.contextmanager
def claimed(store: ServiceStore, service: str, model: str) -> Iterator[tuple[Path, contextlib.ExitStack]]:
    """Hold the service's name for this model; if what is done under it fails, the name is free as before.

    Yields the folder of its scripts, and what is called if it fails.
    """
    slurm = SchedulerView()
    slurm.note_old_ends(old_jobs(store.read(service)))
    is_over = functools.partial(_is_over, store=store, slurm=slurm)
    store.sweep(service, is_over=is_over)
    with contextlib.ExitStack() as undo:
        claim(store, service, model, is_over=is_over)
        undo.callback(release, store, service, model)
        store.ensure_api_key(service)
        yield make_private_folder(store.service_dir(service) / "scripts"), undo
        undo.pop_all()


def _is_over(entry: JobEntry, *, store: ServiceStore, slurm: SchedulerView) -> bool:
    """Whether the job that holds a service's name is over, by asking the scheduler."""
    submitted = {job.job_id: job for job in store.read_submitted(entry.service)}
    job = scheduled_job(entry, submitted.get(entry.job_id), slurm)
    if job is not None and job.state == UNKNOWN and isinstance(entry, EndpointRecord):
        return time.time() - entry.updated_at > ABANDONED_AFTER_S
    return job is None or job.is_over
