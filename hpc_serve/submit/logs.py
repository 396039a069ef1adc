"""The logs of a job: which files they are, their last lines, and their new lines as they come.

The batch script and the launcher of each node write one file each; a file may appear late, and on a shared filesystem
later than that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpc_serve.errors import StoreError

_POLL_S = 0.5
_CHUNK_BYTES = 64 * 1024


def log_files(job_id: str, log_dir: Path, batch_log: Path | None = None) -> list[Path]:
    """The files there are for a job: the batch script's first, then each node's launcher in order."""
    nodes = sorted(log_dir.glob(f"{job_id}-node*.log"), key=lambda path: (len(path.name), path.name))
    batch = batch_log or log_dir / f"{job_id}.log"
    return [path for path in (batch, *nodes) if path.exists()]


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
    """Lines from `offset` on, each with the offset after it; one without an end only if nothing will follow."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if line.endswith(b"\n") or whole_file:
                    offset += len(line)
                    yield line.decode(errors="replace").rstrip("\r\n"), offset
    except OSError:  # it is gone, or the filesystem does not answer: there may be more at the next look
        return


def _whole_lines(path: Path) -> int:
    """How many bytes of the file are lines with an end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, size - _CHUNK_BYTES))
            return start + file.read(size - start).rfind(b"\n") + 1
    except OSError:
        return 0
