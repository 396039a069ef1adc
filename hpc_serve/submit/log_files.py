"""The log files of one job: which files there are, their last lines, and their new lines as they come.

The batch script writes one file, and the launcher of each node another. A file may appear late, and a shared filesystem
may show it later still. job_logs.py decides which job's logs a person means.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpc_serve.client.status import ReplicaStatus
from hpc_serve.errors import StoreError

_POLL_S = 0.5
_CHUNK_BYTES = 64 * 1024


def log_files(name: str, log_dir: Path, batch_log: Path | None = None) -> list[Path]:
    """The files of a replica that exist: the batch script's first, then each node's launcher in order."""
    nodes = sorted(log_dir.glob(f"{name}-node*.log"), key=lambda path: (len(path.name), path.name))
    batch = batch_log or log_dir / f"{name}.log"
    return [path for path in (batch, *nodes) if path.exists()]


def files_of(status: ReplicaStatus) -> list[Path]:
    """The log files of a replica and of its job's script that exist now."""
    log_dir = Path(status.log_dir)
    batch_log = Path(status.batch_log) if status.batch_log else log_dir / f"{status.job_id}.log"
    return log_files(status.name, log_dir, batch_log)


def places_of(status: ReplicaStatus) -> tuple[str, ...]:
    """Where a job's logs are or would be: the batch script's, if it lies elsewhere, and a pattern of the others."""
    pattern = f"{status.log_dir}/{status.job_id}*.log"
    is_elsewhere = status.batch_log is not None and Path(status.batch_log).parent != Path(status.log_dir)
    return (status.batch_log, pattern) if status.batch_log and is_elsewhere else (pattern,)


def tail(path: Path, lines: int, *, end: int | None = None) -> list[str]:
    """The last lines of a file, or of its first `end` bytes; none if it is not there. Raises StoreError."""
    try:
        with path.open("rb") as file:
            position = file.seek(0, os.SEEK_END) if end is None else end
            content = b""
            while position > 0 and content.count(b"\n") <= lines:
                step = min(_CHUNK_BYTES, position)
                position = file.seek(position - step)
                content = file.read(step) + content
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}.") from error
    return content.decode(errors="replace").splitlines()[-lines:] if lines > 0 else []


def follow(
    find_files: Callable[[], Sequence[Path]], *, first_lines: int, is_over: Callable[[], bool]
) -> Iterator[tuple[Path, str]]:
    """The last `first_lines` lines of each file, then each new line, until the job is over and all was read.

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
    """Lines from `offset` on, each with the offset after it. With `whole_file`, the last line needs no line end."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if line.endswith(b"\n") or whole_file:
                    offset += len(line)
                    yield line.decode(errors="replace").rstrip("\r\n"), offset
    except OSError:  # it is gone, or the filesystem does not answer: the next call may find more
        return


def _whole_lines(path: Path) -> int:
    """The length in bytes of all lines that have a line end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, size - _CHUNK_BYTES))
            return start + file.read(size - start).rfind(b"\n") + 1
    except OSError:
        return 0
