"""How many replicas and jobs a service may have, and when it may sleep; as asked for, checked. Pure.

Replicas have bounds in all and in each job, or a number on each kind of machine. A chain is for sites and containers
that do not let jobs submit others: its jobs are submitted ahead, and each begins before the time limit of the job
before it. Slurm begins each job in time (`--dependency`), and a job that is ready asks those before it to drain
(job/run/record_keeper.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hpc_serve.errors import InvalidRequestError
from hpc_serve.units import duration

# -- a chain of jobs

_DEFAULT_OVERLAP_S = 1800.0
_MOST = 100
_MOST_REPLICAS = 10_000  # the jobs that Slurm keeps, unless a site sets MaxJobCount
_MINUTE_S = 60.0


def check_chain(length: int, overlap_s: float | None, limit_s: float | None, *, notice_s: float, cluster: str) -> None:
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
    return min(_DEFAULT_OVERLAP_S, limit_s / 2) if asked_s is None else asked_s


def chain_sentence(coming: Sequence[tuple[str, str]]) -> str:
    """Return the jobs still to come after a job, for people: the next with its state, then the later ones."""
    (job_id, state), *rest = coming
    then = f", then {', '.join(job_id for job_id, _ in rest)}" if rest else ""
    return f"{job_id} {state}{then}"


# -- replicas

_BOUNDS = re.compile(r"(\d{1,6})(?::(\d{1,6}))?")
_MACHINE = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,62}")


def parse_replicas(text: str) -> tuple[int, int | None]:
    """Return the least and the most number of replicas; the second is None where one number is given.

    Raises InvalidRequestError.

    >>> parse_replicas("1:4"), parse_replicas("3")
    ((1, 4), (3, None))
    """
    found = _BOUNDS.fullmatch(text)
    if found is None:
        raise InvalidRequestError(
            f"{text!r} is no number of replicas: write 4, or 1:4 for one to four. "
            "h100:2,a100:1 is for machines that the site file names."
        )
    return _count(found[1]), _count(found[2]) if found[2] is not None else None


def _count(digits: str) -> int:
    if int(digits) > _MOST_REPLICAS:
        raise InvalidRequestError(f"{digits} replicas are asked for: a service has at most {_MOST_REPLICAS:,}.")
    return int(digits)


def parse_counts(text: str) -> tuple[int, int | None] | dict[str, int]:
    """Return the replicas of kinds of machine by name, or what `parse_replicas` returns. Raises InvalidRequestError.

    >>> parse_counts("h100:2,a100:1"), parse_counts("1:4")
    ({'h100': 2, 'a100': 1}, (1, 4))
    """
    if ":" not in text or not any(letter.isalpha() for letter in text):
        return parse_replicas(text)
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.partition(":")
        if not is_machine_name(name) or not re.fullmatch(r"\d{1,6}", number):
            raise InvalidRequestError(
                f"{part!r} is no number of replicas on a machine of the site file: write h100:2,a100:1 without spaces."
                + (" Machines have one number each, no MIN:MAX." if ":" in number else "")
            )
        if name in counts:
            raise InvalidRequestError(f"{name} is named twice in {text!r}: keep one of the two.")
        counts[name] = _count(number)
    return counts


def is_machine_name(name: str) -> bool:
    return _MACHINE.fullmatch(name) is not None


def shown_counts(counts: Mapping[str, int]) -> str:
    """
    >>> shown_counts({"h100": 2, "a100": 1})
    'h100:2,a100:1'
    """
    return ",".join(f"{name}:{count}" for name, count in counts.items())


def check_bounds(least: int, most: int) -> None:
    """Raises InvalidRequestError for bounds that cannot be."""
    if least < 1:
        raise InvalidRequestError(
            f"replicas is {least}:{most}: at least 1 stays. A service that ends while nobody uses it, and can be woken,"
            f" is --replicas 1:{max(1, most)} --idle-stop 30m."
        )
    if most < least:
        raise InvalidRequestError(
            f"replicas is {least}:{most}: the least, {least}, is more than the most, {most}. Write {most or 1}:{least}."
        )


def check_jobs_can_submit(option: str, cluster: str, image: str | None, *, site_lets_them: bool) -> None:
    """Refuse an option that makes jobs submit jobs, if jobs cannot. Raises InvalidRequestError."""
    if cluster == "local":
        what = "jobs with a time limit" if option == "--keep-up" else "jobs of Slurm"
        raise InvalidRequestError(f"{option} is for {what}; leave it out with --cluster local.")
    cure = "Change the number yourself: hpc-serve scale"
    if option == "--keep-up":
        cure = "Submit jobs ahead in its place: --chain 7 is seven jobs, and each takes over in time"
    if not site_lets_them:
        why = "the site file says that they cannot here (jobs_can_submit: false)"
    elif image is not None:
        why = f"those in the image {image} cannot: it takes venv, conda or modules in its place"
    else:
        return
    raise InvalidRequestError(f"{option} needs jobs that can call sbatch, and {why}. {cure}.")


def check_replicas(
    replicas: int | None, per_job: int, num_nodes: int | None, *, is_local: bool, port: str | None
) -> None:
    """Raises InvalidRequestError for numbers that contradict each other, the place, or one port for an engine."""
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
    if port and per_job > 1:
        raise InvalidRequestError(
            f"--port and --replicas-per-job {per_job} do not go together: engines on one node need ports of their own. "
            "Leave one of them out."
        )


def shown_bounds(least: int, most: int) -> str:
    """
    >>> shown_bounds(1, 4), shown_bounds(2, 2)
    ('1:4', '2')
    """
    return str(least) if least == most else f"{least}:{most}"
