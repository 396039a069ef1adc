"""Copies files of a model with several readers at once, in blocks: one stream seldom gets all that a filesystem gives.

Each byte is read once. The written bytes are not read again here; the caller compares sizes and headers.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from hpc_serve.given_files import open_regular
from hpc_serve.hub.needed_files import RepositoryFile
from hpc_serve.sizes import MIB

_READERS = 8
_BLOCK_BYTES = 256 * MIB
_PIECE_BYTES = 8 * MIB


class CopyStoppedError(Exception):
    """The run ended while its model was copied."""


def copy_files(
    source: Path,
    target: Path,
    files: Sequence[RepositoryFile],
    *,
    on_copied: Callable[[int, int], None],
    stop: threading.Event,
) -> None:
    """Copy files of `source` to `target`, with the content of links in place of links.

    `on_copied` is told how many bytes are copied, of all. Raises OSError, CopyStoppedError once `stop` is set.
    """
    total, copied, counting = sum(file.size_bytes for file in files), 0, threading.Lock()

    def count(size: int) -> None:
        nonlocal copied
        with counting:
            copied += size
            on_copied(copied, total)

    for file in files:
        path = target / file.path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, file.size_bytes)
        finally:
            os.close(descriptor)
    blocks = [(file, at) for file in files for at in range(0, file.size_bytes, _BLOCK_BYTES)]
    failed = threading.Event()

    def copy(file: RepositoryFile, at: int) -> None:
        _copy_block(source / file.path, target / file.path, at, file.size_bytes, count, stop, failed)

    with ThreadPoolExecutor(_READERS) as readers:
        copies = [readers.submit(copy, file, at) for file, at in blocks]
        done, _ = wait(copies, return_when=FIRST_EXCEPTION)
        failed.set()
    for one in done:
        one.result()


def _copy_block(
    source: Path,
    target: Path,
    at: int,
    size: int,
    count: Callable[[int], None],
    stop: threading.Event,
    failed: threading.Event,
) -> None:
    end = min(at + _BLOCK_BYTES, size)
    buffer = memoryview(bytearray(min(_PIECE_BYTES, end - at)))
    with open_regular(source) as reader, target.open("r+b", buffering=0) as writer:
        while at < end:
            if stop.is_set():
                raise CopyStoppedError
            if failed.is_set():
                return
            read = os.preadv(reader.fileno(), [buffer[: end - at]], at)
            if read == 0:
                raise OSError(None, f"{source} has become shorter than {size:,} bytes")
            written = 0
            while written < read:
                written += os.pwrite(writer.fileno(), buffer[written:read], at + written)
            with contextlib.suppress(OSError):  # what was read is not needed again, the copy is
                os.posix_fadvise(reader.fileno(), at, read, os.POSIX_FADV_DONTNEED)
            at += read
            count(read)
