"""Does what reconcile.py decides: claims it in the service's file, then asks jobs to drain, ends them, submits others.

A decision counts only for the file that it was made for: one from an older look changes nothing. A program that submits
says so in the file first, so that no other submits the same meanwhile.

A submission hands the script of a job to sbatch, or to this machine, and writes down which jobs came of it. Further
jobs of a service have the script that was handed over before. Each step notes in `undo` how it is taken back; a step
that fails ends the jobs that were handed over before it. `services` decides what is in the script.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_serve.errors import (
    HpcServeError,
    InvalidRequestError,
    SchedulerUnavailableError,
    StoreError,
    SubmissionRefusedError,
)
from hpc_serve.rendezvous.claims import change_wanted, claim, read_wanted, release
from hpc_serve.rendezvous.files import make_private_folder, read_private
from hpc_serve.rendezvous.record import EndpointRecord, SubmittedJob
from hpc_serve.rendezvous.store import (
    ABANDONED_AFTER_S,
    DrainCause,
    DrainRequest,
    JobEntry,
    ServiceStore,
    ask_to_drain,
    drain_file,
    process_start_time,
)
from hpc_serve.rendezvous.wanted import SUBMITTING_S, Decision, Wanted
from hpc_serve.submit.services.jobs import WhatIs, Windows
from hpc_serve.submit.services.reconcile import after, failed, noted, reconcile
from hpc_serve.submit.services.stop import end_job
from hpc_serve.submit.services.what_is import Looker
from hpc_serve.submit.slurm import scheduler
from hpc_serve.submit.slurm.scheduler import SchedulerView
from hpc_serve.submit.slurm.slurm import UNKNOWN, after_start_option, array_options, batch_log_option
from hpc_serve.submit.status.status_reader import old_jobs, scheduled_job

_log = logging.getLogger("hpc_serve.reconciler")

# -- scripts that are handed over


@dataclass(frozen=True, kw_only=True)
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
        return replace(self.job, job_id=job_id, submitted_at=time.time(), script=str(file), log_path=log_path, end=None)


def start_locally(store: ServiceStore, script: JobScript) -> tuple[SubmittedJob, ...]:
    """Run the script on this machine, and return the job."""
    from hpc_serve.submit.slurm import executor

    pid, file = executor.start_locally(script.text, script.folder, script.log_dir)
    job = script.as_submitted(f"local-{pid}", file)
    job = replace(job, pid=pid, pid_start_time=process_start_time(pid), host=socket.gethostname())
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
        script = replace(script, job=replace(script.job, time_limit_s=0.0))
    with executor.until_answered():
        own_id, file = executor.submit_to_slurm(script.text, script.folder, options)
        is_array = anew or count > 1
        job_ids = [f"{own_id}_{task}" for task in range(count)] if is_array else [own_id]
        jobs = tuple(script.as_submitted(job_id, file) for job_id in job_ids)
        script.undo.callback(end_job, own_id, jobs[0])
    for job in jobs:
        store.write_submitted(job)
    if why := executor.why_it_never_starts(own_id):
        file.unlink(missing_ok=True)
        store.forget(script.job.service, {own_id, *job_ids})
        raise SubmissionRefusedError(f"Slurm would never start the job, so it was cancelled: {why}")
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
            one = replace(script, job=replace(script.job, predecessor=before))
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
        why = "it was started by hand, on this machine alone, or its files are gone."
        why = " ".join(store.read(service).problems) or why
        raise InvalidRequestError(
            f"There is no script of `hpc-serve submit` for {service} to submit again: {why} Start replicas as you "
            "started the first."
        )
    with claimed(store, service, last.model) as (folder, undo):
        text, log_dir = read_private(Path(last.script)), Path(str(last.log_path)).parent
        job = replace(last, predecessor=predecessor)
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


# -- decisions

_DRAIN_S = 600.0
_WAY_DOWN_S = 20.0  # from the last answer to the end of a job
_STEP_S = 0.3
_RENEW_S = 10.0
_MOST_TRIES = 30
_DRAIN_CAUSES: dict[str, DrainCause] = {"handover": "handover", "person": "stop"}


@dataclass(frozen=True, kw_only=True)
class Done:
    """What was decided and done: jobs that were `added`, jobs that were asked to drain or told to end."""

    decisions: tuple[Decision, ...] = ()
    added: tuple[SubmittedJob, ...] = ()
    ended: tuple[str, ...] = ()

    def __add__(self, other: Done) -> Done:
        return Done(
            decisions=self.decisions + other.decisions, added=self.added + other.added, ended=self.ended + other.ended
        )


def step(
    looker: Looker, seen: Wanted, *, windows: Windows, drain_s: float = _DRAIN_S, decider: str = ""
) -> tuple[Wanted | None, Done]:
    """Look once, decide, and do it. Returns what is wanted then; None if somebody changed it since it was `seen`.

    Raises HpcServeError; what was not done is decided again at the next look.
    """
    store, service, what_is, now = looker.store, looker.service, looker.look(), time.time()
    known = noted(seen, what_is, now)
    decisions = reconcile(known, what_is, now, windows)
    told = tuple(one for one in decisions if one.action != "wait")
    most_running = max(known.most_running, looker.history.most_running if looker.history is not None else 0)
    changed = replace(after(known, decisions, now), most_running=most_running, looked_at=now)
    if not told and replace(changed, looked_at=seen.looked_at) == seen and 0 <= now - seen.looked_at < _RENEW_S:
        return seen, Done()

    def change(found: Wanted | None) -> Wanted | None:
        if found is None or found.counter != seen.counter or (decider and found.decider != decider):
            return None
        for one in told:
            if one.action == "drain":
                _let_drain(store, what_is, one, drain_s, now)
        return changed

    claimed = change_wanted(store, service, change)
    if claimed is None:
        return None, Done()
    ended = [job_id for one in told if one.action in ("drain", "end") for job_id in one.jobs]
    added: list[SubmittedJob] = []
    for one in sorted(told, key=lambda one: one.action == "submit"):  # last, since sbatch may refuse
        _log.info("%s", one.sentence)
        if one.action == "count" and looker.history is not None:
            looker.history.begin_anew(looker.clock())
        elif one.action == "end":
            for job_id in one.jobs:
                scheduler.cancel(job_id)
        elif one.action == "submit":
            claimed, jobs = _submit_for(store, service, claimed, one)
            added += jobs
            looker.slurm.jobs(max_age_s=0.0)  # an older list lacks them
    return claimed, Done(decisions=told, added=tuple(added), ended=tuple(ended))


def settle(store: ServiceStore, service: str, *, drain_s: float = _DRAIN_S) -> Done:
    """Do all that is to be done now for what is wanted, in turns with other programs that do the same.

    If the jobs of one kind of machine are refused, those of the other kinds are submitted, and the error names them.
    Raises HpcServeError; SchedulerUnavailableError where Slurm does not answer.
    """
    done, refused = Done(), list[HpcServeError]()
    for _ in range(_MOST_TRIES):
        seen, looker = wait_for_others(store, service), Looker(store=store, service=service)
        if seen is None:
            return done
        try:
            changed, more = step(looker, seen, windows=Windows(), drain_s=drain_s)
        except HpcServeError as error:
            refused.append(error)
            if len(refused) < len(seen.machines):
                continue
            changed, more = seen, Done()
        done += more
        if changed is not None and not more.decisions:
            if refused:
                jobs = ", ".join(f"{job.job_id} ({job.machine})" for job in done.added)
                raise type(refused[0])(f"{refused[0]} Submitted all the same: job {jobs}.") if jobs else refused[0]
            if looker.slurm.problem:
                raise SchedulerUnavailableError(looker.slurm.problem)
            return done
    raise StoreError(f"{service} was changed {_MOST_TRIES} times meanwhile. Try again.")


def wait_for_others(store: ServiceStore, service: str) -> Wanted | None:
    """Return what is wanted once no other program submits jobs of the service. Raises StoreError."""
    deadline, is_told = time.monotonic() + SUBMITTING_S, False
    while True:
        found = read_wanted(store, service)
        if found is None or not found.is_submitting(time.time()) or time.monotonic() >= deadline:
            return found
        if not is_told:
            left_s = found.submitting_at + SUBMITTING_S - time.time()
            _log.warning("%s: waiting for another command that submits it, %.0f s at most ...", service, left_s)
        is_told = True
        time.sleep(_STEP_S)


def _submit_for(
    store: ServiceStore, service: str, claimed: Wanted, decision: Decision
) -> tuple[Wanted, tuple[SubmittedJob, ...]]:
    """Submit what was claimed, and write down which jobs it is. Raises HpcServeError, which is written down as well."""
    per_job = claimed.replicas_per_job
    count = -(-decision.count // per_job)
    before = decision.jobs if decision.cause == "handover" else ()
    added: list[SubmittedJob] = []
    where = decision.machine
    try:
        with _as_submitted(claimed):
            for job_id in before:
                added += add_jobs(store, service, 1, predecessor=job_id, machine=where)
            if count > len(before):
                added += add_jobs(store, service, count - len(before), machine=where)
    except HpcServeError as error:
        problem = f"{'one' if decision.count == 1 else decision.count} could not be added: {error}"
        end_submission(store, service, claimed, added, lambda found: failed(found, problem, time.time(), where))
        raise
    except KeyboardInterrupt:
        end_submission(store, service, claimed, added)
        raise
    return end_submission(store, service, claimed, added) or claimed, tuple(added)


def end_submission(
    store: ServiceStore,
    service: str,
    claimed: Wanted,
    added: Sequence[SubmittedJob],
    change: Callable[[Wanted], Wanted] = lambda found: found,
) -> Wanted | None:
    """Write down the jobs that came of a claim, and take it back. Raises StoreError."""
    ids = tuple(job.job_id for job in added)

    def end(found: Wanted | None) -> Wanted | None:
        if found is None:
            return None
        is_mine = (found.submitting, found.submitting_at) == (claimed.submitting, claimed.submitting_at)
        return change(replace(found, submitting=0 if is_mine else found.submitting, coming=(*found.coming, *ids)))

    return change_wanted(store, service, end)


def _let_drain(store: ServiceStore, what_is: WhatIs, decision: Decision, drain_s: float, now: float) -> None:
    cause = _DRAIN_CAUSES.get(decision.cause, "surplus")
    for job in (job for job in what_is.jobs if job.job_id in decision.jobs):
        left_s = max(1.0, job.ends_at - now - _WAY_DOWN_S) if job.ends_at is not None else drain_s
        deadline_s = left_s if decision.cause == "handover" else min(drain_s, left_s)
        request = DrainRequest(by=f"hpc-serve: {decision.why}", cause=cause, deadline_s=deadline_s, requested_at=now)
        for record in (status.record for status in job.live):
            if record is not None:
                ask_to_drain(drain_file(store, record.service, record.name), request)


@contextlib.contextmanager
def _as_submitted(wanted: Wanted) -> Iterator[None]:
    """Be in the folder, and have the variables, with which the service was submitted: sbatch hands both on.

    A job's own program has both already.
    """
    if "SLURM_JOB_ID" in os.environ:
        yield
        return
    folder, before = Path.cwd(), dict(os.environ)
    os.environ.update(wanted.variables)
    try:
        if wanted.folder:
            with contextlib.suppress(OSError):
                os.chdir(wanted.folder)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.chdir(folder)
