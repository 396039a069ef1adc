"""Derives how a replica is from its record and its engine's answer to a probe, or from its job alone. Pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpc_serve.client.replicas.status import ProbeResult, ReplicaStatus
from hpc_serve.durations import duration
from hpc_serve.rendezvous.record import DEFAULT_MACHINE, EndpointRecord, SubmittedJob
from hpc_serve.rendezvous.store import ABANDONED_AFTER_S


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
    if probe is not None and probe.status == "ready":
        return replace(status, state="ready")
    if probe is not None and probe.status == "draining":
        return replace(status, state="draining")
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
