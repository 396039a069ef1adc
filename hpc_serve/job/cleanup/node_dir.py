"""A launcher's private folder on its node, and the lock that shows whether the launcher lives.

A launcher holds a lock on the folder's `owner` file as long as it lives. It locks the file before it gives it the name
`owner`. An `owner` file without a lock therefore belongs to a launcher that has ended. The process that locks it then
may remove the folder. `sweep` decides when to look for such folders.
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
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from hpc_serve.errors import InvalidRequestError, RecordError
from hpc_serve.job.cleanup import shared_memory
from hpc_serve.job.cleanup.run_dir import is_private_folder, remove_run_dir
from hpc_serve.job.cleanup.shared_memory import Segment
from hpc_serve.job.machine.network import PortsInUseError
from hpc_serve.rendezvous.fields import to_json_text
from hpc_serve.rendezvous.files import read_json, write_private
from hpc_serve.rendezvous.ownership import fault, require

_NAME = re.compile(r"hs-[0-9a-f]{8}")
_OWNER = "owner"
_SWEEP = "hpc_serve.job.cleanup.sweep"
_STOP_TIMEOUT_S = 5.0
_SHARED_MEMORY = "shared-memory"
SeenBy = Literal["watcher", "launcher"]
"""Who has listed segments: each writes a file of its own."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)


@dataclass(frozen=True, kw_only=True)
class DirOwner:
    """The launcher that a folder belongs to, as the `owner` file names it.

    `run_mark` is in the environment of all its processes. `run_dir` is the run's folder in the shared home; only the
    head's launcher names it. `node` is the host of the launcher.
    """

    run_mark: str
    run_dir: str | None = None
    node: str = field(default_factory=socket.gethostname)


def choose_name(root: str) -> str:
    """Return a new name for a folder in `root`."""
    return f"{root.rstrip('/')}/hs-{secrets.token_hex(4)}"


@contextlib.contextmanager
def private_node_dir(path: Path, owner: DirOwner) -> Iterator[Path]:
    """Make the node-local folder, and remove it at the end, even if this process is killed.

    Raises PortsInUseError if the name is taken, InvalidRequestError if the folder cannot be made.
    """
    with contextlib.ExitStack() as at_end:
        lock = make(path, owner)
        sweeper = subprocess.Popen(
            [sys.executable, "-m", _SWEEP, str(path)], stdin=subprocess.PIPE, start_new_session=True
        )
        at_end.callback(_stop_sweeper, sweeper)
        if lock is not None:
            at_end.callback(os.close, lock)
        at_end.callback(remove, path, owner)
        yield path


def _stop_sweeper(sweeper: subprocess.Popen[bytes]) -> None:
    assert sweeper.stdin is not None
    sweeper.stdin.close()
    try:
        sweeper.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # it still clears what an earlier run has left; the next run goes on with that
        sweeper.kill()
        sweeper.wait()


def make(path: Path, owner: DirOwner) -> int | None:
    """Make the folder (0700) and lock it; returns the descriptor that holds the lock.

    Returns None where the filesystem has no locks. Raises PortsInUseError if the name is taken, InvalidRequestError if
    the folder cannot be made, or if another user could put a folder in its place.
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
            return _write_owner(owner, path)
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


def _write_owner(owner: DirOwner, path: Path) -> int | None:
    unnamed = path / f"{_OWNER}.new"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # On a filesystem that several nodes see, the lock may be visible on this node alone.
        os.write(descriptor, to_json_text(owner).encode())
        unnamed.rename(path / _OWNER)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _NO_LOCKS:
            return None
        raise
    return descriptor


def list_private(root: Path) -> list[Path]:
    """Return the folders in `root` that have the name and the mode of a private folder and belong to this user.

    The list is empty if other users may rename folders in `root`: one could give another folder of this user such a
    name. The sticky bit of /tmp forbids that.
    """
    if fault(root, "scratch") is not None:
        return []
    paths = [path for path in root.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(path for path in paths if is_private_folder(path))


@contextlib.contextmanager
def lock_abandoned(path: Path, *, wait: bool = False) -> Iterator[DirOwner | None]:
    """Lock a folder whose launcher has ended, and yield that launcher.

    Yields None if the launcher lives, if it ran on another node, or if another process has the lock to remove the
    folder. If `wait` is true, it first waits until the lock is free.
    """
    try:
        descriptor = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        still_exists = os.path.samestat(os.fstat(descriptor), os.lstat(path / _OWNER))
        owner = read_owner(path) if still_exists else None
    except OSError:
        owner = None
    try:
        yield owner
    finally:
        os.close(descriptor)


def read_owner(path: Path) -> DirOwner | None:
    """The launcher that the folder belongs to. None if the file does not name one, or names one of another node."""
    with contextlib.suppress(OSError, RecordError):
        owner = read_json(DirOwner, path / _OWNER)
        return owner if owner.node == socket.gethostname() else None
    return None


def write_segments(path: Path, segments: set[Segment], *, seen_by: SeenBy) -> None:
    """Write down the run's segments in /dev/shm, in place of the earlier list of the program `seen_by`."""
    listed = json.dumps(sorted([segment.name, segment.inode] for segment in segments))
    with contextlib.suppress(OSError):
        write_private(path / f"{_SHARED_MEMORY}-{seen_by}", listed)


def remove(path: Path, owner: DirOwner) -> None:
    """Remove the folder, the run's shared memory and its folder in the shared home.

    The caller has ended the run's processes and holds the folder's lock. The `owner` file is removed last, so that a
    removal that is interrupted can be done again.
    """
    shared_memory.remove(read_segments(path))
    if owner.run_dir is not None:
        remove_run_dir(Path(owner.run_dir))
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != _OWNER:
                os.unlink(entry.path)
        if os.listdir(path) == [_OWNER]:
            (path / _OWNER).unlink()
        path.rmdir()


def read_segments(path: Path) -> set[Segment]:
    """Return the segments in /dev/shm that were written down as the run's."""
    found = set()
    for seen_by in get_args(SeenBy):
        with contextlib.suppress(OSError, ValueError, TypeError):
            listed = json.loads((path / f"{_SHARED_MEMORY}-{seen_by}").read_text())
            found |= {Segment(str(name), int(inode)) for name, inode in listed}
    return found
