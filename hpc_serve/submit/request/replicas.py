"""Which numbers of replicas, in all and in each job, can be. Pure: `request` asks."""

from __future__ import annotations

from hpc_serve.errors import InvalidRequestError


def check_replicas(replicas: int | None, per_job: int, num_nodes: int | None, *, is_local: bool) -> None:
    """Raises InvalidRequestError for numbers that contradict each other, or the place."""
    for name, count, most in (("nodes", num_nodes, 1), ("replicas", replicas, per_job)):
        if is_local and (count or 1) > most:
            raise InvalidRequestError(
                f"--cluster local runs on this machine alone, but {count} {name} were asked for; "
                f"leave --{name} out, or use --cluster slurm."
            )
    if per_job > 1 and (num_nodes or 1) > 1:
        raise InvalidRequestError(
            f"--replicas-per-job {per_job} divides one node, but --nodes is {num_nodes}: leave one of them out. "
            "More nodes of such replicas are more jobs: --replicas counts the replicas of all jobs."
        )
    if replicas is not None and replicas % per_job:
        below = replicas - replicas % per_job
        numbers = f"{below} or {below + per_job}" if below else f"{per_job}"
        raise InvalidRequestError(
            f"{replicas} replicas cannot be dealt to jobs of {per_job} each (--replicas-per-job): "
            f"use --replicas {numbers}."
        )


def check_shared_port(per_job: int, port: str | None) -> None:
    """Raises InvalidRequestError if the replicas of one job shall all have one port."""
    if port and per_job > 1:
        raise InvalidRequestError(
            f"--port and --replicas-per-job {per_job} do not go together: engines on one node need ports of their own. "
            "Leave one of them out."
        )
