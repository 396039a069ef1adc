"""Brings files of a repository into the cache, several at once.

A large file that breaks off is continued: in this run, after a pause, and in the next run of the command.

A partial file lies in the cache's `blobs` folder, named after its SHA-256. It becomes the blob once its size and its
SHA-256 are those of the hub's list of files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from hpc_serve.errors import StoreError
from hpc_serve.hub.fetch.hub_repository import HubConnectionError, HubRepository, unwritable
from hpc_serve.hub.needed_files import RepositoryFile
from hpc_serve.sizes import GIB, readable_size

PART = ".part"
_AT_ONCE = 8
_TRIES = 6
"""Tries of a file without a new byte."""
_FIRST_PAUSE_S = 1.0
_TICK_S = 0.25
_SPARE_BYTES = GIB // 4  # filesystems that are quite full are slow, and other programs write too
_HASH_CHUNK_BYTES = 1 << 20
_MOST_BY_HTTP_BYTES = 50 * 10**9  # the hub gives no larger file by plain HTTP


class InterruptedFetchError(KeyboardInterrupt):
    """Ctrl-C; what has come is kept."""


class Download:
    """The files of one repository that are to be fetched."""

    def __init__(self, repository: HubRepository, files: Sequence[RepositoryFile]) -> None:
        self._repository = repository
        self._files = files
        self._waiting = deque(file for file in files if not repository.has(file))
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._here = {file: self._kept(file) for file in self._waiting}
        """Bytes in the cache of each file that was not whole; whoever fetches a file counts them."""
        self.total_bytes = sum(file.size_bytes for file in files)
        self.kept_bytes = self.done_bytes
        """Bytes that were in the cache before this run."""

    @property
    def done_bytes(self) -> int:
        """Bytes of the files that are in the cache."""
        return self.total_bytes - sum(file.size_bytes - size for file, size in self._here.items())

    @property
    def num_missing(self) -> int:
        """How many files are not here, or not whole."""
        return len(self._waiting)

    def check_space(self) -> None:
        """Raise StoreError where the cache's filesystem has no room for what is missing."""
        folder = self._repository.folder
        while not folder.exists():
            folder = folder.parent
        free, needed = shutil.disk_usage(folder).free, self.total_bytes - self.kept_bytes
        if needed and free < needed + min(_SPARE_BYTES, needed):
            raise StoreError(
                f"{self._repository.name} needs {readable_size(needed)} more in {self._repository.folder.parent}, and "
                f"its filesystem has {readable_size(free)} free. Remove models there that nobody uses (`hf cache ls`), "
                "or set HF_HOME to a folder with room, here and in the site file's `env`."
            )

    def run(self, on_tick: Callable[[int], None]) -> None:
        """Fetch all that is missing; `on_tick` is told every quarter of a second how many bytes are here.

        Raises InterruptedFetchError at Ctrl-C, StoreError where the disk refuses, HpcServeError for what the hub says.
        """
        threads = [threading.Thread(target=self._work, daemon=True) for _ in self._waiting][:_AT_ONCE]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(_TICK_S)
                    on_tick(self.done_bytes)
        except KeyboardInterrupt:
            self._stop.set()
            for thread in threads:
                thread.join(_TICK_S)  # one that hangs on a connection ends with this program; its part is on the disk
            raise InterruptedFetchError from None
        if self._errors:
            raise self._errors[0]
        on_tick(self.done_bytes)

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                file = self._waiting.popleft()
            except IndexError:
                return
            try:
                self._fetch(file)
                self._here[file] = file.size_bytes
            except _StoppedError:
                return
            except BaseException as error:  # handed to `run`
                folder = self._repository.folder
                self._errors.append(unwritable(folder, file.path, error) if isinstance(error, OSError) else error)
                self._stop.set()

    def _fetch(self, file: RepositoryFile) -> None:
        """Fetch one file, and try again while new bytes come."""
        self._repository.forget(file.path)  # one that was cut off
        tries, before = 0, -1
        while True:
            kept = self._here[file]
            tries, before = (0, kept) if kept > before else (tries + 1, before)
            try:
                if file.sha256 is not None and file.size_bytes <= _MOST_BY_HTTP_BYTES:
                    self._fetch_blob(file, file.sha256)
                self._repository.place(file.path)
                return
            except HubConnectionError as error:
                if tries + 1 >= _TRIES:
                    raise HubConnectionError(
                        f"{file.path}: {error} ({_TRIES} times without a new byte). The bytes that came are kept: the "
                        "same command goes on from there."
                    ) from error
            if self._stop.wait(_FIRST_PAUSE_S * 2 ** min(tries, 4)):
                raise _StoppedError

    def _fetch_blob(self, file: RepositoryFile, sha256: str) -> None:
        blob = self._repository.blob(sha256)
        with self._repository.lock(blob):
            if _size_of(blob) == file.size_bytes:  # another file of the same content, or another program
                return
            part = blob.with_name(blob.name + PART)
            with _open_part(part) as stream:
                digest, size = _digest_of(stream)
                self._here[file] = size
                if size < file.size_bytes:
                    with self._repository.read(file.path, size) as (begins_at, chunks):
                        if begins_at != size:
                            stream.truncate(0)
                            digest, size = hashlib.sha256(), 0
                        for chunk in chunks:
                            if self._stop.is_set():
                                raise _StoppedError
                            stream.write(chunk)
                            stream.flush()
                            digest.update(chunk)
                            self._here[file] = size = size + len(chunk)
                os.fsync(stream.fileno())
            if size < file.size_bytes:
                raise HubConnectionError(f"the answer ended after {size:,} of {file.size_bytes:,} bytes")
            if size != file.size_bytes or digest.hexdigest() != sha256:
                part.unlink()
                raise StoreError(
                    f"{file.path}: what came has {size:,} bytes and SHA-256 {digest.hexdigest()[:12]}…, and the hub's "
                    f"list of files says {file.size_bytes:,} bytes and {sha256[:12]}…, so it was removed. Run the same "
                    "command again; if that does not help, a proxy or a mirror (HF_ENDPOINT) gives another file."
                )
            part.replace(blob)

    def _kept(self, file: RepositoryFile) -> int:
        """Return the bytes of an incomplete file that are in the cache."""
        if file.sha256 is None:
            return 0
        blob = self._repository.blob(file.sha256)
        if _size_of(blob) == file.size_bytes:
            return file.size_bytes
        return min(_size_of(blob.with_name(blob.name + PART)), file.size_bytes)


class _StoppedError(Exception):
    """Another file has failed, or Ctrl-C."""


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _open_part(part: Path) -> BinaryIO:
    """Open a partial file, to read from its beginning and append at its end.

    Remove a link or another special file in its place. In a cache of several people, a link would lead the bytes into
    another file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    with contextlib.suppress(FileNotFoundError):
        found = part.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            part.unlink()
    return os.fdopen(os.open(part, flags | os.O_NOFOLLOW, 0o666), "r+b")


def _digest_of(part: BinaryIO) -> tuple[hashlib._Hash, int]:
    digest, size = hashlib.sha256(), 0
    part.seek(0)
    while chunk := part.read(_HASH_CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
    return digest, size
