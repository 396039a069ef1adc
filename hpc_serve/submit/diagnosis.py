"""Finds the replica whose logs a person means, reads them for the first cause of its failure, and writes bug reports.

`hpc_serve.diagnose` decides what the lines mean, and logs.py which files there are. Slurm's words count as well. A bug
report is one file with the diagnosis, the status, the script and the logs of a replica. Only what is listed here goes
in, and all of it passes `hpc_serve.redact`: records, keys and certificates stay where they are.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import platform
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hpc_serve
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
from hpc_serve.errors import StoreError
from hpc_serve.redact import redact
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.logs import both_ends, files_of, known_secrets, places_of
from hpc_serve.submit.slurm import scheduler
from hpc_serve.submit.slurm.scheduler import SchedulerView
from hpc_serve.submit.slurm.slurm_messages import pending_cure
from hpc_serve.submit.status.job_status import never_starts
from hpc_serve.submit.status.status_reader import find, is_same_replica, read_status

_SCHEDULER_S = 5.0  # a controller serves a whole site: it is asked less often than files are read
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
    logs, of_ray = tuple(files_of(status)), tuple(files_of(status, "ray"))
    if not (never_starts(status) or status.state in (*_WRONG, *_MAY_GO_WRONG)):
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
        lines = tuple(SeenLine(source=_RECORD, number=0, text=line) for line in status.last_log_lines[-5:])
        cure = pending_cure(status.pending_reason, status.job_id) or UNKNOWN_CURE
        findings = (Finding(name=UNKNOWN, cause=status.reason or status.state, cure=cure, lines=lines),)
    return Diagnosis(status=status, findings=findings, logs=(*logs, *of_ray))


def choose_replica(found: Sequence[ReplicaStatus]) -> ReplicaStatus:
    """Return the replica to diagnose: a live one in trouble, else the latest; if that was stopped, a live one."""
    alive = [status for status in found if not status.is_over]
    in_trouble = [status for status in alive if status.state in _WRONG]
    return (in_trouble or (alive if found[-1].state == "stopped" else ()) or found)[-1]


def read_log(path: Path, *, head_bytes: int = _HEAD_BYTES, tail_bytes: int = _TAIL_BYTES) -> LogEvidence:
    """Return the lines of a log file that may explain a failure. A long file is read at both ends."""
    log = LogEvidence(path.name)
    with contextlib.suppress(OSError):  # gone, or of a filesystem that does not answer: the other logs may tell
        for number, raw in both_ends(path, head_bytes=head_bytes, tail_bytes=tail_bytes):
            for part in raw.decode(errors="replace").rstrip("\n").split("\r"):  # a progress bar's states end so
                log.note(part, number)
    return log


def find_job(store: ServiceStore, target: str, *, to_follow: bool = False) -> tuple[ReplicaStatus, list[ReplicaStatus]]:
    """Return the replica to show logs of for `target`, a service, a job or a replica; and the other replicas.

    The order is: a ready job, a running job, the last ended job, a waiting job. A waiting job has no logs yet, so it
    comes before ended jobs only `to_follow` its logs. Raises ServiceNotFoundError.
    """
    found = find(store, target)
    status = max(reversed(found), key=lambda one: _rank(one, to_follow))
    others = [one for one in found if one.name != status.name]
    return with_batch_log(status), others


def _rank(status: ReplicaStatus, to_follow: bool) -> int:
    if status.state == "pending":
        return 1 if to_follow else -1
    return 3 if status.state == "ready" else 0 if status.is_over else 2


def with_batch_log(status: ReplicaStatus) -> ReplicaStatus:
    """Return a replica with the place of its script's log, as far as Slurm still knows it."""
    if status.batch_log is None and status.job.cluster == "slurm":  # submitted by hand: Slurm knows where it writes to
        return replace(status, batch_log=scheduler.job_state(status.job_id).batch_log)
    return status


def end_of(store: ServiceStore, status: ReplicaStatus) -> Callable[[], bool]:
    """Return a function that says whether that replica is over. It may be called often: Slurm is asked seldom."""
    slurm = SchedulerView(max_age_s=_SCHEDULER_S)
    asked_s, over = -math.inf, False

    def is_over() -> bool:
        nonlocal asked_s, over
        if not over and time.monotonic() - asked_s > _SCHEDULER_S:
            found = read_status(store, status.service, slurm=slurm).everywhere
            over = all(one.is_over for one in found if is_same_replica(one, status))
            asked_s = time.monotonic()
        return over

    return is_over


# -- the bug report

# Bytes of each log, from its beginning and from its end.
_REPORT_HEAD_BYTES, _REPORT_TAIL_BYTES = 2**20, 4 * 2**20
_LEFT_OUT = "… a part of this log was left out …\n"


def write_bundle(
    path: Path, diagnosis: Diagnosis, status: Mapping[str, Any], store: ServiceStore, environ: Mapping[str, str]
) -> list[str]:
    """Write a new private file `path` (tar, gzip); returns the names of what is in it. Raises StoreError."""
    secrets = known_secrets(diagnosis.status.service, store, environ)
    members = {name: redact(text, secrets) for name, text in _members(diagnosis, status, store)}
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            for name, text in members.items():
                content = text.encode()
                entry = tarfile.TarInfo(f"hpc-serve-report/{name}")
                entry.size, entry.mode, entry.mtime = len(content), 0o600, int(time.time())
                tar.addfile(entry, io.BytesIO(content))
    except FileExistsError:
        raise StoreError(f"{path} is there already: name another file.") from None
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}.") from error
    return list(members)


def _members(diagnosis: Diagnosis, status: Mapping[str, Any], store: ServiceStore) -> Iterator[tuple[str, str]]:
    yield "diagnosis.txt", f"{diagnosis.status.sentence}\n{diagnosis.report}\n"
    yield "status.json", json.dumps(status, indent=2, ensure_ascii=False) + "\n"
    yield (
        "versions.txt",
        f"hpc-serve {hpc_serve.__version__}\nPython {platform.python_version()}\n{platform.platform()}\n",
    )
    for path in diagnosis.logs:
        yield f"logs/{path.name}", _both_ends(path)
    for job in store.read_submitted(diagnosis.status.service):
        if job.job_id == diagnosis.status.job_id and job.script:
            yield "script.sh", _both_ends(Path(job.script))


def _both_ends(path: Path) -> str:
    """Return the text of a file; of a long one whole lines of both ends, since half a secret would not be found."""
    parts: list[bytes] = []
    last = 0
    try:
        for number, raw in both_ends(path, head_bytes=_REPORT_HEAD_BYTES, tail_bytes=_REPORT_TAIL_BYTES):
            is_cut = bool(parts) and not parts[-1].endswith(b"\n")
            if number > last + (not is_cut):
                while parts and not parts[-1].endswith(b"\n"):
                    parts.pop()
                parts.append(_LEFT_OUT.encode())
            last = number
            parts.append(raw)
    except OSError as error:
        return f"cannot be read: {error.strerror}\n"
    return b"".join(parts).decode(errors="replace")
