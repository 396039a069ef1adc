"""Archives of what engines have compiled, in the shared home: a node that has nothing of an engine begins with one.

There is one for each kind of engine, kind of machine, node of the layout and path, since compiled code names its path.
An archive is written whole or not at all, after the engine is ready, and is used only if nobody but its user can have
changed it. All together are bounded in size; those written last stay.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import logging
import os
import shutil
import tarfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from hpc_serve.errors import StoreError
from hpc_serve.job.machine.guarded_folders import READY, folder_bytes
from hpc_serve.rendezvous.files import make_private_folder, private_temporary
from hpc_serve.rendezvous.ownership import fault, open_itself, stat_fault

_log = logging.getLogger(__name__)
_ENDING = ".tar.gz"
_TEMPORARY_S = 3_600.0
_COMPRESSION = 1
# How many times the size of an archive its files may have.
_EXPANSION = 500


@dataclass(frozen=True, kw_only=True)
class CacheArchive:
    """The archive of one folder of caches. All in its folder may take `limit_bytes`."""

    path: Path
    limit_bytes: int

    @classmethod
    def of(cls, home: Path, folder: Path, *, key: str, machine: str, rank: int, limit_bytes: int) -> CacheArchive:
        """Return the archive of `folder` on a `machine`, for the node `rank` of an engine with this key."""
        digest = hashlib.sha256(f"{machine} {rank} {folder}".encode()).hexdigest()[:16]
        return cls(path=home / "caches" / f"{key}-{digest}{_ENDING}", limit_bytes=limit_bytes)

    def unpack(self, folder: Path) -> bool:
        """Fill an empty folder from it; whether there was one. Raises OSError where it is damaged, or a stranger's."""
        if (reason := fault(self.path.parent, "private")) is not None:
            raise OSError(reason)
        try:
            descriptor = open_itself(self.path)
        except FileNotFoundError:
            return False
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if (reason := stat_fault(self.path, found, "private")) is not None:
                raise OSError(reason)
            try:
                _unpack(file, folder, most_bytes=found.st_size * _EXPANSION)
            except (tarfile.TarError, EOFError, ValueError, zlib.error) as error:
                raise OSError(f"{self.path} is damaged: {error}") from error
        return True

    def pack(self, folder: Path) -> None:
        """Write the archive anew from the folder. An error is only logged: the engine serves without the archive."""
        try:
            if (size := folder_bytes(folder)) > self.limit_bytes:
                _log.info("%s takes %d bytes: too much to be kept for other nodes", folder, size)
                return
            with contextlib.suppress(FileExistsError):
                self.path.parent.mkdir(mode=0o700)  # not its parents: a home that was moved away is not made anew
            make_private_folder(self.path.parent)
            with private_temporary(self.path) as (temporary, descriptor):
                with os.fdopen(descriptor, "wb") as file:
                    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=_COMPRESSION) as archive:
                        archive.add(folder, arcname=".", filter=_plain)
                    file.flush()
                    os.fsync(descriptor)
                os.replace(temporary, self.path)
            self._remove_old()
            _log.info("what the engine has compiled is kept in %s for other nodes", self.path)
        except (OSError, StoreError, tarfile.TarError) as error:
            _log.warning("what the engine has compiled is not kept for other nodes: %s", error)

    def remove(self) -> None:
        """Remove it: an engine did not start with what it holds."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _remove_old(self) -> None:
        """Remove the oldest archives until all are within the bound, and the leftovers of interrupted writes."""
        now, found = time.time(), []
        for entry in os.scandir(self.path.parent):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(_ENDING):
                    found.append((status.st_mtime, entry.path, status.st_size))
                elif entry.name.endswith(".tmp") and now - status.st_mtime > _TEMPORARY_S:
                    os.unlink(entry.path)
        total = sum(size for _, _, size in found)
        for _, path, size in sorted(found):
            if total > self.limit_bytes:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                total -= size


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Keep files and folders alone, and remove their owners."""
    if not (member.isfile() or member.isdir()) or PurePosixPath(member.name) == PurePosixPath(READY):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _unpack(file: BinaryIO, folder: Path, *, most_bytes: int) -> None:
    """Raises ValueError for what `pack` does not write."""
    left = most_bytes
    with gzip.GzipFile(fileobj=file) as plain, tarfile.open(fileobj=plain, mode="r|") as archive:
        for member in archive:
            parts = PurePosixPath(member.name).parts
            if PurePosixPath(member.name).is_absolute() or ".." in parts:
                raise ValueError(f"{member.name!r} lies outside")
            path = folder.joinpath(*parts)
            if member.isdir():
                path.mkdir(mode=0o700, exist_ok=True)
                continue
            content = archive.extractfile(member) if member.isfile() else None
            left -= member.size
            if content is None or left < 0:
                raise ValueError(f"{member.name!r} is no file, or too much")
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o700)
            with os.fdopen(descriptor, "wb") as target:
                shutil.copyfileobj(content, target)
            os.utime(path, (member.mtime, member.mtime))  # builds compare times
        while plain.read(1 << 20):  # up to the end, where the checksum is
            pass
