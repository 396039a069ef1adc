"""Submits a service: plans it, renders its script, claims its name, and hands the script to the scheduler; and submits
further replicas of one.

`submit` does everything that can fail before it claims a name, and leaves no claim behind if sbatch refuses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import HpcServeError, InvalidRequestError, SubmissionRefusedError
from hpc_serve.plan import ServePlan
from hpc_serve.rendezvous.claims import claim, release
from hpc_serve.rendezvous.elastic import Elastic
from hpc_serve.rendezvous.files import make_log_dir, make_private_folder, read_private
from hpc_serve.rendezvous.names import log_dir_before_job
from hpc_serve.rendezvous.record import EndpointRecord, SubmittedJob
from hpc_serve.rendezvous.store import ABANDONED_AFTER_S, JobEntry, ServiceStore, default_home
from hpc_serve.rendezvous.user import user_name
from hpc_serve.submit.plans.planned_speed import speed_figures
from hpc_serve.submit.plans.planning import idle_gpus_note, on_whole_nodes, plan_service_with_inputs
from hpc_serve.submit.plans.preflight import check_before_plan, check_parsers, check_weights
from hpc_serve.submit.request.chain import begins_after_min
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.script.engine_words import engine_words
from hpc_serve.submit.script.render import devices_per_node, jobs_of, render_script
from hpc_serve.submit.services.elastic import windows_of
from hpc_serve.submit.services.service_bounds import note_submission
from hpc_serve.submit.services.stop import end_job
from hpc_serve.submit.slurm import scheduler
from hpc_serve.submit.slurm.local import process_start_time
from hpc_serve.submit.slurm.scheduler import SchedulerView
from hpc_serve.submit.slurm.slurm import UNKNOWN, after_start_option, array_options, batch_log_option
from hpc_serve.submit.status.status_reader import read_status, scheduled_job
from hpc_serve.vllm.arguments import differing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """What was handed over: jobs of one or several replicas, and their plan. `job_id` is sbatch's, of all together.

    `elastic` is there if the jobs of the service decide how many there are. `weights_note` says that weights are not
    here yet, `machines_note` that GPUs stay idle.
    """

    job_id: str
    jobs: tuple[SubmittedJob, ...]
    plan: ServePlan
    elastic: Elastic | None = None
    weights_note: str | None = None
    machines_note: str | None = None

    @property
    def job(self) -> SubmittedJob:
        """The first replica's."""
        return self.jobs[0]

    @property
    def num_replicas(self) -> int:
        """Of all jobs, without those that only take over from another."""
        return sum(job.replicas_per_job for job in self.jobs if not job.predecessor)


def submit(request: ServeRequest, *, environ: Mapping[str, str] = os.environ, ask_hub: bool = False) -> Submission:
    """Check the request, claim its name, and hand its script to the scheduler.

    With `ask_hub` the hub is asked for weights that are not here, whether the job may fetch them.

    Raises HpcServeError of every kind; then nothing is submitted and the name is free.
    """
    check_before_plan(request, environ)
    windows_of(environ)
    plan, result = plan_service_with_inputs(request, stand_in=environ.get("HPC_SERVE_MODEL"))
    request = on_whole_nodes(request, plan)
    check_parsers(request, plan, {**environ, **request.env})
    weights_note = check_weights(request, plan, {**environ, **request.env}, ask_hub=ask_hub)

    store, service = ServiceStore(default_home(environ)), request.service
    request = dataclasses.replace(request, log_dir=request.log_dir or str(store.log_dir(service)))
    script = render_script(request, plan)

    store.ensure_service(service)
    log_dir = make_log_dir(Path(log_dir_before_job(str(request.log_dir))), called="--log-dir")
    job, elastic = _job_of(request, plan, speed_figures(result.estimates())), None
    with _claimed(store, service, plan.model):
        if request.cluster == "local":
            job_id, jobs = _start_locally(store, job, script, log_dir)
        elif request.chain > 1:
            job_id, jobs = _submit_chains(store, job, script, log_dir, request, count=jobs_of(request, plan))
        else:
            job_id, jobs = _submit_to_slurm(store, job, script, log_dir, count=jobs_of(request, plan))
        if request.cluster != "local":
            own_ids = [one.job_id for one in jobs] if request.chain > 1 else [job_id]
            with _ended_if_it_fails(own_ids, jobs[0]):
                elastic = note_submission(store, request, jobs_of(request, plan), environ)
    idle = idle_gpus_note(request, plan)
    return Submission(
        job_id=job_id, jobs=jobs, plan=plan, elastic=elastic, weights_note=weights_note, machines_note=idle
    )


def add_replicas(store: ServiceStore, service: str, count: int, *, like: str | None = None) -> tuple[SubmittedJob, ...]:
    """Submit jobs of `count` more replicas of a service, with the script and the log folder of the last job that was
    submitted, or of the job `like`. Where that one has several replicas, they are as many whole jobs as are needed.

    Raises HpcServeError of every kind; InvalidRequestError if there is no script of `submit`.
    """
    of_slurm = [job for job in store.read_submitted(service) if job.cluster == "slurm" and like in (None, job.job_id)]
    last = max(of_slurm, key=lambda job: job.submitted_at, default=None)
    if last is None or not last.script or not Path(last.script).exists():
        raise InvalidRequestError(
            f"There is no script of `hpc-serve submit` for {like or service} to submit again: it was started by hand, "
            "on this machine alone, or its files are gone. Start replicas as you started the first."
        )
    with _claimed(store, service, last.model):
        script, log_dir = read_private(Path(last.script)), Path(str(last.log_path)).parent
        jobs = -(-count // last.replicas_per_job)
        return _submit_to_slurm(store, last, script, log_dir, count=jobs, anew=True)[1]


@contextlib.contextmanager
def _claimed(store: ServiceStore, service: str, model: str) -> Iterator[None]:
    """Hold the service's name for this model; if what is done under it fails, the name is free as before."""
    is_over = functools.partial(_is_over, store=store, slurm=SchedulerView())
    store.sweep(service, is_over=is_over)
    with contextlib.ExitStack() as undo:
        claim(store, service, model, is_over=is_over)
        undo.callback(release, store, service, model)
        store.ensure_api_key(service)
        yield
        undo.pop_all()


def own_and_others(
    submission: Submission, *, environ: Mapping[str, str] = os.environ
) -> tuple[list[ReplicaStatus], list[ReplicaStatus]]:
    """Return the submission's own replicas, and the others of its service that are not over.

    Both are empty if they cannot be read, since the job is submitted all the same.
    """
    try:
        report = read_status(ServiceStore(default_home(environ)), submission.job.service)
    except HpcServeError:
        return [], []
    ids = {job.job_id for job in submission.jobs}
    own = [one for one in report.replicas if one.job_id in ids]
    return own, [one for one in report.everywhere if not one.is_over and one.job_id not in ids]


def differences(
    submission: Submission, others: Sequence[ReplicaStatus], *, environ: Mapping[str, str] = os.environ
) -> dict[str, tuple[str, ...]]:
    """By the id of each job of `others`, the options of its engine that are otherwise than those of the submission.

    A client takes any replica, so answers depend on the one that it meets.
    """
    submitted = ServiceStore(default_home(environ)).read_submitted(submission.job.service)
    live = {status.job_id for status in others}
    found = {
        job.job_id: differing(submission.job.engine_args, job.engine_args)
        for job in submitted
        if job.job_id in live and job.engine_args
    }
    return {job_id: words for job_id, words in found.items() if words}


def _job_of(request: ServeRequest, plan: ServePlan, speed: Mapping[str, float]) -> SubmittedJob:
    """What is known of a job before it has an id."""
    return SubmittedJob(
        service=request.service,
        model=plan.model,
        cluster=request.cluster,
        job_id="",
        submitted_at=0.0,
        user=user_name(),
        num_nodes=plan.layout.num_nodes,
        gpus_per_node=devices_per_node(plan),
        replicas_per_job=request.replicas_per_job,
        predicted={**_figures(plan), **speed},
        engine_args=engine_words(request, plan),
    )


def _start_locally(
    store: ServiceStore, job: SubmittedJob, script: str, log_dir: Path
) -> tuple[str, tuple[SubmittedJob, ...]]:
    """Run the script on this machine; returns its id and the job."""
    from hpc_serve.submit.slurm import executor

    done = executor.start_locally(script, _scripts(store, job.service), log_dir)
    assert done.pid is not None
    job = dataclasses.replace(
        _as_submitted(job, done.job_id, done.script, log_dir),
        pid=done.pid,
        pid_start_time=process_start_time(done.pid),
        host=socket.gethostname(),
    )
    return done.job_id, _written(store, done.job_id, (job,))


def _submit_to_slurm(
    store: ServiceStore,
    job: SubmittedJob,
    script: str,
    log_dir: Path,
    *,
    count: int,
    anew: bool = False,
    options: Sequence[str] = (),
) -> tuple[str, tuple[SubmittedJob, ...]]:
    """Hand the script to sbatch, once for `count` jobs; returns sbatch's id, and the jobs.

    A script that is submitted `anew` may have the array of an earlier submission, or none: sbatch is told another.
    `options` are further words for sbatch. Raises SubmissionRefusedError where Slurm will never start the jobs; they
    are cancelled and not shown.
    """
    from hpc_serve.submit.slurm import executor

    if anew:
        options = [*options, *array_options(count), batch_log_option(log_dir, is_array=True)]
        job = dataclasses.replace(job, predecessor="", time_limit_s=0.0)
    done = executor.submit_to_slurm(script, _scripts(store, job.service), options)
    is_array = anew or count > 1
    job_ids = [f"{done.job_id}_{task}" for task in range(count)] if is_array else [done.job_id]
    if why := executor.why_it_never_starts(done.job_id):
        scheduler.cancel(done.job_id)
        done.script.unlink(missing_ok=True)
        store.forget(job.service, {done.job_id, *job_ids})
        raise SubmissionRefusedError(f"Slurm would never start the job, so it was cancelled: {why}")
    jobs = tuple(_as_submitted(job, job_id, done.script, log_dir) for job_id in job_ids)
    return done.job_id, _written(store, done.job_id, jobs)


def _submit_chains(
    store: ServiceStore, job: SubmittedJob, script: str, log_dir: Path, request: ServeRequest, *, count: int
) -> tuple[str, tuple[SubmittedJob, ...]]:
    """Submit `count` chains of jobs ahead; returns the id of the first job, and all jobs, chain after chain."""
    limit_s = request.slurm.time_limit_s
    assert limit_s is not None
    minutes = begins_after_min(limit_s, request.overlap_s)
    jobs: list[SubmittedJob] = []
    with contextlib.ExitStack() as undo:
        for _ in range(count):
            before = ""
            for _ in range(request.chain):
                one = dataclasses.replace(job, predecessor=before, time_limit_s=limit_s)
                options = [after_start_option(before, minutes)] if before else []
                before, submitted = _submit_to_slurm(store, one, script, log_dir, count=1, options=options)
                undo.callback(end_job, before, submitted[0])
                jobs += submitted
        undo.pop_all()
    return jobs[0].job_id, tuple(jobs)


def _as_submitted(job: SubmittedJob, job_id: str, script: Path, log_dir: Path) -> SubmittedJob:
    log_path = str(log_dir / f"{job_id}.log")
    return dataclasses.replace(
        job, job_id=job_id, submitted_at=time.time(), script=str(script), log_path=log_path, end=None
    )


def _written(store: ServiceStore, job_id: str, jobs: tuple[SubmittedJob, ...]) -> tuple[SubmittedJob, ...]:
    """The same jobs, written down; if that fails they are ended."""
    with _ended_if_it_fails([job_id], jobs[0]):
        for job in jobs:
            store.write_submitted(job)
    return jobs


@contextlib.contextmanager
def _ended_if_it_fails(job_ids: Iterable[str], job: SubmittedJob) -> Iterator[None]:
    """`job` is one of them, which tells where they run."""
    with contextlib.ExitStack() as undo:
        for job_id in job_ids:
            undo.callback(end_job, job_id, job)
        yield
        undo.pop_all()


def _scripts(store: ServiceStore, service: str) -> Path:
    return make_private_folder(store.service_dir(service) / "scripts")


def _figures(plan: ServePlan) -> dict[str, float]:
    estimate = dataclasses.asdict(plan.memory).items()
    return {name: value for name, value in estimate if isinstance(value, (int, float)) and not isinstance(value, bool)}


def _is_over(entry: JobEntry, *, store: ServiceStore, slurm: SchedulerView) -> bool:
    """Whether the job that holds a service's name is over, by asking the scheduler."""
    submitted = {job.job_id: job for job in store.read_submitted(entry.service)}
    job = scheduled_job(entry, submitted.get(entry.job_id), slurm)
    if job is not None and job.state == UNKNOWN and isinstance(entry, EndpointRecord):
        return time.time() - entry.updated_at > ABANDONED_AFTER_S
    return job is None or job.is_over
