"""What people want of a service, and what its jobs decided of late: the value that claims.py reads and writes.

`submit`, `scale`, `wake` and `stop` write what is wanted; the deciding job writes what it decided. What follows from it
is left to submit/services/reconcile.py. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from hpc_serve.rendezvous.fields import Bounds, Timestamp
from hpc_serve.rendezvous.record import Adapter

_MOST_DECISIONS = 8
# sbatch is given a minute, and tries again itself. A program that says for longer that it submits has died.
SUBMITTING_S = 180.0

# asleep: the jobs ended because nobody asked for anything. stopped: a person ended the service.
WantedState = Literal["awake", "asleep", "stopped"]

# What is done. end: of a job that serves nobody yet. count: another number of replicas is wanted.
Action = Literal["submit", "drain", "end", "count", "wait"]

# person: somebody changed what is wanted. missing: fewer replicas than wanted. handover: a job nears its time limit.
# load: requests waited, or the others carry the load. idle: no request. surplus: more replicas than wanted.
# failed: jobs that were added failed. unknown: not everything could be asked. demand: a gateway started the service for
# a request, or ended it for another one.
Cause = Literal["person", "missing", "handover", "load", "idle", "surplus", "failed", "unknown", "demand"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One thing to do, its cause, and a sentence for people. `jobs` are the jobs that it is done to.

    `count` is the number of replicas to submit (action "submit"), or the new number wanted ("count"). `machine` is the
    kind of machine that it is about; "" where a service has one kind.
    """

    action: Action
    cause: Cause
    why: str
    jobs: tuple[str, ...] = ()
    count: int = 0
    at: Timestamp = 0.0
    machine: str = ""

    @property
    def sentence(self) -> str:
        """What was done, and why."""
        what = f"{_WORDS[self.action]} {self.count if self.action in ('submit', 'count') else ''}".strip()
        where = f" on {self.machine}" if self.machine else ""
        return f"{what}{' ' + ', '.join(self.jobs) if self.jobs else ''}{where}: {self.why}"


_WORDS: Mapping[Action, str] = {
    "submit": "submitted",
    "drain": "let drain",
    "end": "ended",
    "count": "wanted from now on",
    "wait": "waits",
}


@dataclass(frozen=True, kw_only=True)
class MachineWanted:
    """The replicas wanted on one kind of machine, and the failures of jobs there, as in `Wanted`."""

    count: int
    failures: int = 0
    next_try_at: Timestamp = 0.0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The replicas that a service shall have: `count` now, and `least` to `most` as its load moves the number.

    It sleeps after `idle_stop_s` seconds without a request (None: never). With `keep_up` a successor takes over before
    a job's time limit, which takes `notice_s` seconds of it. A job has `replicas_per_job` replicas. `folder` and
    `variables` are where, and with which environment, it was submitted; times are seconds since the epoch.

    `decider` is the replica whose job decides. `counter` grows with each change: a reader that has seen no growth for a
    while may decide in its place. `submitting` replicas are given to sbatch since `submitting_at`. `coming` are jobs
    that were added and have not served for long. `failures` of such jobs in a row put the next try off to
    `next_try_at`; `problem` says why. `ending` jobs were told to end. `most_running` requests were seen to run on one
    replica at once. `decided` are the last decisions. `looked_at` is when Slurm was last asked for this service.
    `adapters` are LoRA adapters by name, which each engine is to load.

    A service on several kinds of machine has the replicas of each in `machines`, by the site file's names; `least`,
    `most` and `count` are their sum then. Without them any job is of the one kind.
    """

    least: Annotated[int, Bounds(0)]
    most: int
    count: int
    state: WantedState = "awake"
    is_kept: bool = False
    keep_up: bool = False
    notice_s: float = 0.0
    idle_stop_s: float | None = None
    replicas_per_job: Annotated[int, Bounds(1, 1024)] = 1
    folder: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    decider: str = ""
    counter: int = 0
    submitting: int = 0
    submitting_at: Timestamp = 0.0
    coming: tuple[str, ...] = ()
    ending: tuple[str, ...] = ()
    failures: int = 0
    next_try_at: Timestamp = 0.0
    problem: str = ""
    most_running: int = 0
    looked_at: Timestamp = 0.0
    decided: tuple[Decision, ...] = ()
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    machines: Mapping[str, MachineWanted] = field(default_factory=dict)

    @property
    def is_elastic(self) -> bool:
        """Return whether the jobs themselves decide how many replicas there are."""
        return self.least < self.most or self.idle_stop_s is not None

    @property
    def counts(self) -> dict[str, int]:
        """The replicas wanted on each kind of machine; empty where no kind is named."""
        return {name: one.count for name, one in self.machines.items()}

    def on(self, machine: str) -> Wanted:
        """Return what is wanted on one kind of machine, as if it were a service of its own."""
        one = self.machines.get(machine, MachineWanted(count=0))
        return replace(self, least=one.count, most=one.count, machines={}, **vars(one))

    def with_counts(self, counts: Mapping[str, int]) -> Wanted:
        """Return the same with these replicas on each kind of machine, and no others."""
        machines = {
            name: replace(self.machines.get(name, MachineWanted(count=count)), count=count)
            for name, count in counts.items()
            if count
        }
        total = sum(counts.values())
        return replace(self, machines=machines, least=total, most=total, count=total)

    def with_failures(self, machine: str, failures: int, problem: str = "", next_try_at: float = 0.0) -> Wanted:
        """Return the same with so many failures of jobs on a kind of machine."""
        told: dict[str, Any] = {"failures": failures, "problem": problem, "next_try_at": next_try_at}
        if machine not in self.machines:
            return replace(self, **told)
        return replace(self, machines={**self.machines, machine: replace(self.machines[machine], **told)})

    def is_submitting(self, now: float) -> bool:
        """Return whether a program gives replicas to sbatch at the moment, or died a moment ago while it did."""
        return self.submitting > 0 and abs(now - self.submitting_at) < SUBMITTING_S

    def with_decisions(self, now: float, *decisions: Decision) -> Wanted:
        """Return the same with these decisions, made at `now`."""
        told = tuple(replace(one, at=now) for one in decisions)
        return replace(self, decided=(*self.decided, *told)[-_MOST_DECISIONS:])
