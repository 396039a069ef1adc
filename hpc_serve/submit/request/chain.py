"""A chain: jobs that are submitted ahead. Each begins before the time limit of the job before it. Pure.

It is for sites and containers that do not let jobs submit others. Slurm begins each job in time (`--dependency`), and a
job that is ready asks those before it to drain (job/run/takeover.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from hpc_serve.durations import duration
from hpc_serve.errors import InvalidRequestError

DEFAULT_OVERLAP_S = 1800.0
_MOST = 100
_MINUTE_S = 60.0


def check_chain(
    length: int,
    overlap_s: float | None,
    limit_s: float | None,
    *,
    notice_s: float,
    cluster: str,
) -> None:
    """Raises InvalidRequestError for a chain that cannot be.

    A job takes no new requests from `notice_s` before its time limit.
    """
    if length == 1:
        if overlap_s is not None:
            raise InvalidRequestError("--overlap is for jobs that are submitted ahead: add --chain N, or leave it out.")
        return
    if length > _MOST:
        raise InvalidRequestError(f"--chain is {length}: at most {_MOST} jobs are submitted ahead.")
    if cluster == "local" or limit_s is None:
        raise InvalidRequestError(
            "--chain needs the time limit of each job: add --time, or `time` to the site file; leave it out with "
            "--cluster local."
        )
    begins_after_min(limit_s, overlap_s)
    if (overlap_s := _overlap_s(limit_s, overlap_s)) <= notice_s:
        raise InvalidRequestError(
            f"--overlap is {duration(overlap_s)} before the time limit, but a job takes no new requests from "
            f"{duration(notice_s)} before it (--signal): make it so much longer as the engine takes to start, or the "
            "service has a gap."
        )


def begins_after_min(limit_s: float, overlap_s: float | None) -> int:
    """Return how many minutes after the start of a job the next one may begin: the overlap before its time limit.

    If `overlap_s` is None, the overlap is half an hour, or half of the limit if that is less. Raises
    InvalidRequestError.

    >>> begins_after_min(12 * 3600, None), begins_after_min(1200, None), begins_after_min(3600, 900)
    (690, 10, 45)
    """
    overlap_s = _overlap_s(limit_s, overlap_s)
    minutes = int((limit_s - overlap_s) // _MINUTE_S)
    if minutes < 1:
        raise InvalidRequestError(
            f"--overlap is {duration(overlap_s)}, and the time limit of a job {duration(limit_s)}: the next job "
            "would begin less than a minute after this one. Use a longer --time, or a shorter --overlap."
        )
    return minutes


def _overlap_s(limit_s: float, asked_s: float | None) -> float:
    return min(DEFAULT_OVERLAP_S, limit_s / 2) if asked_s is None else asked_s


def chain_sentence(coming: Sequence[tuple[str, str]]) -> str:
    """Return the jobs still to come after a job, for people: the next with its state, then the later ones."""
    (job_id, state), *rest = coming
    then = f", then {', '.join(job_id for job_id, _ in rest)}" if rest else ""
    return f"{job_id} {state}{then}"
