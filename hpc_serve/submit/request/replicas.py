"""Which numbers of replicas, in all and in each job, can be. Pure: `request` asks."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_serve.errors import InvalidRequestError

_JOBS_OF_ONE = (
    "Leave --replicas-per-job out: with --no-exclusive, --replicas N is jobs of one replica each, of which Slurm may "
    "put several on a node"
)
_NOT_TOGETHER = {
    "--keep-up": "each replica hands over for itself, and those of one job have one time limit",
    "--replicas MIN:MAX": "whole jobs are added and leave, one replica at a time",
    "--idle-stop": "each job looks after one replica",
    "--port": "engines on one node need ports of their own",
}
_CURES = dict.fromkeys(("--keep-up", "--replicas MIN:MAX", "--idle-stop"), _JOBS_OF_ONE)


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


def check_shared_job(per_job: int, asked: Mapping[str, object]) -> None:
    """Raises InvalidRequestError if one of the options in `asked` has a value, and a job has several replicas."""
    for option, value in asked.items():
        if value and per_job > 1:
            raise InvalidRequestError(
                f"{option} and --replicas-per-job {per_job} do not go together: {_NOT_TOGETHER[option]}. "
                f"{_CURES.get(option, 'Leave one of them out')}."
            )
