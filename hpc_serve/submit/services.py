"""Submits a service: plans it, renders its script, claims its name, and hands the script to the scheduler.

`submit` does everything that can fail before it claims a name, and leaves no claim behind if sbatch refuses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from hpc_serve.client.status import ReplicaStatus
from hpc_serve.errors import HpcServeError
from hpc_serve.plan import ServePlan
from hpc_serve.rendezvous.claims import claim, release
from hpc_serve.rendezvous.files import make_log_dir, make_private_folder
from hpc_serve.rendezvous.record import EndpointRecord, SubmittedJob
from hpc_serve.rendezvous.store import ABANDONED_AFTER_S, JobEntry, ServiceStore, default_home
from hpc_serve.rendezvous.user import user_name
from hpc_serve.submit.local import process_start_time
from hpc_serve.submit.planning import plan_service
from hpc_serve.submit.preflight import check_before_plan, check_weights
from hpc_serve.submit.render import devices_per_node, render_script
from hpc_serve.submit.request import ServeRequest
from hpc_serve.submit.scheduler import SchedulerView
from hpc_serve.submit.slurm import UNKNOWN
from hpc_serve.submit.status_reader import read_status, scheduled_job
from hpc_serve.submit.stop import end_job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """A job that was handed over, and its plan."""

    job: SubmittedJob
    plan: ServePlan


def submit(request: ServeRequest, *, environ: Mapping[str, str] = os.environ) -> Submission:
    """Check the request, claim its name, and hand its script to the scheduler.

    Raises HpcServeError of every kind; then nothing is submitted and the name is free.
    """
    check_before_plan(request, environ)
    plan = plan_service(request, stand_in=environ.get("HPC_SERVE_MODEL"))
    check_weights(request, plan, environ)

    store, service = ServiceStore(default_home(environ)), request.service
    request = dataclasses.replace(request, log_dir=request.log_dir or str(store.log_dir(service)))
    script = render_script(request, plan)

    store.ensure_service(service)
    log_dir = make_log_dir(Path(str(request.log_dir)), called="--log-dir")
    is_over = functools.partial(_is_over, store=store, slurm=SchedulerView())
    store.sweep(service, is_over=is_over)
    with contextlib.ExitStack() as undo:
        claim(store, service, plan.model, is_over=is_over)
        undo.callback(release, store, service, plan.model)
        store.ensure_api_key(service)
        scripts = make_private_folder(store.service_dir(service) / "scripts")
        job = _hand_over(request, plan, script, log_dir, scripts)
        undo.callback(end_job, job.job_id, job)
        store.write_submitted(job)
        undo.pop_all()
    return Submission(job=job, plan=plan)


def other_replicas(job: SubmittedJob, *, environ: Mapping[str, str] = os.environ) -> tuple[ReplicaStatus, ...]:
    """The replicas of the job's service, without its own, that are not over.

    The job is submitted whatever can be read of them, so where that fails there are none.
    """
    try:
        report = read_status(ServiceStore(default_home(environ)), job.service)
    except HpcServeError:
        return ()
    return tuple(one for one in report.replicas if not one.is_over and one.job_id != job.job_id)


def _hand_over(request: ServeRequest, plan: ServePlan, script: str, log_dir: Path, scripts: Path) -> SubmittedJob:
    from hpc_serve.submit import executor  # submitit takes longer to import than all the rest

    if request.cluster == "local":
        done = executor.start_locally(script, scripts, log_dir)
    else:
        done = executor.submit_to_slurm(script, scripts)
    return SubmittedJob(
        service=request.service,
        model=plan.model,
        cluster=request.cluster,
        job_id=done.job_id,
        submitted_at=time.time(),
        script=str(done.script),
        log_path=str(log_dir / f"{done.job_id}.log"),
        user=user_name(),
        num_nodes=plan.layout.num_nodes,
        gpus_per_node=devices_per_node(plan),
        pid=done.pid,
        pid_start_time=process_start_time(done.pid) if done.pid else None,
        host=socket.gethostname() if done.pid else None,
        predicted=_figures(plan),
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
