"""Reads the logs of a replica for the first cause of its failure: those of its script and nodes, and Slurm's words.

What the lines mean is decided in `hpc_serve.diagnose`; which files there are, in log_files.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from hpc_serve.submit.logs.log_files import files_of, lines_of, places_of, ray_logs_of
from hpc_serve.submit.status.job_status import never_starts

# Of a longer log, so much of its beginning and of its end is read.
_HEAD_BYTES = 8 * 2**20
_TAIL_BYTES = 32 * 2**20
_CHUNK_BYTES = 2**20
_RECORD = "record"
_WRONG = ("failed", "unresponsive", "unknown")
_MAY_GO_WRONG = ("starting",)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is wrong with a replica: findings, the first cause first; none if nothing is. `logs` are what there is.

    Ray's own are among them, and are read where the others tell of no cause, or of a symptom alone.
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
    """Read what there is of a replica, and say what is wrong. Raises StoreError."""
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
    """Of several replicas, the one whose trouble is asked about: a live one in trouble, else the latest."""
    in_trouble = [status for status in found if not status.is_over and status.state in _WRONG]
    return (in_trouble or list(found))[-1]


def read_log(path: Path) -> LogEvidence:
    """What a log file holds that may explain a failure; nothing if it cannot be read. Of a long one, both ends."""
    log = LogEvidence(path.name)
    for number, line in _numbered_lines(path):
        for part in line.split("\r"):  # a progress bar ends each of its states with a carriage return
            log.note(part, number)
    return log


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open("rb") as file:
            number = 1
            for raw in lines_of(file):
                yield number, raw.decode(errors="replace").rstrip("\n")
                number += raw.endswith(b"\n")
                if file.tell() > _HEAD_BYTES:
                    break
            number += _skip_middle(path, file.tell())
            file.seek(max(file.tell(), path.stat().st_size - _TAIL_BYTES))
            for raw in lines_of(file):
                yield number, raw.decode(errors="replace").rstrip("\n")
                number += raw.endswith(b"\n")
    except OSError:  # gone, or of a filesystem that does not answer: the other logs may tell
        return


def _skip_middle(path: Path, start: int) -> int:
    """How many line ends stand between `start` and the part of a long file that is read again."""
    end = path.stat().st_size - _TAIL_BYTES
    count = 0
    with path.open("rb") as file:
        file.seek(start)
        while (left := end - file.tell()) > 0 and (chunk := file.read(min(_CHUNK_BYTES, left))):
            count += chunk.count(b"\n")
    return count


def _unexplained(status: ReplicaStatus) -> Finding:
    lines = tuple(SeenLine(source=_RECORD, number=0, text=line) for line in status.last_log_lines[-5:])
    return Finding(name=UNKNOWN, cause=status.reason or status.state, cure=UNKNOWN_CURE, lines=lines)
