"""Submits a service: plans it, renders its script, claims its name, and hands the script to the scheduler; and submits
further replicas of one.

`submit` does everything that can fail before it claims a name, and leaves no claim behind if sbatch refuses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import HpcServeError, InvalidRequestError
from hpc_serve.plan import ServePlan
from hpc_serve.rendezvous.claims import claim, release
from hpc_serve.rendezvous.elastic import Elastic
from hpc_serve.rendezvous.files import make_log_dir, read_private
from hpc_serve.rendezvous.names import log_dir_before_job
from hpc_serve.rendezvous.record import EndpointRecord, SubmittedJob
from hpc_serve.rendezvous.store import ABANDONED_AFTER_S, JobEntry, ServiceStore, default_home
from hpc_serve.rendezvous.user import user_name
from hpc_serve.submit.plans.planned_speed import speed_figures
from hpc_serve.submit.plans.planning import idle_gpus_note, on_whole_nodes, plan_service_with_inputs
from hpc_serve.submit.plans.preflight import check_before_plan, check_parsers, check_weights
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.script.engine_words import engine_words
from hpc_serve.submit.script.render import devices_per_node, jobs_of, render_script
from hpc_serve.submit.services.elastic import windows_of
from hpc_serve.submit.services.hand_over import ended_if_it_fails, start_locally, submit_chains, submit_to_slurm
from hpc_serve.submit.services.service_bounds import note_submission
from hpc_serve.submit.slurm.scheduler import SchedulerView
from hpc_serve.submit.slurm.slurm import UNKNOWN
from hpc_serve.submit.status.status_reader import read_status, scheduled_job
from hpc_serve.vllm.arguments import differing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """The jobs that were handed over, of one or several replicas, and their plan. `job_id` is sbatch's, of all.

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

    `ask_hub` asks the hub whether the job may fetch weights that are not here.

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
            job_id, jobs = start_locally(store, job, script, log_dir)
        elif request.chain > 1:
            job_id, jobs = submit_chains(store, job, script, log_dir, request, count=jobs_of(request, plan))
        else:
            job_id, jobs = submit_to_slurm(store, job, script, log_dir, count=jobs_of(request, plan))
        if request.cluster != "local":
            own_ids = [one.job_id for one in jobs] if request.chain > 1 else [job_id]
            with ended_if_it_fails(own_ids, jobs[0]):
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
        return submit_to_slurm(store, last, script, log_dir, count=jobs, anew=True)[1]


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
