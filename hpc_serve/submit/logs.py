"""The log files of one job: which files there are, their lines, and the engine's reports in them over time.

The batch script writes one file, and the launcher of each node another. A file may appear late, and a shared filesystem
may show it later still. The engine writes reports into the log of the run's head while it has work. Their times are by
the clock of that node. diagnosis.py decides which job's logs a person means.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.diagnose.evidence import read_head
from hpc_serve.errors import HpcServeError, StoreError
from hpc_serve.hub.local_weights import read_hub_settings
from hpc_serve.redact import secrets_of
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.vllm.log import EngineReport, read_report

LogWriter = Literal["script", "launcher", "engine", "ray"]
"""Who writes into logs. What `ray start` prints stands beside the engine's lines; Ray's own logs are other files."""
_LAUNCHERS = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+ [A-Z]+ hpc-serve: ")
_LOOKED_AT_LINES = 20_000
_POLL_S = 0.5
_CHUNK_BYTES = 64 * 1024
_LONGEST_LINE_BYTES = 1 << 20
"""A longer line comes in pieces: who writes without line ends must not fill the memory of whoever looks."""
_TAIL_BYTES, _TAIL_LINE_BYTES = 16 << 20, 1 << 10


def files_of(status: ReplicaStatus, writer: LogWriter | None = None, node: int | None = None) -> list[Path]:
    """Return the log files of a replica that exist now: the batch script's first, then each node's launcher in order.

    They are those with lines of `writer` (None: all but Ray's own logs), of the K-th `node` alone.
    """
    log_dir = Path(status.log_dir)
    number, own = r"\d+" if node is None else node, "-ray" if writer == "ray" else ""
    of_nodes = _of_nodes(_log_name(status), log_dir, rf"-node{number}{own}\.log")
    batch = Path(status.batch_log) if status.batch_log else log_dir / f"{status.job_id}.log"
    # False for what another user keeps.
    has_script = writer in (None, "script") and node is None and os.path.exists(batch)
    return [*([batch] if has_script else []), *([] if writer == "script" else of_nodes)]


def is_by(writer: LogWriter | None, line: str) -> bool:
    """Whether a line of its files is by `writer`: a launcher's have time, node and level, the engine's are as they are.

    >>> is_by("launcher", "2026-11-22 14:05:13 n1 INFO hpc-serve: launcher of 8b begins"), is_by("engine", "a line")
    (True, True)
    """
    return writer not in ("launcher", "engine") or (_LAUNCHERS.match(line) is not None) == (writer == "launcher")


def known_secrets(service: str, store: ServiceStore, environ: Mapping[str, str]) -> list[str]:
    """Return what must not be shown of a service's logs: its key, the hub's token, and secrets of the environment."""
    secrets = secrets_of(environ)
    with contextlib.suppress(HpcServeError, OSError):
        secrets.append(store.read_api_key(service))
    return [*secrets, read_hub_settings(environ).token or ""]


def tail_by(path: Path, lines: int, writer: LogWriter | None) -> list[str]:
    """Return the last lines of a file that are by `writer`, among its last 20,000. Raises StoreError."""
    if writer not in ("launcher", "engine"):
        return tail(path, lines)
    return [line for line in tail(path, _LOOKED_AT_LINES) if is_by(writer, line)][-lines:] if lines else []


def _log_name(status: ReplicaStatus) -> str:
    """Return the name in a replica's log files: its own, or its job's where each node has a server."""
    has_own = status.log_dir and _of_nodes(status.name, Path(status.log_dir), r"-node\d+\.log")
    return status.name if has_own else status.job_id


def _of_nodes(name: str, log_dir: Path, rest: str) -> list[Path]:
    found = (path for path in log_dir.glob(f"{name}-node*.log") if re.fullmatch(rest, path.name.removeprefix(name)))
    return sorted(found, key=lambda path: (len(path.name), path.name))


def places_of(status: ReplicaStatus) -> tuple[str, ...]:
    """Return the paths of a job's logs, existing or not: the batch script's, if elsewhere, and a pattern of the
    others."""
    pattern = f"{status.log_dir}/{status.job_id}*.log"
    is_elsewhere = status.batch_log is not None and Path(status.batch_log).parent != Path(status.log_dir)
    return (status.batch_log, pattern) if status.batch_log and is_elsewhere else (pattern,)


def tail(path: Path, lines: int, *, end: int | None = None) -> list[str]:
    """Return the last lines of a file, or of its first `end` bytes; none if it is not there. Raises StoreError.

    They are at most 16 MiB and 1 KiB for each line; of a line that is longer its end is returned.
    """
    chunks: list[bytes] = []
    try:
        with path.open("rb") as file:
            position = file.seek(0, os.SEEK_END) if end is None else end
            least, ends = max(0, position - _TAIL_BYTES - lines * _TAIL_LINE_BYTES), 0
            while position > least and ends <= lines:
                step = min(_CHUNK_BYTES, position - least)
                position = file.seek(position - step)
                chunks.append(file.read(step))
                ends += chunks[-1].count(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}.") from error
    return b"".join(reversed(chunks)).decode(errors="replace").splitlines()[-lines:] if lines > 0 else []


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of an open file from its position on, each with its line end. A very long line comes in pieces;
    only the last piece has the line end."""
    return iter(lambda: file.readline(_LONGEST_LINE_BYTES), b"")


def both_ends(path: Path, *, head_bytes: int, tail_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, each with its number from 1; of a long file the lines of both ends alone.

    The number of the next line tells how many lines were left out. Raises OSError.
    """
    with path.open("rb") as file:
        number, is_head = 1, True
        for raw in lines_of(file):
            yield number, raw
            number += raw.endswith(b"\n")
            if is_head and file.tell() > head_bytes:
                is_head, tail_begins = False, os.fstat(file.fileno()).st_size - tail_bytes
                while (left := tail_begins - file.tell()) > 0 and (chunk := file.read(min(_CHUNK_BYTES, left))):
                    number += chunk.count(b"\n")
                    if left <= _CHUNK_BYTES:  # the rest of a line that began in the part left out
                        number += any(rest.endswith(b"\n") for rest in lines_of(file))


def follow(
    find_files: Callable[[], Sequence[Path]], *, first_lines: int, is_over: Callable[[], bool]
) -> Iterator[tuple[Path, str]]:
    """Yield the last `first_lines` lines of each file, then each new line, until the job is over and all was read.

    Files that `find_files` finds later are read from their beginning.
    """
    offsets: dict[Path, int] = {}
    for path in find_files():
        offsets[path] = _whole_lines(path)
        for line in tail(path, first_lines, end=offsets[path]):
            yield path, line
    ends = False
    while True:
        new = False
        for path in find_files():
            for line, offset in _new_lines(path, offsets.setdefault(path, 0), whole_file=ends):
                offsets[path] = offset
                new = True
                yield path, line
        if ends and not new:
            return
        ends = ends or is_over()
        if not new and not ends:
            time.sleep(_POLL_S)


def _new_lines(path: Path, offset: int, *, whole_file: bool) -> Iterator[tuple[str, int]]:
    """Yield lines from `offset` on, each with the offset after it. In a `whole_file` the last line needs no line
    end."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            for line in lines_of(file):
                if line.endswith(b"\n") or whole_file or len(line) == _LONGEST_LINE_BYTES:
                    offset += len(line)
                    yield line.decode(errors="replace").rstrip("\r\n"), offset
    except OSError:  # it is gone, or the filesystem does not answer: the next call may find more
        return


def _whole_lines(path: Path) -> int:
    """Return the length in bytes of all lines that have a line end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, size - _CHUNK_BYTES))
            return start + file.read(size - start).rfind(b"\n") + 1
    except OSError:
        return 0


# -- the engine's reports

# Bytes that are read at both ends of a long log.
_HEAD_BYTES, _HISTORY_BYTES = 4 << 20, 16 << 20
_LONGEST_LINE = 4096
_SECONDS_A_MONTH, _SECONDS_A_DAY = 31 * 86_400, 86_400
_BEGINS = "hpc-serve: launcher of "
Reports = tuple[tuple[float, EngineReport], ...]
"""Each with its time in seconds since the epoch, in the order of time."""


def read_reports(
    path: Path, *, near: float, head_bytes: int = _HEAD_BYTES, tail_bytes: int = _HISTORY_BYTES
) -> Reports:
    """Return the reports of the last run in a log; none if it cannot be read.

    Lines have no year, and those times are taken that are next to `near`, in seconds since the epoch.
    """
    reports: dict[float, EngineReport] = {}
    with contextlib.suppress(OSError):  # gone, or of a filesystem that does not answer
        for _, raw in both_ends(path, head_bytes=head_bytes, tail_bytes=tail_bytes):
            line = raw[:_LONGEST_LINE].decode(errors="replace").rstrip("\n")
            if _BEGINS in line:  # the log of a job that Slurm runs again has several runs
                reports.clear()
            elif (report := read_report(line)) is not None and (at := read_head(line).at) is not None:
                since = _since_epoch(at, near)
                reports[since] = report.plus(reports.get(since))
    return tuple(sorted(reports.items(), key=lambda one: one[0]))


def _since_epoch(at: float, near: float) -> float:
    """Return the time of `read_head`, which has no year, as seconds since the epoch."""
    month, rest = divmod(int(at) - _SECONDS_A_DAY, _SECONDS_A_MONTH)
    day, second = divmod(rest, _SECONDS_A_DAY)
    year = time.localtime(near).tm_year
    times = [time.mktime((one, month + 1, day + 1, 0, 0, second, 0, 0, -1)) for one in (year - 1, year, year + 1)]
    return min(times, key=lambda one: abs(one - near))
