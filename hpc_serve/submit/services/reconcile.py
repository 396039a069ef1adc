"""Decides what brings a service from what is to what is wanted: which jobs to submit, to let drain, to end, and why.

Pure: what_is.py finds out what is, jobs.py says which jobs count, carry_out.py does what is decided. The number that is
wanted is a field: load moves it within its bounds, idleness makes it 0, and a person changes it by `scale`, `wake` and
`stop`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hpc_serve.rendezvous.wanted import Cause, Decision, Wanted, WantedState
from hpc_serve.submit.services.jobs import Job, ServiceJobState, WhatIs, Windows, counted, is_due
from hpc_serve.units import duration, number_of

_AGAIN_S = 4.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0
_WINDOWS = Windows()
_SPARE = 0.8  # the others shall have room for what differs from one window to the next
# Jobs that serve nobody yet end first.
_SPARED_FIRST: tuple[ServiceJobState, ...] = ("pending", "unclear", "starting", "ready")


def pause_s(failures: int) -> float:
    """Return the seconds to wait after so many failures.

    >>> [pause_s(failures) for failures in (1, 2, 3, 9)]
    [30.0, 60.0, 120.0, 600.0]
    """
    return min(_FIRST_PAUSE_S * 2.0 ** (max(failures, 1) - 1), _LONGEST_PAUSE_S)


def after(wanted: Wanted, decisions: Sequence[Decision], now: float) -> Wanted:
    """Return what is wanted after these decisions, with the decisions that people are told."""
    for one in decisions:
        if one.action == "count":
            state: WantedState = "awake" if one.count else "asleep"
            wanted = replace(wanted, count=one.count, state=state)
        elif one.action == "drain":
            wanted = replace(wanted, coming=tuple(job_id for job_id in wanted.coming if job_id not in one.jobs))
        elif one.action == "end":
            wanted = replace(wanted, ending=tuple(dict.fromkeys((*wanted.ending, *one.jobs))))
        elif one.action == "submit":
            wanted = replace(wanted, submitting=one.count, submitting_at=now)
    return wanted.with_decisions(now, *(one for one in decisions if one.action != "wait"))


def noted(wanted: Wanted, what_is: WhatIs, now: float) -> Wanted:
    """Return what is wanted, after a look at the jobs that were added and at the jobs that were told to end.

    A job that serves until its successor is due did not fail, however short its time limit is.
    """
    jobs = {job.job_id: job for job in what_is.jobs}
    for job_id in wanted.coming:
        job = jobs.get(job_id)
        machine = job.machine if job is not None else ""
        has_served = job is not None and (job.is_settled or (job.state == "ready" and is_due(job, wanted, now)))
        if job is not None and job.is_live and not has_served:
            continue
        wanted = replace(wanted, coming=tuple(one for one in wanted.coming if one != job_id))
        if has_served:
            wanted = wanted.with_failures(machine, 0)
        elif job is not None and job.job_id not in wanted.ending and wanted.state == "awake":
            wanted = failed(wanted, f"job {job_id}, which was added, {job.why_over}", now, machine)
    return replace(wanted, ending=tuple(one for one in wanted.ending if one in jobs and jobs[one].is_live))


def failed(wanted: Wanted, problem: str, now: float, machine: str = "") -> Wanted:
    """Return what is wanted after one more failure: the next try on that machine waits, for twice as long each time."""
    failures = wanted.machines.get(machine, wanted).failures + 1
    return wanted.with_failures(machine, failures, problem, now + pause_s(failures))


def reconcile(wanted: Wanted, what_is: WhatIs, now: float, windows: Windows = _WINDOWS) -> list[Decision]:
    """Return what to do now, in order, and why; nothing if all is as wanted."""
    if wanted.state != "awake":
        return _end_all(wanted, what_is, now)
    counting = counted(wanted, what_is, now)
    decided = _changed_count(wanted, what_is, counting, now, windows)
    if decided is not None and decided.count == 0:
        return [decided, *_end_all(after(wanted, [decided], now), what_is, now)]
    if wanted.machines:
        return _on_each_machine(wanted, what_is, now)
    return _bring_to_count(wanted, what_is, counting, decided, now)


def _on_each_machine(wanted: Wanted, what_is: WhatIs, now: float) -> list[Decision]:
    """Return what to do on each kind of machine, as if it were a service. One kind is submitted to at a time."""
    found: list[Decision] = []
    for machine in dict.fromkeys((*filter(None, wanted.machines), *(job.machine for job in what_is.jobs))):
        its = replace(what_is, jobs=tuple(job for job in what_is.jobs if job.machine == machine))
        asked = wanted.on(machine)
        decisions = [
            replace(one, machine=machine) for one in _bring_to_count(asked, its, counted(asked, its, now), None, now)
        ]
        is_submitting = any(one.action == "submit" for one in found)
        found += [one for one in decisions if one.action != "submit" or not is_submitting]
    return found


def _bring_to_count(
    wanted: Wanted, what_is: WhatIs, counting: Sequence[Job], decided: Decision | None, now: float
) -> list[Decision]:
    found = [decided] if decided is not None else []
    count = decided.count if decided is not None else wanted.count
    found += _hand_over(wanted, what_is, counting, count, now)
    found += _tell_again(wanted, what_is, now)
    have = sum(job.replicas for job in counting)
    if have < count:
        found += _submit(wanted, what_is, count, have, now, decided)
    elif have > count and what_is.is_complete:
        why = f"there were {have}, of {count} that are wanted"
        reason = decided or Decision(action="count", cause="surplus", why=why)
        found += _end_surplus(counting, have - count, reason.cause, reason.why)
    return found


def _end_all(wanted: Wanted, what_is: WhatIs, now: float) -> list[Decision]:
    """End all jobs, with cause and words of the decision that no replica is wanted, if the file still has it."""
    decided = next((one for one in reversed(wanted.decided) if one.action == "count"), None)
    if decided is None or decided.count:
        cause: Cause = "idle" if wanted.state == "asleep" else "person"
        decided = Decision(action="count", cause=cause, why=f"the service is {wanted.state}")
    live = [job for job in what_is.jobs if job.is_live and job.state != "draining"]
    return _let_go([job for job in live if _may_be_told(job, wanted, now)], decided.cause, decided.why)


def _let_go(jobs: Sequence[Job], cause: Cause, why: str) -> list[Decision]:
    """End the jobs that do not serve, and let the others drain."""
    ending = tuple(job.job_id for job in jobs if job.state != "ready")
    serving = tuple(job.job_id for job in jobs if job.state == "ready")
    found = [Decision(action="end", cause=cause, why=why, jobs=ending)] if ending else []
    return found + ([Decision(action="drain", cause=cause, why=why, jobs=serving)] if serving else [])


def _tell_again(wanted: Wanted, what_is: WhatIs, now: float) -> list[Decision]:
    """Tell a job to end once more if it still waits in the queue."""
    told = [job for job in what_is.jobs if job.job_id in wanted.ending and job.state == "pending"]
    jobs = tuple(job.job_id for job in told if _may_be_told(job, wanted, now))
    return [Decision(action="end", cause="surplus", why="it was told to end, and waits", jobs=jobs)] if jobs else []


def _may_be_told(job: Job, wanted: Wanted, now: float) -> bool:
    """Return whether to tell a job to end. A second time needs a job that still waits in the queue, and a pause."""
    return job.job_id not in wanted.ending or (job.state == "pending" and now - wanted.looked_at >= _AGAIN_S)


# -- how many


def _changed_count(
    wanted: Wanted, what_is: WhatIs, counting: Sequence[Job], now: float, windows: Windows
) -> Decision | None:
    """Return the new number of replicas, by bounds, load and idleness; None if the number stays.

    A job that starts to take the place of another adds no room, so it delays nothing.
    """
    bounded = min(max(wanted.count, wanted.least), wanted.most)
    if bounded != wanted.count:
        return Decision(
            action="count", cause="person", why=f"{wanted.least} to {wanted.most} are wanted", count=bounded
        )
    load = what_is.load
    if load is None or not what_is.is_complete:
        return None
    have = sum(job.replicas for job in counting)
    serving = sum(job.replicas for job in what_is.jobs if job.state == "ready" and job.job_id not in wanted.ending)
    if load.surplus_s >= windows.add_after_s and wanted.count <= have <= serving:
        holding = sum(job.replicas for job in what_is.jobs if job.is_live and not is_due(job, wanted, now))
        room = _in_whole_jobs(wanted, wanted.most) - max(have, holding)
        more = min(room, math.ceil(load.surplus / max(1, load.most_running)))
        if more > 0:
            why = f"{number_of(load.waiting, 'request')} waited for {duration(load.surplus_s)}"
            return Decision(action="count", cause="load", why=why, count=min(wanted.count + more, wanted.most))
    if wanted.idle_stop_s is not None and load.is_known and load.idle_s >= wanted.idle_stop_s:
        return Decision(action="count", cause="idle", why=f"no request for {duration(load.idle_s)}")
    fewer = max(1, wanted.least, wanted.count - wanted.replicas_per_job)
    left = _in_whole_jobs(wanted, fewer)
    is_seen = load.is_known and load.known_s >= windows.leave_after_s
    if fewer >= wanted.count or not is_seen or load.peak > _SPARE * load.most_running * left:
        return None
    others = "the other could" if left == 1 else "the others could"
    most = f"{number_of(load.peak, 'request')} at once at most" if load.peak else "no request"
    why = f"{others} have carried the load for {duration(load.known_s)}: {most}"
    return Decision(action="count", cause="load", why=why, count=fewer)


def _in_whole_jobs(wanted: Wanted, replicas: int) -> int:
    return -(-replicas // wanted.replicas_per_job) * wanted.replicas_per_job


# -- what is done


def _submit(
    wanted: Wanted, what_is: WhatIs, count: int, have: int, now: float, decided: Decision | None
) -> list[Decision]:
    cause: Cause = decided.cause if decided is not None else "missing"
    why = decided.why if decided is not None else ""
    if not what_is.is_complete:
        return [Decision(action="wait", cause="unknown", why="Slurm, or a record, could not be asked")]
    if wanted.is_submitting(now):
        return [Decision(action="wait", cause=cause, why=f"{wanted.submitting} are being submitted")]
    if now < wanted.next_try_at:
        return [Decision(action="wait", cause="failed", why=f"{wanted.problem}; the next try waits")]
    missing = count - have
    ending = [job for job in what_is.jobs if job.is_live and is_due(job, wanted, now)]
    followed = {job.predecessor for job in what_is.jobs if job.is_live and job.state != "draining"}
    leaving = [job for job in ending if job.job_id not in followed][: -(-missing // wanted.replicas_per_job)]
    if leaving and not why:
        names = ", ".join(job.job_id for job in leaving)
        why = f"the time limit of {names} comes sooner than a later start would be ready"
        jobs = tuple(job.job_id for job in leaving)
        return [Decision(action="submit", cause="handover", why=why, jobs=jobs, count=missing)]
    if not why:
        replicas = number_of(have, "replica") if have else "no replica"
        why = f"there {'were' if have > 1 else 'was'} {replicas}, of {count} that are wanted"
    return [Decision(action="submit", cause=cause, why=why, count=missing)]


def _hand_over(wanted: Wanted, what_is: WhatIs, counting: Sequence[Job], count: int, now: float) -> list[Decision]:
    """Let a job drain near its time limit once other jobs are ready in its place."""
    ready = sum(job.replicas for job in counting if job.state == "ready")
    serving = [job for job in what_is.jobs if job.state == "ready" and job.job_id not in wanted.ending]
    followed = {job.predecessor: job.job_id for job in serving if job.predecessor}
    found = [
        Decision(action="drain", cause="handover", why=f"job {followed[job.job_id]} has taken over", jobs=(job.job_id,))
        for job in serving
        if job.job_id in followed
    ]
    if found:
        return found
    ending = [job for job in what_is.jobs if job.state == "ready" and is_due(job, wanted, now)]
    ending = sorted((job for job in ending if job.job_id not in wanted.ending), key=lambda job: job.ends_at or 0.0)
    spare = ready + sum(job.replicas for job in ending) - count
    for job in ending:
        if ready == 0 or spare < job.replicas:
            break
        spare -= job.replicas
        why = "the others serve, and its time limit comes"
        found.append(Decision(action="drain", cause="handover", why=why, jobs=(job.job_id,)))
    return found


def _end_surplus(counting: Sequence[Job], over: int, cause: Cause, why: str) -> list[Decision]:
    """End or drain surplus jobs: those that do not serve yet, then the least loaded, the newest; the own job last."""
    newest_first = list(reversed(counting))
    order = sorted(newest_first, key=lambda job: (job.is_own, _SPARED_FIRST.index(job.state), job.requests))
    surplus: list[Job] = []
    for job in order:
        if job.replicas <= over:
            over -= job.replicas
            surplus.append(job)
    return _let_go(surplus, cause, why)
