"""The private folder of a launcher on its node, and the proof that the launcher lives: a lock that ends with it.

Whoever holds the lock of a folder's `owner` file may do as the owner: a launcher takes it before the file has its
name, so a file of that name without a holder is a dead launcher's. It is made here, removed here, and judged here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_serve.errors import InvalidRequestError
from hpc_serve.job import shared_memory
from hpc_serve.job.network import PortsInUseError
from hpc_serve.job.run_dir import is_private_folder, remove_job_dir
from hpc_serve.job.shared_memory import Segment
from hpc_serve.rendezvous.ownership import fault, require

_NAME = re.compile(r"hs-[0-9a-f]{8}")
_OWNER = "owner"
_SHARED_MEMORY = "shared-memory"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Whose a folder is.

    `mark` is in the environment of all its processes; `job_dir` is the run's folder in the shared home, which the
    head alone names.
    """

    mark: str
    job_dir: str | None = None


def new_name(root: str) -> str:
    """A name that no folder has."""
    return f"{root.rstrip('/')}/hs-{secrets.token_hex(4)}"


def make(path: Path, owner: Owner) -> int | None:
    """Make the folder (0700) and return the descriptor that holds its lock; None where the filesystem has no locks.

    Raises PortsInUseError if the name is taken, InvalidRequestError if it cannot be made, or if another user could
    put a folder of his own in its place.
    """
    host = socket.gethostname()
    require(
        path.parent,
        "scratch",
        called=f"HPC_SERVE_TMPDIR={path.parent} on {host}",
        advice="Set HPC_SERVE_TMPDIR to a node-local folder of yours or of root's, with the sticky bit if others "
        "write to it, as /tmp has it.",
    )
    try:
        path.mkdir(mode=0o700)
        try:
            return _lock_as(owner, path)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
    except FileExistsError:
        raise PortsInUseError(f"{path} exists on {host}; another name is needed.") from None
    except OSError as error:
        raise InvalidRequestError(
            f"{path} cannot be made on {host}: {error.strerror}. "
            "Set HPC_SERVE_TMPDIR to a node-local folder that exists on every node."
        ) from error


def _lock_as(owner: Owner, path: Path) -> int | None:
    unnamed = path / f"{_OWNER}.new"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # On a filesystem that several nodes see, a lock may say something on this one alone.
        os.write(descriptor, json.dumps({"node": socket.gethostname(), **asdict(owner)}).encode())
        unnamed.rename(path / _OWNER)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _NO_LOCKS:
            return None
        raise
    return descriptor


def found(root: Path) -> list[Path]:
    """The folders in `root` whose name and rights are those of a private folder of this user.

    None where others could give one of this user's folders such a name: in /tmp the sticky bit forbids it.
    """
    if fault(root, "scratch") is not None:
        return []
    paths = [path for path in root.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(path for path in paths if is_private_folder(path))


@contextlib.contextmanager
def dead_owner(path: Path, *, wait: bool = False) -> Iterator[Owner | None]:
    """Hold the lock of a folder whose launcher is gone.

    None if it lives, ran on another node, or somebody else clears the folder. With `wait`, until the launcher lets go.
    """
    try:
        descriptor = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        is_there = os.path.samestat(os.fstat(descriptor), os.lstat(path / _OWNER))
        owner = read_owner(path) if is_there else None
    except OSError:
        owner = None
    try:
        yield owner
    finally:
        os.close(descriptor)


def read_owner(path: Path) -> Owner | None:
    """Whose folder it is; None if nobody's, or that of a launcher on another node."""
    try:
        words = json.loads((path / _OWNER).read_text())
        if words.pop("node") == socket.gethostname():
            return Owner(**words)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        pass
    return None


def note_shared_memory(path: Path, segments: set[Segment]) -> None:
    """Write down what the run has in /dev/shm, for whoever removes the folder."""
    fresh = path / f"{_SHARED_MEMORY}.new"
    with contextlib.suppress(OSError):
        fresh.write_text(json.dumps(sorted([segment.name, segment.inode] for segment in segments)))
        fresh.rename(path / _SHARED_MEMORY)


def remove(path: Path, owner: Owner) -> None:
    """Remove the folder with what the run has elsewhere; its processes have ended, and its lock is the caller's.

    The `owner` file goes last: what is left half done, the next one finishes.
    """
    shared_memory.remove(_noted(path))
    if owner.job_dir is not None:
        remove_job_dir(Path(owner.job_dir))
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != _OWNER:
                os.unlink(entry.path)
        if os.listdir(path) == [_OWNER]:
            (path / _OWNER).unlink()
        path.rmdir()


def _noted(path: Path) -> list[Segment]:
    try:
        return [Segment(str(name), int(inode)) for name, inode in json.loads((path / _SHARED_MEMORY).read_text())]
    except (OSError, ValueError, TypeError):
        return []
