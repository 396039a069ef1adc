"""Reads the logs of a replica, its script, and its nodes, and Slurm's words, for the first cause of its failure.

`hpc_serve.diagnose` decides what the lines mean, and log_files.py which files there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.diagnose.causes import (
    OWN_WORDS,
    UNKNOWN,
    UNKNOWN_CURE,
    Finding,
    SeenLine,
    find_causes,
    note_lines,
    tells_the_root,
)
from hpc_serve.diagnose.evidence import LogEvidence
from hpc_serve.submit.logs.log_files import both_ends, files_of, places_of, ray_logs_of
from hpc_serve.submit.status.job_status import never_starts

# Bytes that are read from the beginning and from the end of a longer log.
_HEAD_BYTES = 8 * 2**20
_TAIL_BYTES = 32 * 2**20
_RECORD = "record"
_WRONG = ("failed", "unresponsive", "unknown")
_MAY_GO_WRONG = ("starting",)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The findings about a replica, the first cause first; none if nothing is wrong. `logs` are all existing logs.

    Ray's own logs are among them. They are read if the other logs tell of no cause, or of a symptom alone.
    """

    status: ReplicaStatus
    findings: tuple[Finding, ...] = ()
    logs: tuple[Path, ...] = ()

    @property
    def cause(self) -> Finding | None:
        return next(iter(self.findings), None)

    @property
    def report(self) -> str:
        """For a person: the cause, what to do about it, the lines that tell it, and where the logs are."""
        cause = self.cause
        rows = []
        if cause is not None:
            rows += [f"Cause: {cause.cause.rstrip('.')}.", f"To do: {cause.cure}"]
            rows += ["Read from:", *(f"    {line.place}: {line.text}" for line in cause.lines)] if cause.lines else []
        others = [f"    {one.cause} ({one.lines[0].place})" for one in self.findings[1:] if one.lines]
        rows += ["Also seen, mostly as a consequence:", *others] if others else []
        return "\n".join([*rows, f"Logs: {', '.join(places_of(self.status))}"])


def diagnose_replica(status: ReplicaStatus) -> Diagnosis:
    """Read a replica's logs and record, and say what is wrong. Raises StoreError."""
    logs, of_ray = tuple(files_of(status)), tuple(ray_logs_of(status))
    if not _may_be_wrong(status):
        return Diagnosis(status=status, logs=(*logs, *of_ray))
    told = note_lines(LogEvidence(_RECORD, is_record=True), status.reason.splitlines())
    told.raised.clear()  # it repeats the logs
    evidence = [read_log(path) for path in logs] or [note_lines(LogEvidence(_RECORD), status.last_log_lines)]
    findings = find_causes([*evidence, told])
    if status.state in _WRONG and of_ray and not tells_the_root(findings):
        findings = find_causes([*evidence, *map(read_log, of_ray), told])
    if status.state in _MAY_GO_WRONG:
        findings = tuple(one for one in findings if one.is_known and one.name != OWN_WORDS)
    elif not findings:
        findings = (_unexplained(status),)
    return Diagnosis(status=status, findings=findings, logs=(*logs, *of_ray))


def _may_be_wrong(status: ReplicaStatus) -> bool:
    return never_starts(status) or status.state in _WRONG or status.state in _MAY_GO_WRONG


def choose_replica(found: Sequence[ReplicaStatus]) -> ReplicaStatus:
    """Return the replica to diagnose: a live one in trouble, else the latest."""
    in_trouble = [status for status in found if not status.is_over and status.state in _WRONG]
    return (in_trouble or list(found))[-1]


def read_log(path: Path, *, head_bytes: int = _HEAD_BYTES, tail_bytes: int = _TAIL_BYTES) -> LogEvidence:
    """Return the lines of a log file that may explain a failure. A long file is read at both ends."""
    log = LogEvidence(path.name)
    with contextlib.suppress(OSError):  # gone, or of a filesystem that does not answer: the other logs may tell
        for number, raw in both_ends(path, head_bytes=head_bytes, tail_bytes=tail_bytes):
            for part in raw.decode(errors="replace").rstrip("\n").split("\r"):  # a progress bar's states end so
                log.note(part, number)
    return log


def _unexplained(status: ReplicaStatus) -> Finding:
    lines = tuple(SeenLine(source=_RECORD, number=0, text=line) for line in status.last_log_lines[-5:])
    return Finding(name=UNKNOWN, cause=status.reason or status.state, cure=UNKNOWN_CURE, lines=lines)
