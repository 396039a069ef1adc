"""How a replica is. One value with one vocabulary of states says it to clients, to `hpc-serve status` and to scripts.

A client derives the value from a replica's record and its engine's answer to a probe (`assess_replica`), or from its
job alone. `hpc_serve.submit` adds what the scheduler says about the job to the same value. The sentences for people are
here, too: a service in one line, a list of all, and why there is none to talk to. Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hpc_serve.rendezvous.fields import host_and_port, replica_name
from hpc_serve.rendezvous.record import DEFAULT_MACHINE, EndpointRecord, Progress, StartRecord, SubmittedJob
from hpc_serve.rendezvous.store import ABANDONED_AFTER_S
from hpc_serve.units import duration

# pending: submitted, and nothing published yet. ready: the engine has just answered. unresponsive: the engine should
# answer and does not, as its own launcher or a probe found, or the job runs and does not renew its record. draining: it
# takes no new requests. unknown: nobody who could tell has answered.
ReplicaState = Literal["pending", "starting", "ready", "unresponsive", "draining", "stopped", "failed", "unknown"]

# How an engine answered a probe. "hung": it is ours, and its gate says that it makes no steps.
# "other key": it is an engine of ours that was started with another API key.
ProbeStatus = Literal["ready", "draining", "hung", "unhealthy", "other key", "not ours", "no answer"]


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """An engine's answer to a probe. `host` is the address that was asked."""

    status: ProbeStatus
    host: str | None = None
    detail: str = ""

    @property
    def is_well(self) -> bool:
        return self.status in ("ready", "draining")

    @property
    def is_ours(self) -> bool:
        """Whether the engine has proved that it is this replica's."""
        return self.status in ("ready", "draining", "hung", "unhealthy")


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """One replica of a service. `replica` counts those of its job from 0, `restart` the runs of the job.

    `record` is what the replica has published in the present run of its job; None: nothing yet. `job` is the record, or
    else the job as `submit` or the scheduler knows it. `probe` is the engine's answer, and `record_age_s` how long
    the record has not been renewed. `state` was derived from them; `reason` explains it in a sentence for people.
    `stage` and `progress` say how far a replica is that starts or ends, also by Slurm's account. `end_reported_by_job`
    says that the job itself told how it ended. `scheduler_state`, `pending_reason`, `time_left` are Slurm's words.
    `successor` says how it stands with the job `successor_job_id` that takes over. Times are seconds since the epoch.
    `machine` is the kind of machine that it was submitted for.
    """

    job: EndpointRecord | SubmittedJob
    state: ReplicaState
    record: EndpointRecord | None = None
    probe: ProbeResult | None = None
    record_age_s: float = 0.0
    reason: str = ""
    stage: str = ""
    progress: Progress | None = None
    restart: int = 0
    replica: int = 0
    submitted_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    last_log_lines: tuple[str, ...] = ()
    end_reported_by_job: bool = False
    log_dir: str = ""
    batch_log: str | None = None
    scheduler_state: str = ""
    pending_reason: str = ""
    time_left: str | None = None
    successor: str = ""
    successor_job_id: str = ""
    predicted: Mapping[str, float] = field(default_factory=dict)
    machine: str = DEFAULT_MACHINE

    @property
    def service(self) -> str:
        return self.job.service

    @property
    def job_id(self) -> str:
        return self.job.job_id

    @property
    def started_at(self) -> float | None:
        """When its launcher began; None before its first record."""
        return self.record.started_at if self.record else None

    @property
    def start(self) -> StartRecord | None:
        """How far its start is, as far as its record tells."""
        return self.record.start if self.record else None

    @property
    def nodes(self) -> str:
        """The names of its nodes or, before they are known, how many there are."""
        names = [node.name for node in self.record.nodes] if self.record else []
        return " ".join(names) or str(self.job.num_nodes)

    @property
    def layout(self) -> str:
        """How its engine is laid out over its GPUs; empty before its nodes are known."""
        return self.record.layout if self.record and self.record.nodes else ""

    @property
    def predicted_and_measured(self) -> dict[str, tuple[float, float]]:
        """The figures that are both predicted and measured, in bytes, seconds and tokens."""
        measured = self.record.measured if self.record else {}
        return {name: (value, measured[name]) for name, value in self.predicted.items() if name in measured}

    @property
    def updated_at(self) -> float | None:
        """When it ended, else when its record was renewed last."""
        return self.ended_at or (self.record.updated_at if self.record else None)

    @property
    def name(self) -> str:
        """What people call it: its job's id, and its number in a job of several replicas."""
        return replica_name(self.job_id, self.replica, self.job.replicas_per_job)

    @property
    def is_over(self) -> bool:
        return self.state in ("stopped", "failed")

    @property
    def is_coming(self) -> bool:
        """Whether it may become ready without anybody doing anything.

        A launcher that has found its engine unresponsive goes on asking it, and starts it again.
        """
        is_found_unresponsive = self.record is not None and self.record.state == "unresponsive"
        return self.state in ("pending", "starting") or (self.state == "unresponsive" and is_found_unresponsive)

    @property
    def began_or_ended_at(self) -> float:
        """When it began or, if it is over, when it ended."""
        began_at = self.submitted_at or self.started_at or 0.0
        return (self.updated_at or began_at) if self.is_over else began_at

    @property
    def host(self) -> str | None:
        """The address that answered as this replica's engine, else the first that its record names."""
        if self.probe is not None and self.probe.is_ours:
            return self.probe.host
        return next(iter(self.record.hosts), None) if self.record else None

    @property
    def address(self) -> str:
        """Host and port, as a URL has them; empty if none is known."""
        if self.record is None or self.host is None:
            return ""
        return host_and_port(self.host, self.record.port)

    @property
    def base_url(self) -> str:
        """The engine's URL as OpenAI clients want it; for a replica that is ready."""
        return f"https://{self.address}/v1"

    @property
    def is_overdue(self) -> bool:
        """Whether renewals of its record are missing. Clocks differ, so this alone never decides that a job is over."""
        return self.record is not None and self.record_age_s > 2 * self.record.lease_s

    @property
    def detail(self) -> str:
        """Stage, failed part and reason, as far as they say more than the state."""
        stage = "" if self.is_over or self.stage in (self.state, "ready") else self.stage
        if stage and self.progress:
            stage += f" {self.progress.done}/{self.progress.total}"
        part = (self.record.failed_part if self.record else None) or ""
        part = "" if self.reason.startswith(f"{part} ") else part
        return ": ".join(words for words in (stage, part, self.reason) if words)

    @property
    def sentence(self) -> str:
        """State and detail in one line."""
        return f"{self.state}: {self.detail}" if self.detail and self.state != "ready" else self.state


@dataclass(frozen=True, kw_only=True)
class ServiceStatus:
    """One service of the store in `home`: its replicas, oldest first. `problems` names files that are not trusted."""

    service: str
    home: str
    replicas: tuple[ReplicaStatus, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def exists(self) -> bool:
        return bool(self.replicas)

    @property
    def ready(self) -> tuple[ReplicaStatus, ...]:
        return tuple(replica for replica in self.replicas if replica.state == "ready")

    @property
    def usable(self) -> tuple[ReplicaStatus, ...]:
        """Return the replicas that requests go to: those that are ready, else those whose engine hangs for now."""
        return self.ready or tuple(
            replica
            for replica in self.replicas
            if replica.state == "unresponsive" and replica.probe is not None and replica.probe.status == "hung"
        )

    @property
    def is_coming(self) -> bool:
        """Whether a replica may become ready without anybody doing anything."""
        return any(replica.is_coming for replica in self.replicas)

    @property
    def newest_failure(self) -> ReplicaStatus | None:
        """The last replica, if it failed or is not heard of any more."""
        newest = self.replicas[-1] if self.replicas else None
        return newest if newest is not None and newest.state in ("failed", "unknown") else None


# -- what a person reads

# Where no replica is ready, the first of these states that one of them is in describes the service.
_MOST_HOPEFUL_FIRST: tuple[ReplicaState, ...] = ("starting", "pending", "draining", "unresponsive", "unknown")


def summary(status: ServiceStatus) -> str:
    """The state of a service in one line, without its name."""
    if count := len(status.ready):
        return "ready" if count == 1 else f"ready ({count} replicas)"
    for state in _MOST_HOPEFUL_FIRST:
        if matching := [replica for replica in status.replicas if replica.state == state]:
            return f"{matching[-1].sentence} (job {matching[-1].name})"
    if not status.replicas:
        return "nothing was ever published"
    last = max(status.replicas, key=lambda replica: replica.updated_at or 0.0)
    return f"{last.sentence} (job {last.name})"


def listing(services: Sequence[ServiceStatus]) -> str:
    """All services, one a line."""
    return "\n".join(f"  {status.service}: {summary(status)}" for status in services)


def not_found(status: ServiceStatus, others: Sequence[ServiceStatus], *, wanted: str = "service") -> str:
    """Why there is no replica of `status.service` to talk to, what else there is, and what to do.

    `wanted` says what the name may have stood for.
    """
    name = status.service
    others = [other for other in others if other.service != name and other.exists]
    if status.exists:
        text = f"No replica of {name} takes requests. {name} is {summary(status)}."
        if status.is_coming:
            text += f" Wait for it: connect({name!r}, wait=600), or `hpc-serve wait {name}`."
        else:
            text += f" Start one: hpc-serve submit; see what happened: hpc-serve status {name}."
    else:
        close = difflib.get_close_matches(name, [other.service for other in others], n=1)
        text = f"No {wanted} {name!r} in {status.home}."
        text += f" Did you mean {close[0]!r}?" if close else " Start one: hpc-serve submit."
    if status.problems:
        text += "\nProblems:\n" + "\n".join(f"  {problem}" for problem in status.problems)
    if others:
        text += f"\nThere {'are' if len(others) > 1 else 'is'}:\n{listing(others)}"
    return text


# -- from a record and a probe, or from a job


def assess_replica(
    record: EndpointRecord,
    *,
    submitted: SubmittedJob | None = None,
    probe: ProbeResult | None = None,
    lease_age_s: float = 0.0,
    wall_age_s: float = 0.0,
) -> ReplicaStatus:
    """How a replica is, by its record and its engine's answer (None: it was not asked).

    `lease_age_s` is how long the record has not been renewed by this process's own clock, `wall_age_s` by the date in
    the record.
    """
    status = ReplicaStatus(
        job=record,
        state="unknown",
        record=record,
        probe=probe,
        record_age_s=max(lease_age_s, wall_age_s),
        reason=record.reason or "",
        stage=record.stage,
        progress=record.progress,
        restart=record.restart,
        replica=record.replica,
        submitted_at=submitted.submitted_at if submitted else None,
        exit_code=record.exit_code,
        last_log_lines=record.last_log_lines,
        log_dir=record.log_dir or "",
        batch_log=submitted.log_path if submitted else None,
        predicted=record.predicted or (submitted.predicted if submitted else {}),
        machine=submitted.machine if submitted else DEFAULT_MACHINE,
    )
    if record.state == "failed" or record.state == "stopped":
        return replace(status, state=record.state, reason=_end_reason(record), end_reported_by_job=True)
    if record.state != "ready":
        probe = None
    if probe is not None and (probe.status == "ready" or probe.status == "draining"):
        return replace(status, state=probe.status)
    if lease_age_s > record.lease_s or wall_age_s > ABANDONED_AFTER_S:
        age = duration(status.record_age_s)
        reason = f"its record has not been renewed for {age}; it was {record.stage_words}"
        return replace(status, state="unknown", stage="", progress=None, reason=reason)
    if probe is not None:
        return replace(status, state="unresponsive", reason=_why_unresponsive(record, probe))
    is_as_written = record.state == "draining" or record.state == "unresponsive"
    return replace(status, state=record.state if is_as_written else "starting")


def assess_submitted(job: SubmittedJob, replica: int = 0) -> ReplicaStatus:
    """Return how a replica without a record is: pending, or ended as its job's file says."""
    status = ReplicaStatus(
        job=job,
        replica=replica,
        state="pending",
        reason="it has not started, or its record cannot be seen yet",
        submitted_at=job.submitted_at,
        log_dir=str(Path(job.log_path).parent) if job.log_path else "",
        batch_log=job.log_path,
        predicted=job.predicted,
        machine=job.machine,
    )
    if job.end is None:
        return status
    return replace(
        status,
        state=job.end.state,
        reason=job.end.reason,
        ended_at=job.end.at,
        exit_code=job.end.exit_code,
        end_reported_by_job=True,
    )


def _end_reason(record: EndpointRecord) -> str:
    if record.reason or record.state == "stopped":
        return record.reason or ""
    return f"exit code {record.exit_code}" if record.exit_code is not None else "no reason given"


def _why_unresponsive(record: EndpointRecord, probe: ProbeResult) -> str:
    asked = f"{probe.host}:{record.port}"
    if probe.status in ("hung", "unhealthy"):
        return f"its engine at {asked} is not healthy: {probe.detail}"
    if probe.status == "other key":
        return (
            f"the engine at {asked} has another API key than the service's file: the key was replaced after it "
            "started; restart it"
        )
    if probe.status == "not ours":
        why = f" ({probe.detail})" if probe.detail else ""
        return f"something else answers at {asked}, the engine is gone{why}"
    places = ", ".join(f"{host}:{record.port}" for host in record.hosts) or "no address"
    return f"ready by its record, but no answer from {places} to this machine: {probe.detail}"
