"""How the replicas of a request are dealt to jobs: each in a job of its own, or several in each. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_serve.errors import InvalidRequestError
from hpc_serve.vllm.arguments import read_arguments, value_of

if TYPE_CHECKING:
    from hpc_serve.plan import ServePlan
    from hpc_serve.submit.request import ServeRequest


def check_replicas(request: ServeRequest) -> None:
    """Raises InvalidRequestError for numbers that contradict each other, or what else is asked for."""
    per_job, replicas = request.replicas_per_job, request.replicas
    is_local = request.cluster == "local"
    for name, count, most in (("nodes", request.num_nodes, 1), ("replicas", replicas, per_job)):
        if is_local and (count or 1) > most:
            raise InvalidRequestError(
                f"--cluster local runs on this machine alone, but {count} {name} were asked for; "
                f"leave --{name} out, or use --cluster slurm."
            )
    if per_job > 1:
        _check_shared_job(request)


def _check_shared_job(request: ServeRequest) -> None:
    per_job, replicas = request.replicas_per_job, request.replicas
    asked = f"--replicas-per-job {per_job}"
    if (request.num_nodes or 1) > 1:
        raise InvalidRequestError(
            f"{asked} divides one node, but --nodes is {request.num_nodes}: leave one of them out. "
            "More nodes of such replicas are more jobs: --replicas counts the replicas of all jobs."
        )
    if replicas is not None and replicas % per_job:
        below = replicas - replicas % per_job
        numbers = f"{below} or {below + per_job}" if below else f"{per_job}"
        raise InvalidRequestError(
            f"{replicas} replicas cannot be dealt to jobs of {per_job} each ({asked}): use --replicas {numbers}."
        )
    if request.target is not None:
        raise InvalidRequestError(
            f"--target chooses how many GPUs an engine has, and {asked} divides the node: leave one of them out."
        )
    if request.keep_up:
        raise InvalidRequestError(
            f"--keep-up is for jobs of one replica, because each replica hands over for itself: leave out {asked}, "
            "or --keep-up."
        )
    if value_of(read_arguments(request.engine_args), "--port") is not None:
        raise InvalidRequestError(f"{asked}: engines on one node need ports of their own; leave out --port.")


def replicas_of(request: ServeRequest, plan: ServePlan) -> int:
    """How many there are in all jobs: as many as are asked for, else one job of them, or as many as the plan takes."""
    if request.replicas or request.replicas_per_job > 1:
        return request.replicas or request.replicas_per_job
    return plan.replicas if request.cluster == "slurm" else 1


def jobs_of(request: ServeRequest, plan: ServePlan) -> int:
    """How many jobs are submitted for them."""
    return replicas_of(request, plan) // request.replicas_per_job
