"""Does what reconcile.py decides: claims it in the service's file, then asks jobs to drain, ends them, submits others.

Whoever decides must have seen what the file says now: a decision from an older look changes nothing. A program that
submits says so in the file first, so that no other submits the same meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_serve.errors import HpcServeError, SchedulerUnavailableError, StoreError
from hpc_serve.rendezvous.drain import DrainCause, DrainRequest, ask_to_drain, drain_file
from hpc_serve.rendezvous.record import SubmittedJob
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.rendezvous.wanted import SUBMITTING_S, Decision, Wanted
from hpc_serve.rendezvous.wanted_file import change_wanted, read_wanted
from hpc_serve.submit.services.hand_over import add_jobs
from hpc_serve.submit.services.jobs import WhatIs
from hpc_serve.submit.services.load import Windows
from hpc_serve.submit.services.reconcile import after, failed, noted, reconcile
from hpc_serve.submit.services.what_is import Looker
from hpc_serve.submit.slurm import scheduler

_log = logging.getLogger("hpc_serve.reconciler")
_DRAIN_S = 600.0
_WAY_DOWN_S = 20.0  # from the last answer to the end of a job
_STEP_S = 0.3
_RENEW_S = 10.0
_MOST_TRIES = 30
_DRAIN_CAUSES: dict[str, DrainCause] = {"handover": "handover", "person": "stop"}


@dataclass(frozen=True, kw_only=True)
class Done:
    """What was decided and done: jobs that were `added`, jobs that were asked to drain or told to end."""

    decisions: tuple[Decision, ...] = ()
    added: tuple[SubmittedJob, ...] = ()
    ended: tuple[str, ...] = ()

    def __add__(self, other: Done) -> Done:
        return Done(
            decisions=self.decisions + other.decisions, added=self.added + other.added, ended=self.ended + other.ended
        )


def step(
    looker: Looker,
    seen: Wanted,
    *,
    windows: Windows,
    drain_s: float = _DRAIN_S,
    decider: str = "",
) -> tuple[Wanted | None, Done]:
    """Look once, decide, and do it. Returns what is wanted then; None if somebody changed it since it was `seen`.

    Raises HpcServeError; what was not done is decided again at the next look.
    """
    store, service, what_is, now = looker.store, looker.service, looker.look(), time.time()
    known = noted(seen, what_is, now)
    decisions = reconcile(known, what_is, now, windows)
    told = tuple(one for one in decisions if one.action != "wait")
    most_running = max(known.most_running, looker.history.most_running if looker.history is not None else 0)
    changed = replace(after(known, decisions, now), most_running=most_running, looked_at=now)
    if not told and replace(changed, looked_at=seen.looked_at) == seen and 0 <= now - seen.looked_at < _RENEW_S:
        return seen, Done()

    def claim(found: Wanted | None) -> Wanted | None:
        if found is None or found.counter != seen.counter or (decider and found.decider != decider):
            return None
        for one in told:
            if one.action == "drain":
                _let_drain(store, what_is, one, drain_s, now)
        return changed

    claimed = change_wanted(store, service, claim)
    if claimed is None:
        return None, Done()
    ended = [job_id for one in told if one.action in ("drain", "end") for job_id in one.jobs]
    added: list[SubmittedJob] = []
    for one in sorted(told, key=lambda one: one.action == "submit"):  # last, since sbatch may refuse
        _log.info("%s", one.sentence)
        if one.action == "count" and looker.history is not None:
            looker.history.begin_anew(looker.clock())
        elif one.action == "end":
            for job_id in one.jobs:
                scheduler.cancel(job_id)
        elif one.action == "submit":
            claimed, jobs = submit_for(store, service, claimed, one)
            added += jobs
            looker.slurm.jobs(max_age_s=0.0)  # an older list lacks them
    return claimed, Done(decisions=told, added=tuple(added), ended=tuple(ended))


def settle(store: ServiceStore, service: str, *, drain_s: float = _DRAIN_S) -> Done:
    """Do all that is to be done now for what is wanted, in turns with other programs that do the same.

    If the jobs of one kind of machine are refused, those of the other kinds are submitted, and the error names them.
    Raises HpcServeError; SchedulerUnavailableError where Slurm does not answer.
    """
    done, refused = Done(), list[HpcServeError]()
    for _ in range(_MOST_TRIES):
        seen, looker = wait_for_others(store, service), Looker(store=store, service=service)
        if seen is None:
            return done
        try:
            changed, more = step(looker, seen, windows=Windows(), drain_s=drain_s)
        except HpcServeError as error:
            refused.append(error)
            if len(refused) < len(seen.machines):
                continue
            changed, more = seen, Done()
        done += more
        if changed is not None and not more.decisions:
            if refused:
                jobs = ", ".join(f"{job.job_id} ({job.machine})" for job in done.added)
                raise type(refused[0])(f"{refused[0]} Submitted all the same: job {jobs}.") if jobs else refused[0]
            if looker.slurm.problem:
                raise SchedulerUnavailableError(looker.slurm.problem)
            return done
    raise StoreError(f"{service} was changed {_MOST_TRIES} times meanwhile. Try again.")


def wait_for_others(store: ServiceStore, service: str) -> Wanted | None:
    """Return what is wanted once no other program submits jobs of the service. Raises StoreError."""
    deadline = time.monotonic() + SUBMITTING_S
    while True:
        found = read_wanted(store, service)
        if found is None or not found.is_submitting(time.time()) or time.monotonic() >= deadline:
            return found
        time.sleep(_STEP_S)


def submit_for(
    store: ServiceStore, service: str, claimed: Wanted, decision: Decision
) -> tuple[Wanted, tuple[SubmittedJob, ...]]:
    """Submit what was claimed, and write down which jobs it is. Raises HpcServeError, which is written down as well."""
    per_job = claimed.replicas_per_job
    count = -(-decision.count // per_job)
    before = decision.jobs if decision.cause == "handover" else ()
    added: list[SubmittedJob] = []
    where = decision.machine
    try:
        with as_submitted(claimed):
            for job_id in before:
                added += add_jobs(store, service, 1, predecessor=job_id, machine=where)
            if count > len(before):
                added += add_jobs(store, service, count - len(before), machine=where)
    except HpcServeError as error:
        problem = f"{'one' if decision.count == 1 else decision.count} could not be added: {error}"
        end_submission(store, service, claimed, added, lambda found: failed(found, problem, time.time(), where))
        raise
    return end_submission(store, service, claimed, added) or claimed, tuple(added)


def end_submission(
    store: ServiceStore,
    service: str,
    claimed: Wanted,
    added: Sequence[SubmittedJob],
    change: Callable[[Wanted], Wanted] = lambda found: found,
) -> Wanted | None:
    """Write down the jobs that came of a claim, and take it back. Raises StoreError."""
    ids = tuple(job.job_id for job in added)

    def end(found: Wanted | None) -> Wanted | None:
        if found is None:
            return None
        is_mine = (found.submitting, found.submitting_at) == (claimed.submitting, claimed.submitting_at)
        return change(replace(found, submitting=0 if is_mine else found.submitting, coming=(*found.coming, *ids)))

    return change_wanted(store, service, end)


def _let_drain(store: ServiceStore, what_is: WhatIs, decision: Decision, drain_s: float, now: float) -> None:
    cause = _DRAIN_CAUSES.get(decision.cause, "surplus")
    for job in (job for job in what_is.jobs if job.job_id in decision.jobs):
        left_s = max(1.0, job.ends_at - now - _WAY_DOWN_S) if job.ends_at is not None else drain_s
        deadline_s = left_s if decision.cause == "handover" else min(drain_s, left_s)
        request = DrainRequest(by=f"hpc-serve: {decision.why}", cause=cause, deadline_s=deadline_s, requested_at=now)
        for record in (status.record for status in job.live):
            if record is not None:
                ask_to_drain(drain_file(store, record.service, record.name), request)


@contextlib.contextmanager
def as_submitted(wanted: Wanted) -> Iterator[None]:
    """Be in the folder, and have the variables, with which the service was submitted: sbatch hands both on.

    A job's own program has both already.
    """
    if "SLURM_JOB_ID" in os.environ:
        yield
        return
    folder, before = Path.cwd(), dict(os.environ)
    os.environ.update(wanted.variables)
    try:
        if wanted.folder:
            with contextlib.suppress(OSError):
                os.chdir(wanted.folder)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.chdir(folder)
