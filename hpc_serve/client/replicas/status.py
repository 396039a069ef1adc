"""How a replica is. One value with one vocabulary of states says it to clients, to `hpc-serve status` and to scripts.

Pure. A client derives the value from a replica's record and its engine's answer to a probe. `hpc_serve.submit` adds
what the scheduler says about the job to the same value. The sentences are in messages.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hpc_serve.rendezvous.names import replica_name
from hpc_serve.rendezvous.record import EndpointRecord, NodeRecord, Progress, StartRecord, SubmittedJob
from hpc_serve.rendezvous.store import ABANDONED_AFTER_S

# pending: submitted, and nothing published yet. ready: the engine has just answered. unresponsive: the engine should
# answer and does not, as its own launcher or a probe found, or the job runs and does not renew its record. draining: it
# takes no new requests. unknown: nobody who could tell has answered.
ReplicaState = Literal["pending", "starting", "ready", "unresponsive", "draining", "stopped", "failed", "unknown"]

# How an engine answered a probe. "other key": it is an engine of ours that was started with another API key.
ProbeStatus = Literal["ready", "draining", "unhealthy", "other key", "not ours", "no answer"]

# Fields of a record and of a submitted job that a status holds as they are written.
_TAKEN_FROM_RECORD = (
    *("service", "job_id", "cluster", "model", "stand_in", "stage", "progress", "nodes", "num_nodes", "gpus_per_node"),
    *("tensor_parallel_size", "pipeline_parallel_size", "restart", "replica", "started_at", "updated_at"),
    *("state_since", "engine_restarts", "replicas_per_job", "failed_part", "exit_code", "last_log_lines", "measured"),
    *("cache", "loading", "start"),
)
_TAKEN_FROM_SUBMITTED = (
    *("service", "job_id", "cluster", "model", "num_nodes", "gpus_per_node", "submitted_at", "predicted"),
    "replicas_per_job",
)


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
        return self.status in ("ready", "draining", "unhealthy")


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """One replica of a service, or its job while it has published no record. `replica` counts those of the job from 0.

    `reason` is a sentence for people. `record` and `probe` are what the state was derived from; `record` is None when
    the job has published none in its present run. `record_age_s` is how long the record has not been renewed.
    `end_reported_by_job` says that the job itself told how it ended. `scheduler_state`, `pending_reason`, `time_left`
    are Slurm's words. `successor` says how it stands with the job `successor_job_id` that takes over. `start` is
    how far its start is. Times are seconds since the epoch; at `state_since` the state of the record began. `measured`
    and `predicted` hold bytes, seconds and tokens.
    """

    service: str
    job_id: str
    state: ReplicaState
    cluster: str = "slurm"
    model: str = ""
    stand_in: str | None = None
    stage: str = ""
    progress: Progress | None = None
    start: StartRecord | None = None
    reason: str = ""
    nodes: tuple[NodeRecord, ...] = ()
    num_nodes: int = 1
    gpus_per_node: int = 0
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    restart: int = 0
    replica: int = 0
    replicas_per_job: int = 1
    submitted_at: float | None = None
    started_at: float | None = None
    updated_at: float | None = None
    state_since: float | None = None
    engine_restarts: int = 0
    cache: str = ""
    loading: str = ""
    failed_part: str | None = None
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
    measured: Mapping[str, float] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)
    record: EndpointRecord | None = None
    record_age_s: float = 0.0
    probe: ProbeResult | None = None

    @property
    def name(self) -> str:
        """What people call it: its job's id, and its number in a job of several replicas."""
        return replica_name(self.job_id, self.replica, self.replicas_per_job)

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
        """Host and port; empty if none is known."""
        return f"{self.host}:{self.record.port}" if self.record and self.host else ""

    @property
    def base_url(self) -> str:
        """The engine's URL as OpenAI clients want it; for a replica that is ready."""
        assert self.record is not None
        host = f"[{self.host}]" if self.host and ":" in self.host else self.host
        return f"https://{host}:{self.record.port}/v1"

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
        part = self.failed_part if not self.reason.startswith(f"{self.failed_part} ") else ""
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
    def is_coming(self) -> bool:
        """Whether a replica may become ready without anybody doing anything."""
        return any(replica.is_coming for replica in self.replicas)

    @property
    def newest_failure(self) -> ReplicaStatus | None:
        """The last replica, if it failed or is not heard of any more."""
        newest = self.replicas[-1] if self.replicas else None
        return newest if newest is not None and newest.state in ("failed", "unknown") else None


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
    status = _as_written(record, submitted, probe, max(lease_age_s, wall_age_s))
    if record.state == "failed" or record.state == "stopped":
        return replace(status, state=record.state, reason=_end_reason(record), end_reported_by_job=True)
    if record.state != "ready":
        probe = None
    if probe is not None and probe.status == "ready":
        return replace(status, state="ready")
    if probe is not None and probe.status == "draining":
        return replace(status, state="draining")
    if lease_age_s > record.lease_s or wall_age_s > ABANDONED_AFTER_S:
        age = _duration(status.record_age_s)
        reason = f"its record has not been renewed for {age}; it was {record.stage_words}"
        return replace(status, state="unknown", stage="", progress=None, reason=reason)
    if probe is not None:
        return replace(status, state="unresponsive", reason=_why_unresponsive(record, probe))
    is_as_written = record.state == "draining" or record.state == "unresponsive"
    return replace(status, state=record.state if is_as_written else "starting")


def assess_submitted(job: SubmittedJob, replica: int = 0) -> ReplicaStatus:
    """How a replica of a job is that has published no record: pending, or ended as it is written down."""
    status = ReplicaStatus(
        **{name: getattr(job, name) for name in _TAKEN_FROM_SUBMITTED},
        replica=replica,
        state="pending",
        reason="it has not started, or its record cannot be seen yet",
        log_dir=str(Path(job.log_path).parent) if job.log_path else "",
        batch_log=job.log_path,
    )
    if job.end is None:
        return status
    return replace(
        status,
        state=job.end.state,
        reason=job.end.reason,
        updated_at=job.end.at,
        exit_code=job.end.exit_code,
        end_reported_by_job=True,
    )


def _as_written(
    record: EndpointRecord, submitted: SubmittedJob | None, probe: ProbeResult | None, age_s: float
) -> ReplicaStatus:
    return ReplicaStatus(
        **{name: getattr(record, name) for name in _TAKEN_FROM_RECORD},
        state="unknown",
        reason=record.reason or "",
        submitted_at=submitted.submitted_at if submitted else None,
        log_dir=record.log_dir or "",
        batch_log=submitted.log_path if submitted else None,
        predicted=record.predicted or (submitted.predicted if submitted else {}),
        record=record,
        record_age_s=age_s,
        probe=probe,
    )


def _end_reason(record: EndpointRecord) -> str:
    if record.reason or record.state == "stopped":
        return record.reason or ""
    return f"exit code {record.exit_code}" if record.exit_code is not None else "no reason given"


def _why_unresponsive(record: EndpointRecord, probe: ProbeResult) -> str:
    asked = f"{probe.host}:{record.port}"
    if probe.status == "unhealthy":
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


def _duration(seconds: float) -> str:
    for unit_s, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"
