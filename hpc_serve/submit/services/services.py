"""Submits a service: plans it, renders its script, claims its name, and hands the script to the scheduler.

`submit` does everything that can fail before it claims a name, and leaves no claim behind if sbatch refuses.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import HpcServeError
from hpc_serve.job.run.node import LaunchOptions, with_variables
from hpc_serve.plan import ServePlan
from hpc_serve.plan.model.checkpoint import AdapterFiles, check_room, check_shapes
from hpc_serve.rendezvous import shares
from hpc_serve.rendezvous.claims import read_wanted
from hpc_serve.rendezvous.fields import array_of, log_dir_before_job
from hpc_serve.rendezvous.files import make_log_dir
from hpc_serve.rendezvous.ownership import user_name
from hpc_serve.rendezvous.record import Adapter, SubmittedJob
from hpc_serve.rendezvous.store import ServiceStore, default_home
from hpc_serve.rendezvous.wanted import Wanted
from hpc_serve.submit.plans.planned_speed import ENCODER_POSITIONS, speed_figures
from hpc_serve.submit.plans.planning import plan_request
from hpc_serve.submit.plans.preflight import check_before_plan, check_files
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.script.memory import asked_parts, memory_sum, small_memory_note
from hpc_serve.submit.script.render import devices_per_node, render_script, replicas_of
from hpc_serve.submit.services.adapters import want_adapters
from hpc_serve.submit.services.carry_out import (
    JobScript,
    claimed,
    end_submission,
    start_locally,
    submit_chains,
    submit_to_slurm,
)
from hpc_serve.submit.services.jobs import windows_of
from hpc_serve.submit.services.want import end_what_comes, take_back, want_submission
from hpc_serve.submit.status.status_reader import read_status
from hpc_serve.vllm.arguments import differing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """The jobs that were handed over, of one or several replicas, and their plan.

    `wanted` is what is written down for the service; `is_there` says that its replicas were there already, so that
    nothing was submitted. `weights_note` says that weights are not here yet, `machines_note` that GPUs stay idle, or
    that --mem is too small, and `memory` what --mem consists of. `queue` is Slurm's reason why it waits, if it gives
    one. `others` are the other replicas of the service that are not over; `differing` has by job the options in which
    engines of theirs differ: a client takes any replica, so answers depend on the one that it meets. `shared_with` is a
    Unix group, and `folder` the service's.
    """

    jobs: tuple[SubmittedJob, ...]
    plan: ServePlan
    wanted: Wanted | None = None
    is_there: bool = False
    weights_note: str | None = None
    machines_note: str | None = None
    memory: str = ""
    queue: str = ""
    others: tuple[ReplicaStatus, ...] = ()
    differing: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    shared_with: str = ""
    folder: str = ""

    @property
    def job(self) -> SubmittedJob:
        """The first replica's."""
        return self.jobs[0]

    @property
    def job_id(self) -> str:
        """sbatch's, of all jobs that were submitted; where nothing was submitted, the first job's."""
        return self.job.job_id if self.is_there else array_of(self.job.job_id)

    @property
    def num_replicas(self) -> int:
        """Of all jobs, without those that only take over from another."""
        return sum(job.replicas_per_job for job in self.jobs if not job.predecessor)


def submit(
    request: ServeRequest,
    *,
    environ: Mapping[str, str] = os.environ,
    ask_hub: bool = False,
    share: str | None = None,
    adapters: Mapping[str, AdapterFiles] = MappingProxyType({}),
) -> Submission:
    """Check the request, claim its name, and hand its script to the scheduler; `submit_each` for one request alone."""
    return submit_each([request], environ=environ, ask_hub=ask_hub, share=share, adapters=adapters)[0]


def submit_each(
    requests: Sequence[ServeRequest],
    *,
    environ: Mapping[str, str] = os.environ,
    ask_hub: bool = False,
    share: str | None = None,
    adapters: Mapping[str, AdapterFiles] = MappingProxyType({}),
) -> tuple[Submission, ...]:
    """Check the requests of one service, one for each kind of machine, and hand their scripts to the scheduler.

    `ask_hub` asks the hub whether the job may fetch weights that are not here. `share` is a Unix group that may use the
    service, until it is submitted without one while none of its jobs is there. `adapters` are LoRA adapters by name.

    Raises HpcServeError of every kind; then nothing is submitted and the name is free.
    """
    store, service = ServiceStore(default_home(environ)), requests[0].service
    for request in requests:
        check_before_plan(request, environ)
    windows_of(environ)  # the variables of jobs are refused here, not after hours in the queue
    with_variables(LaunchOptions(service=service, backend="auto", gpus_per_node=0), environ)
    group = shares.check_share(store, share) if share is not None else None
    prepared = [_prepared(request, store, environ, ask_hub=ask_hub, adapters=adapters) for request in requests]
    adapters_wanted = {name: Adapter(path=files.path, added_at=time.time()) for name, files in adapters.items()}
    store.ensure_service(service)
    folders = [Path(log_dir_before_job(str(one.request.log_dir))) for one in prepared]
    log_dirs = [make_log_dir(folder, called="--log-dir") for folder in folders]
    done: list[Submission] = []
    with claimed(store, service, prepared[0].submission.plan.model) as (scripts, undo):
        for one, log_dir in zip(prepared, log_dirs, strict=True):
            script = JobScript(text=one.text, job=one.submission.job, folder=scripts, log_dir=log_dir, undo=undo)
            done.append(_hand_over(store, one, script, group, adapters_wanted, environ))
    end_what_comes(store, service)
    together = {job.job_id for one in done for job in one.jobs}
    shared_with = shares.shared_with(store, service)
    return tuple(_with_others(store, dataclasses.replace(one, shared_with=shared_with), together) for one in done)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A request that was checked, with its script, and the submission that it will be once its jobs have ids."""

    request: ServeRequest
    text: str
    submission: Submission


def _prepared(
    request: ServeRequest,
    store: ServiceStore,
    environ: Mapping[str, str],
    *,
    ask_hub: bool,
    adapters: Mapping[str, AdapterFiles],
) -> _Prepared:
    service = request.service
    planned = plan_request(request, stand_in=environ.get("HPC_SERVE_MODEL"))
    for files in adapters.values():
        if not environ.get("HPC_SERVE_MODEL"):
            check_shapes(files, planned.result.model)
        check_room(files, planned.plan.vllm_args, f"{service} would be")
    weights_note = check_files(planned, {**environ, **request.env}, ask_hub=ask_hub)

    plan = planned.plan
    request = dataclasses.replace(planned.request, log_dir=request.log_dir or str(store.log_dir(service)))
    figures = speed_figures(planned.result.estimates())
    if positions := planned.result.model.encoder_positions:
        figures = {ENCODER_POSITIONS: positions}
    note = " ".join(filter(None, (planned.machines_note, small_memory_note(request, plan)))) or None
    submission = Submission(
        jobs=(_job_of(request, plan, figures),),
        plan=plan,
        weights_note=weights_note,
        machines_note=note,
        memory=memory_sum(asked_parts(request, plan)),
        folder=str(store.service_dir(service)),
    )
    return _Prepared(request=request, text=render_script(request, plan), submission=submission)


def _hand_over(
    store: ServiceStore,
    prepared: _Prepared,
    script: JobScript,
    group: int | None,
    adapters: Mapping[str, Adapter],
    environ: Mapping[str, str],
) -> Submission:
    """Hand one script to the scheduler, or find that its jobs are there."""
    request, job, service = prepared.request, script.job, prepared.request.service
    done = functools.partial(dataclasses.replace, prepared.submission)
    if request.cluster == "local":
        live = [one.job_id for one in read_status(store, service).replicas if not one.is_over] if request.once else []
        if live:
            return done(jobs=(dataclasses.replace(job, job_id=live[0]),), is_there=True)
        is_new = all(one.is_final for one in store.read(service).records)
        _share(store, service, group, is_new=is_new)
        want_adapters(store, service, adapters, is_new=is_new)
        return done(jobs=start_locally(store, script))
    before = read_wanted(store, service)
    replicas = replicas_of(request, prepared.submission.plan)
    wanted, there = want_submission(store, request, replicas, environ, adapters)
    _share(store, service, group, is_new=not there)
    if not wanted.submitting:
        known = {one.job_id: one for one in store.read_submitted(service)}
        # A script that was given to sbatch by hand has no entry.
        jobs = tuple(known.get(one) or dataclasses.replace(job, job_id=one) for one in there)
        return done(jobs=jobs, wanted=wanted, is_there=True)
    script.undo.callback(take_back, store, service, wanted, before)
    count = -(-wanted.submitting // request.replicas_per_job)
    if request.chain > 1:
        after_min = request.next_begins_after_min
        jobs = submit_chains(store, script, length=request.chain, after_min=after_min, count=count)
    else:
        jobs = submit_to_slurm(store, script, count=count)
    wanted = end_submission(store, service, wanted, jobs) or wanted
    return done(jobs=jobs, wanted=wanted)


def _share(store: ServiceStore, service: str, group: int | None, *, is_new: bool) -> None:
    """Share a service with a group. Without one, a service that `is_new` is its owner's alone, and others stay."""
    if group is not None:
        shares.share(store, service, group)
    elif is_new:
        shares.unshare(store, service)


def _with_others(store: ServiceStore, done: Submission, together: Set[str]) -> Submission:
    """Return the submission beside the other replicas of its service, as far as these can be read.

    Jobs that were submitted `together` with it are no others, but their engines may differ.
    """
    ids = {job.job_id for job in done.jobs}
    try:
        report, submitted = read_status(store, done.job.service), store.read_submitted(done.job.service)
    except HpcServeError:  # the job is submitted all the same
        return done
    others = tuple(one for one in report.everywhere if not one.is_over and one.job_id not in together)
    live = {one.job_id for one in others} | (together - ids)
    differing_words = {
        job.job_id: differing(done.job.engine_args, job.engine_args)
        for job in submitted
        if job.job_id in live and job.engine_args
    }
    return dataclasses.replace(
        done,
        queue=next((one.reason for one in report.replicas if one.job_id in ids and one.pending_reason), ""),
        others=others,
        differing={job_id: words for job_id, words in differing_words.items() if words},
    )


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
        time_limit_s=(request.slurm.time_limit_s or 0.0) if request.chain > 1 else 0.0,
        predicted={**_figures(plan), **speed},
        engine_args=plan.vllm_args,
        gpu=request.gpu,
        gpu_memory_bytes=request.gpu_memory_bytes,
        machine=request.machine,
    )


def _figures(plan: ServePlan) -> dict[str, float]:
    estimate = dataclasses.asdict(plan.memory).items()
    return {name: value for name, value in estimate if isinstance(value, (int, float)) and not isinstance(value, bool)}
