"""What is wanted of a service on several kinds of machine: what each kind has, and what a person makes of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous.record import DEFAULT_MACHINE
from hpc_serve.rendezvous.wanted import Wanted
from hpc_serve.submit.request.bounds import shown_counts
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.services.jobs import Job


def on_others(found: Wanted | None, here: Sequence[Job], request: ServeRequest) -> dict[str, int]:
    """Return the replicas that a service has on other kinds of machine than the request's.

    Raises InvalidRequestError where they cannot be one service.
    """
    counts = ((found.counts if found is not None else {}) or counts_of(here)) if here else {}
    others = {name: count for name, count in counts.items() if name != request.machine}
    is_elastic = request.max_replicas is not None or (found is not None and here and found.least < found.most)
    if is_elastic and (others or request.machine != DEFAULT_MACHINE):
        raise InvalidRequestError(
            f"{request.service}: MIN:MAX is for a service on one kind of machine, because its jobs do not decide which "
            f"kind comes or leaves. Give each kind one number: --replicas {DEFAULT_MACHINE}:1,NAME:2; change it by "
            f"`hpc-serve scale {request.service}`."
        )
    if found is not None and others and found.replicas_per_job != request.replicas_per_job:
        raise InvalidRequestError(
            f"--replicas-per-job is {found.replicas_per_job} for {request.service}, and {request.replicas_per_job} for "
            f"{request.machine}: it must be the same for all kinds of machine of a service."
        )
    return others


def counts_of(here: Sequence[Job]) -> dict[str, int]:
    """Return the replicas of these jobs on each kind of machine."""
    names = dict.fromkeys(job.machine for job in here)
    return {name: sum(job.replicas for job in here if job.machine == name) for name in names}


def scaled(wanted: Wanted, replicas: int | Mapping[str, int], service: str, known: Set[str]) -> Wanted:
    """Return what is wanted with so many replicas. Raises InvalidRequestError for machines that are not `known`."""
    if isinstance(replicas, int):
        if not wanted.machines:
            return replace(wanted, least=replicas, most=replicas, count=replicas)
        if len(wanted.machines) > 1:
            raise InvalidRequestError(
                f"{service} has replicas on {shown_counts(wanted.counts)}: say which, as in `hpc-serve scale {service} "
                f"{shown_counts(wanted.counts)}`."
            )
        replicas = dict.fromkeys(wanted.machines, replicas)
    unknown = [name for name, count in replicas.items() if name not in known and (count or name not in wanted.counts)]
    if unknown:
        count = max(1, replicas[unknown[0]])
        raise InvalidRequestError(
            f"{service} has no script for {unknown[0]}: `hpc-serve submit` with --name {service} and "
            f"--replicas {unknown[0]}:{count} makes one. It has been on {', '.join(sorted(known))}."
        )
    counts = {**(wanted.counts or {DEFAULT_MACHINE: wanted.count}), **replicas}
    if not any(counts.values()):
        raise InvalidRequestError(f"{service} would have no replica; `hpc-serve stop {service}` ends it.")
    return wanted.with_counts(counts)


def without(wanted: Wanted, ended: Iterable[tuple[str, int]]) -> Wanted:
    """Return what is wanted once a person has ended so many replicas on these kinds of machine."""
    left = wanted.counts
    for machine, count in ended:
        left[machine] = max(0, left.get(machine, 0) - count)
    return wanted.with_counts(left) if wanted.machines and any(left.values()) else wanted


def check_whole_jobs(here: Sequence[Job], wanted: Wanted, service: str, per_job: int) -> None:
    """Raises InvalidRequestError where whole jobs do not give as many replicas as are wanted."""
    for machine, count in wanted.counts.items() or [("", wanted.count)]:
        its = [job for job in here if machine in ("", job.machine)]
        have = sum(job.replicas for job in its)
        missing, over = max(0, count - have), max(0, have - count)
        if missing % per_job:
            below = count - missing % per_job
            raise InvalidRequestError(
                f"{service} has {have} replicas, and a job of it has {per_job}: it can have {below + per_job}"
                + (f", or {below}." if below > have else ".")
            )
        for job in sorted(its, key=lambda job: -job.replicas):
            over -= job.replicas if job.replicas <= over else 0
        if over:
            raise InvalidRequestError(
                f"{service} cannot lose {have - count} of its {have} replicas in whole jobs; "
                f"`hpc-serve stop {its[0].job_id}-0` ends one of a job, and its GPUs stay with the job."
            )
