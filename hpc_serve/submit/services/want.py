"""Writes down what people want of a service, for `submit`, `scale`, `wake` and `stop`.

Each command then does what follows, as a job of the service would (carry_out.py). A service on several kinds of machine
has a wanted number for each; the end of the file says what a person makes of them. `KEPT` are the variables that jobs
hand on to the jobs that they submit. docs/reference/environment-variables.md describes all variables, and a test holds
that page to the code.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import HpcServeError, InvalidRequestError, RecordError, StoreError
from hpc_serve.rendezvous.claims import change_wanted, read_wanted, read_wanted_or_none, wanted_file
from hpc_serve.rendezvous.files import remove_file
from hpc_serve.rendezvous.record import DEFAULT_MACHINE, Adapter, SubmittedJob
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.rendezvous.wanted import Decision, Wanted
from hpc_serve.submit.request.bounds import check_bounds, shown_bounds, shown_counts
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.services.carry_out import Done, settle, wait_for_others
from hpc_serve.submit.services.jobs import Job, counted
from hpc_serve.submit.services.stop import stop
from hpc_serve.submit.services.what_is import Looker
from hpc_serve.submit.status.status_reader import find_report, read_status, replicas_here

KEPT = (
    *("HPC_SERVE_ENV", "HPC_SERVE_MODEL", "HPC_SERVE_INTERFACE", "HPC_SERVE_TMPDIR", "HPC_SERVE_CACHE_DIR"),
    *("HPC_SERVE_CACHE_SIZE", "HPC_SERVE_CACHE_ARCHIVE_SIZE", "HPC_SERVE_PREFLIGHT", "HPC_SERVE_STALL_S"),
    *("HPC_SERVE_SILENCE_S", "HPC_SERVE_CANARY_S", "HPC_SERVE_STEP_S", "HPC_SERVE_HANG_S", "HPC_SERVE_KILL_WAIT_S"),
    *("HPC_SERVE_JOIN_S", "HPC_SERVE_ADD_AFTER_S", "HPC_SERVE_LEAVE_AFTER_S", "HF_HOME"),
)
"""A script that is submitted again finds these in its environment as it did the first time."""
_MOST_TRIES = 10
# The fields of `Wanted` that `scale` and `wake` change.
_OF_A_NUMBER = ("state", "least", "most", "count", "machines", "failures", "next_try_at", "problem")


def want_submission(
    store: ServiceStore,
    request: ServeRequest,
    replicas: int,
    environ: Mapping[str, str],
    adapters: Mapping[str, Adapter],
) -> tuple[Wanted, list[str]]:
    """Write down what a submission of so many `replicas` asks for, and claim that this program submits what is missing.

    MIN:MAX are the bounds of the whole service; one number is so many more, on machines of the request's kind.
    `adapters` come beside those that the service has. With `once` nothing is added to jobs that are there. Returns what
    is written, and the jobs that are there already. Raises HpcServeError.
    """

    def change(found: Wanted | None, everywhere: Sequence[Job], now: float) -> Wanted:
        others = _on_others(found, everywhere, request)
        here = [job for job in everywhere if not others or job.machine == request.machine]
        have = sum(job.replicas for job in here)
        if request.once and (everywhere if request.machine == DEFAULT_MACHINE else here) and found is not None:
            return replace(found, submitting=0)
        bounded = request.max_replicas is not None
        count = max(replicas, have) if bounded or request.once else have + replicas
        asleep = found.adapters if found is not None and found.state == "asleep" else {}
        before = found if found is not None and everywhere else Wanted(least=0, most=0, count=0, adapters=asleep)
        wanted = replace(
            _awake(before, request.replicas_per_job),
            least=replicas if bounded else count,
            most=request.max_replicas or count,
            count=count,
            is_kept=request.keep_up or request.is_elastic or before.is_kept,
            keep_up=request.keep_up or before.keep_up,
            notice_s=max(float(request.slurm.notice_s or 0), before.notice_s if others else 0.0),
            idle_stop_s=request.idle_stop_s or before.idle_stop_s,
            replicas_per_job=request.replicas_per_job,
            folder=os.getcwd(),
            variables={name: environ[name] for name in KEPT if environ.get(name)},
            submitting=max(0, count - have),
            submitting_at=now,
            coming=before.coming,
            adapters={**before.adapters, **adapters},
        )
        if others or request.machine != DEFAULT_MACHINE:
            return wanted.with_counts({**others, request.machine: count})
        return replace(wanted, machines={})

    wanted, here, _ = _change_seen(store, request.service, change)
    its = [job for job in here if job.machine == request.machine]
    return wanted, [job.job_id for job in (here if wanted.submitting else its or here)]


def take_back(store: ServiceStore, service: str, claimed: Wanted, before: Wanted | None) -> None:
    """Undo a submission of which nothing came. Raises StoreError."""

    def undo(found: Wanted | None) -> Wanted | None:
        is_mine = found is not None and found.submitting_at == claimed.submitting_at
        if is_mine and before is None:
            remove_file(wanted_file(store, service))
        return replace(before, submitting=0) if is_mine and before is not None else None

    change_wanted(store, service, undo)


def _change_seen(
    store: ServiceStore, service: str, change: Callable[[Wanted | None, Sequence[Job], float], Wanted]
) -> tuple[Wanted, list[Job], Wanted | None]:
    """Change what is wanted by what was seen, unless somebody else has changed it.

    Returns what is wanted now, the jobs that count, and what was wanted. Raises StoreError.
    """
    for _ in range(_MOST_TRIES):
        seen = wait_for_others(store, service)
        what_is, now = Looker(store=store, service=service).look(), time.time()
        here = counted(seen or Wanted(least=0, most=0, count=0), what_is, now)
        wanted = replace(change(seen, here, now), looked_at=now)
        if (done := change_wanted(store, service, _if_it_is(seen, wanted))) is not None:
            return done, here, seen
    raise StoreError(f"{service}: its file changed {_MOST_TRIES} times meanwhile. Try again.")


def _if_it_is(seen: Wanted | None, wanted: Wanted) -> Callable[[Wanted | None], Wanted | None]:
    return lambda found: wanted if found == seen else None


def _by_person(wanted: Wanted, why: str, now: float) -> Wanted:
    """Return the same with the decision of a person on its number."""
    return wanted.with_decisions(now, Decision(action="count", cause="person", why=why, count=wanted.count))


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """What was done: jobs that were `added`, replicas that have `ended`. `before` is how many there were.

    `counts` are the replicas that are wanted on each kind of machine, if kinds are named.
    """

    before: int
    counts: Mapping[str, int]
    added: tuple[SubmittedJob, ...] = ()
    ended: tuple[ReplicaStatus, ...] = ()


def scale(
    store: ServiceStore,
    service: str,
    replicas: int | Mapping[str, int],
    *,
    drain_s: float = 120.0,
    on_stop: Callable[[ReplicaStatus], None] = lambda status: None,
) -> Scaled:
    """Bring the service to so many replicas that wait, start or serve. Those of one job come and end together.

    A mapping has the replicas of kinds of machine by name; the other kinds stay as they are. `on_stop` is told of each
    replica that ends. Raises ServiceNotFoundError, SchedulerError, StoreError, InvalidRequestError for a number below
    one, or one that whole jobs do not give, and HpcServeError where another command stops the service meanwhile.
    """
    if isinstance(replicas, int) and replicas < 1:
        raise InvalidRequestError(f"{service} cannot have {replicas} replicas; `hpc-serve stop {service}` ends it.")
    found = replicas_here(store, find_report(store, service))
    if found[0].job.cluster == "local":
        raise InvalidRequestError(f"{service} runs on this machine alone: it cannot be scaled. Use --cluster slurm.")
    per_job = found[-1].job.replicas_per_job
    known = {job.machine for job in store.read_submitted(service)}

    def change(seen: Wanted | None, here: Sequence[Job], now: float) -> Wanted:
        awake = _awake(seen, per_job)
        counts = _counts_of(here) if seen is None else {}
        if not isinstance(replicas, int) or counts.keys() - {DEFAULT_MACHINE}:
            awake = awake.with_counts(counts) if counts else awake
        if seen is not None and seen.state != "awake":  # nothing is there: kinds that are not named stay away
            awake = replace(awake, machines={name: replace(one, count=0) for name, one in seen.machines.items()})
        wanted = _scaled(awake, replicas, service, known)
        _check_whole_jobs(here, wanted, service, per_job)
        return _by_person(wanted, f"scaled to {shown_counts(wanted.counts) or wanted.count}", now)

    changed, here, earlier = _change_seen(store, service, change)
    done = _settle_or_take_back(store, service, earlier or changed, drain_s=drain_s)
    if (now := read_wanted(store, service)) is None or now.state != "awake":
        raise HpcServeError(
            f"{service} was stopped by another command meanwhile: `hpc-serve wake {service}` starts it."
        )
    seen = {one.name: one for one in (*read_status(store, service).replicas, *found)}  # as they were before
    ended = [one for one in seen.values() if one.job_id in done.ended and not one.is_over]
    for status in ended:
        on_stop(status)
    before = sum(job.replicas for job in here)
    over = stop(store, ended, drain_s=drain_s, is_asked=True)
    return Scaled(before=before, counts=changed.counts, added=done.added, ended=over)


def _awake(seen: Wanted | None, per_job: int) -> Wanted:
    seen = seen or Wanted(least=1, most=1, count=1, replicas_per_job=per_job)
    for machine in seen.machines:
        seen = seen.with_failures(machine, 0)
    return replace(seen, state="awake", failures=0, next_try_at=0.0, problem="", coming=())


def _settle_or_take_back(store: ServiceStore, service: str, before: Wanted, **options: float) -> Done:
    """Do what is to be done now. If no job comes of more replicas, what was wanted `before` is wanted again.

    `options` are those of `settle`. Raises HpcServeError.
    """

    def as_before(found: Wanted | None) -> Wanted | None:
        if found is None or found.coming or found.count <= before.count:
            return None
        return replace(found, **{name: getattr(before, name) for name in _OF_A_NUMBER})

    try:
        return settle(store, service, **options)
    except BaseException:  # Ctrl-C too
        change_wanted(store, service, as_before)
        raise


def set_bounds(store: ServiceStore, service: str, least: int, most: int) -> Wanted:
    """Raises InvalidRequestError for bounds that cannot be, and for a service without a program that keeps it."""
    check_bounds(least, most)

    def change(found: Wanted | None) -> Wanted | None:
        if found is not None and found.machines.keys() - {DEFAULT_MACHINE}:
            raise InvalidRequestError(
                f"{service} has replicas on {shown_counts(found.counts)}: MIN:MAX is for one kind of machine. Give "
                f"each kind one number: hpc-serve scale {service} {shown_counts(found.counts)}."
            )
        if found is None or not found.is_kept:
            return None
        count = min(max(found.count, least), most) if found.state == "awake" else found.count
        wanted = replace(found, least=least, most=most, count=count, machines={})
        return _by_person(wanted, f"bounds set to {shown_bounds(least, most)}", time.time())

    changed = change_wanted(store, service, change)
    if changed is None:
        raise InvalidRequestError(
            f"The jobs of {service} do not decide how many they are: it was submitted without --replicas MIN:MAX or "
            f"--idle-stop. Give one number: hpc-serve scale {service} {most}."
        )
    return changed


@dataclass(frozen=True, kw_only=True)
class Woken:
    """The jobs that were submitted; if none, `note` says why none was needed."""

    jobs: tuple[SubmittedJob, ...] = ()
    note: str = ""


def wake(store: ServiceStore, service: str) -> Woken:
    """Submit the least number of replicas of a service, unless some wait, start or serve.

    Raises ServiceNotFoundError, and HpcServeError of every kind; then it is asleep as before if no job came of it.
    """
    found = replicas_here(store, find_report(store, service))
    before = read_wanted(store, service)
    if before is not None and before.is_submitting(time.time()):
        return Woken(note=f"another program submits {before.submitting} of it at the moment")

    def change(seen: Wanted | None, here: Sequence[Job], now: float) -> Wanted:
        wanted = _awake(seen, found[-1].job.replicas_per_job)
        if here:
            return replace(wanted, count=max(wanted.count, wanted.least))
        least = max(1, wanted.least)
        return _by_person(replace(wanted, least=least, most=max(least, wanted.most), count=least), "woken", now)

    _, here, earlier = _change_seen(store, service, change)
    if here:
        return Woken(
            note="; ".join(f"job {job.job_id} is {job.live[-1].state if job.live else job.state}" for job in here)
        )

    done = _settle_or_take_back(store, service, earlier or Wanted(least=1, most=1, count=0, state="stopped"))
    return Woken(jobs=done.added, note="" if done.added else "another program submits it")


def want_stop_of(store: ServiceStore, found: Sequence[ReplicaStatus]) -> None:
    """A person ends these replicas: no job shall bring them back. Raises StoreError.

    Where they are all of a service, it is stopped. A job of which others go on still counts. On this machine alone
    nothing brings them back. A damaged file is replaced if all end, and RecordError is raised all the same.
    """
    for service in dict.fromkeys(status.service for status in found if status.job.cluster != "local"):
        _want_stop_in(store, service, {status.name for status in found if status.service == service})


def _want_stop_in(store: ServiceStore, service: str, named: Set[str]) -> None:
    live = [one for one in read_status(store, service).replicas if not one.is_over]
    staying = {one.job_id for one in live if one.name not in named}
    ending = {one.job_id: one for one in live if one.job_id not in staying}

    def change(seen: Wanted | None) -> Wanted | None:
        if seen is None or (staying and not ending) or (not staying and seen.state == "stopped"):
            return None
        coming = tuple(job_id for job_id in seen.coming if job_id not in ending)
        changed = replace(seen, coming=coming, ending=(*seen.ending, *ending))
        if staying:
            ended = [(one.machine, one.job.replicas_per_job) for one in ending.values()]
            count = max(1, seen.count - sum(count for _, count in ended))
            changed = _without(replace(changed, count=count, least=min(seen.least, count)), ended)
        else:
            changed = replace(changed, count=0, state="stopped", decider="")
        return _by_person(changed, "stopped by hpc-serve stop", time.time())

    try:
        change_wanted(store, service, change)
    except RecordError:
        if not staying:  # the programs that keep it would bring it back
            change_wanted(store, service, change, if_damaged=Wanted(least=1, most=1, count=1))
        raise


def end_what_comes(store: ServiceStore, service: str) -> tuple[str, ...]:
    """End the jobs of a stopped service that another program submits at the moment. Returns their ids.

    Raises HpcServeError.
    """
    found = read_wanted_or_none(store, service)
    if found is None or found.state != "stopped":
        return ()
    return settle(store, service, drain_s=0.0).ended


# -- kinds of machine


def _on_others(found: Wanted | None, here: Sequence[Job], request: ServeRequest) -> dict[str, int]:
    """Return the replicas that a service has on other kinds of machine than the request's.

    Raises InvalidRequestError where they cannot be one service.
    """
    counts = ((found.counts if found is not None else {}) or _counts_of(here)) if here else {}
    others = {name: count for name, count in counts.items() if name != request.machine}
    has_bounds = request.max_replicas is not None or (found is not None and here and found.least < found.most)
    if has_bounds and (others or request.machine != DEFAULT_MACHINE):
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


def _counts_of(here: Sequence[Job]) -> dict[str, int]:
    """Return the replicas of these jobs on each kind of machine."""
    names = dict.fromkeys(job.machine for job in here)
    return {name: sum(job.replicas for job in here if job.machine == name) for name in names}


def _scaled(wanted: Wanted, replicas: int | Mapping[str, int], service: str, known: Set[str]) -> Wanted:
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
        name, count = unknown[0], replicas[unknown[0]]
        cure = f"`hpc-serve submit` with --name {service} and --replicas {name}:{count} makes one"
        raise InvalidRequestError(
            f"{service} has no script for {name}: {cure if count else f'leave out {name}:0'}. "
            f"It has been on {', '.join(sorted(known))}."
        )
    counts = {**(wanted.counts or {DEFAULT_MACHINE: wanted.count}), **replicas}
    if not any(counts.values()):
        raise InvalidRequestError(f"{service} would have no replica; `hpc-serve stop {service}` ends it.")
    return wanted.with_counts(counts)


def _without(wanted: Wanted, ended: Iterable[tuple[str, int]]) -> Wanted:
    """Return what is wanted once a person has ended so many replicas on these kinds of machine."""
    left = wanted.counts
    for machine, count in ended:
        left[machine] = max(0, left.get(machine, 0) - count)
    return wanted.with_counts(left) if wanted.machines and any(left.values()) else wanted


def _check_whole_jobs(here: Sequence[Job], wanted: Wanted, service: str, per_job: int) -> None:
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
