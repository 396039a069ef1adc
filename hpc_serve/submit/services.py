"""Submits a service: plans it, renders its script, claims its name, and hands the script to the scheduler.

`submit` does everything that can fail before it claims a name, and leaves no claim behind if sbatch refuses.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hpc_serve.client.status import ReplicaStatus
from hpc_serve.plan import ServePlan
from hpc_serve.rendezvous.claims import claim, release
from hpc_serve.rendezvous.files import make_log_dir
from hpc_serve.rendezvous.record import EndpointRecord, SubmittedJob
from hpc_serve.rendezvous.store import ABANDONED_AFTER_S, JobEntry, ServiceStore, default_home
from hpc_serve.rendezvous.user import user_name
from hpc_serve.submit.local import process_start_time
from hpc_serve.submit.planning import plan_service
from hpc_serve.submit.preflight import check_files, check_stand_in
from hpc_serve.submit.render import devices_per_node, render_script
from hpc_serve.submit.request import ServeRequest
from hpc_serve.submit.scheduler import SchedulerView
from hpc_serve.submit.slurm import UNKNOWN
from hpc_serve.submit.status_reader import read_status, scheduled_job
from hpc_serve.submit.stop import end_job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """A job that was handed over, and its plan. `others` are replicas of the same service that were not over then."""

    job: SubmittedJob
    plan: ServePlan
    others: tuple[ReplicaStatus, ...] = ()

    @property
    def missing_replicas(self) -> int:
        """How many replicas the plan's target takes beyond those that there are now."""
        return max(0, self.plan.replicas - 1 - len(self.others))


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
    log_dir = make_log_dir(Path(request.log_dir or ""), called="--log-dir")
    slurm = SchedulerView()
    is_over = _over_by_scheduler(store, request.service, slurm)
    store.sweep(request.service, is_over=is_over)
    claim(store, request.service, plan.model, is_over=is_over)
    try:
        others = tuple(one for one in read_status(store, request.service, slurm=slurm).replicas if not one.is_over)
        store.ensure_api_key(request.service)
        job = _hand_over(request, plan, script, log_dir, store.service_dir(request.service) / "scripts")
        try:
            store.write_submitted(job)
        except BaseException:
            end_job(job.job_id, job)
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


def _over_by_scheduler(store: ServiceStore, service: str, slurm: SchedulerView) -> Callable[[JobEntry], bool]:
    """Whether what holds a service's name is over, by asking the scheduler."""
    submitted = {job.job_id: job for job in store.read_submitted(service)}

    def is_over(holder: JobEntry) -> bool:
        job = scheduled_job(holder, submitted.get(holder.job_id), slurm)
        if job is not None and job.state == UNKNOWN and isinstance(holder, EndpointRecord):
            return time.time() - holder.updated_at > ABANDONED_AFTER_S
        return job is None or job.is_over

    return is_over
