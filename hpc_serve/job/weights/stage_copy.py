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
    has_failed = threading.Event()

    def count(size: int) -> None:
        nonlocal copied
        with counting:
            copied += size
            on_copied(copied, total)

    def copy_block(file: RepositoryFile, at: int) -> None:
        end = min(at + _BLOCK_BYTES, file.size_bytes)
        buffer = memoryview(bytearray(min(_PIECE_BYTES, end - at)))
        with open_regular(source / file.path) as reader, (target / file.path).open("r+b") as writer:
            writer.seek(at)
            while at < end and not has_failed.is_set():
                if stop.is_set():
                    raise CopyStoppedError
                read = os.preadv(reader.fileno(), [buffer[: end - at]], at)
                if read == 0:
                    raise OSError(None, f"{source / file.path} has become shorter than {file.size_bytes:,} bytes")
                writer.write(buffer[:read])
                with contextlib.suppress(OSError):  # what was read is not needed again, the copy is
                    os.posix_fadvise(reader.fileno(), at, read, os.POSIX_FADV_DONTNEED)
                at += read
                count(read)

    for file in files:
        path = target / file.path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path, "xb", opener=_private) as made:
            made.truncate(file.size_bytes)
    blocks = [(file, at) for file in files for at in range(0, file.size_bytes, _BLOCK_BYTES)]
    with ThreadPoolExecutor(_READERS) as readers:
        copies = [readers.submit(copy_block, file, at) for file, at in blocks]
        done, _ = wait(copies, return_when=FIRST_EXCEPTION)
        has_failed.set()
    for one in done:
        one.result()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
