"""What a service looks like from here, as values and as sentences. Pure: records and answers in, words out."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpc_serve.rendezvous.record import EndpointRecord, SubmittedJob
from hpc_serve.rendezvous.store import ABANDONED_AFTER_S

ProbeStatus = Literal["live", "draining", "unhealthy", "other key", "stranger", "silent"]
Condition = Literal["live", "draining", "coming", "unreachable", "lost", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an engine said to a probe; `host` is the address that said it."""

    verdict: ProbeStatus
    host: str | None = None
    detail: str = ""

    @property
    def is_well(self) -> bool:
        return self.verdict in ("live", "draining")

    @property
    def is_ours(self) -> bool:
        return self.verdict in ("live", "draining", "unhealthy")


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """One replica: its record and what became of it. `host` is the address that answers, when it is live."""

    record: EndpointRecord
    condition: Condition
    host: str | None = None
    note: str = ""

    @property
    def base_url(self) -> str:
        """The engine's URL as OpenAI clients want it; only a live replica has one."""
        host = f"[{self.host}]" if self.host and ":" in self.host else self.host
        return f"http://{host}:{self.record.port}/v1"


@dataclass(frozen=True, kw_only=True)
class ServiceView:
    """One service of the store in `home`: its replicas, oldest first, and the jobs that have no record (yet).

    `withdrawn` are those whose end was noted before they published one. `problems` says which files are not trusted
    and why.
    """

    service: str
    home: str
    replicas: tuple[ReplicaView, ...] = ()
    queued: tuple[SubmittedJob, ...] = ()
    withdrawn: tuple[SubmittedJob, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def exists(self) -> bool:
        return bool(self.replicas or self.queued or self.withdrawn)

    @property
    def live(self) -> tuple[ReplicaView, ...]:
        return tuple(replica for replica in self.replicas if replica.condition == "live")

    @property
    def is_coming(self) -> bool:
        """Whether a replica may become ready without anybody doing anything."""
        return bool(self.queued) or any(replica.condition == "coming" for replica in self.replicas)

    @property
    def newest_failure(self) -> ReplicaView | None:
        """The last replica, if it failed."""
        newest = self.replicas[-1] if self.replicas else None
        return newest if newest is not None and newest.condition in ("failed", "lost") else None


def assess_replica(
    record: EndpointRecord, *, lease_age_s: float, wall_age_s: float, answer: Answer | None
) -> ReplicaView:
    """What a record is worth: `lease_age_s` without renewal by our clock, `wall_age_s` by its own date.

    `answer` is the engine's, or None if it was not asked because its record does not say that it is ready.
    """
    job = f"job {record.job_id}"
    if record.state == "failed":
        return ReplicaView(record=record, condition="failed", note=f"{_reason(record)} ({job})")
    if record.state == "stopped":
        return ReplicaView(record=record, condition="stopped", note=job)
    if answer is not None and answer.verdict == "live":
        return ReplicaView(record=record, condition="live", host=answer.host)
    if answer is not None and answer.verdict == "draining":
        return ReplicaView(record=record, condition="draining", note=job)
    if lease_age_s > record.lease_s or wall_age_s > ABANDONED_AFTER_S:
        silent_s = max(lease_age_s, wall_age_s)
        what = f"{job} does not renew its record, for {_duration(silent_s)} now; it was {_stage(record)}"
        return ReplicaView(record=record, condition="lost", note=what)
    if answer is not None:
        return ReplicaView(record=record, condition="unreachable", note=_unreachable(record, answer))
    condition: Condition = "draining" if record.state == "draining" else "coming"
    return ReplicaView(record=record, condition=condition, note=f"{_stage(record)} ({job})")


def summary(view: ServiceView) -> str:
    """The state of a service in one line, without its name."""
    if count := len(view.live):
        return "ready" if count == 1 else f"ready ({count} replicas)"
    for condition, word in _WORDS:
        matching = [replica for replica in view.replicas if replica.condition == condition]
        if matching:
            return f"{word}{matching[-1].note}"
        if condition == "coming" and view.queued:
            job = view.queued[-1]
            return f"submitted: job {job.job_id} has not started, or its record cannot be seen yet"
    return _end(view) or "nothing was ever published"


def _end(view: ServiceView) -> str | None:
    """How the last of a service's jobs ended."""
    ends = [(replica.record.updated_at, f"{replica.condition}: {replica.note}") for replica in view.replicas]
    ends += [(job.end.at, f"{job.end.state}: {job.end.reason} (job {job.job_id})") for job in view.withdrawn if job.end]
    return max(ends)[1] if ends else None


_WORDS: tuple[tuple[Condition, str], ...] = (
    ("coming", "starting: "),
    ("draining", "draining: "),
    ("unreachable", "unreachable: "),
    ("lost", "lost: "),
)


def listing(views: Sequence[ServiceView]) -> str:
    """All services, one a line."""
    return "\n".join(f"  {view.service}: {summary(view)}" for view in views)


def not_found(view: ServiceView, others: Sequence[ServiceView]) -> str:
    """Why there is no replica of `view.service` to talk to, what there is, and what to do."""
    name = view.service
    others = [other for other in others if other.service != name and other.exists]
    if view.exists:
        text = f"No replica of {name} takes requests. {name} is {summary(view)}."
        if view.is_coming:
            text += f" Wait for it: connect({name!r}, wait=600), or `hpc-serve wait {name}`."
        else:
            text += f" Start one: hpc-serve submit; see what happened: hpc-serve status {name}."
    else:
        close = difflib.get_close_matches(name, [other.service for other in others], n=1)
        text = f"No service {name!r} in {view.home}."
        text += f" Did you mean {close[0]!r}?" if close else " Start one: hpc-serve submit."
    if view.problems:
        text += "\nNot trusted:\n" + "\n".join(f"  {problem}" for problem in view.problems)
    if others:
        text += f"\nThere {'are' if len(others) > 1 else 'is'}:\n{listing(others)}"
    return text


def _stage(record: EndpointRecord) -> str:
    stage = record.stage or record.state
    return f"{stage} {record.progress.done}/{record.progress.total}" if record.progress else stage


def _reason(record: EndpointRecord) -> str:
    reason = record.reason or (f"exit code {record.exit_code}" if record.exit_code is not None else "no reason given")
    part = record.failed_part
    return reason if part is None or part in reason else f"{part}: {reason}"


def _unreachable(record: EndpointRecord, answer: Answer) -> str:
    places = ", ".join(f"{host}:{record.port}" for host in record.hosts) or "no address"
    job = f"job {record.job_id}"
    if answer.verdict == "unhealthy":
        return f"its engine at {answer.host}:{record.port} is not healthy: {answer.detail} ({job})"
    if answer.verdict == "other key":
        return (
            f"its engine at {answer.host}:{record.port} has another API key than the service's file: the key was "
            f"replaced after it started; restart it ({job})"
        )
    if answer.verdict == "stranger":
        return f"something else answers at {answer.host}:{record.port}, the engine is gone ({job})"
    return f"ready by its record, but no answer from {places} to this machine: {answer.detail} ({job})"


def _duration(seconds: float) -> str:
    for unit_s, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"
