"""The folders of a run, and its files in /dev/shm: who owns them, and how they are removed.

A launcher's private folder on its node has an `owner` file, which the launcher locks before it gives the file that
name, and for as long as it lives. An `owner` file without a lock belongs to a launcher that has ended; the process that
locks it may remove the folder. The run's private folder in the shared home holds Ray's token and the head's port. The
head removes it at the end, else the sweep process does, or a later run. A later run decides by the records, because the
code inside a job calls no Slurm command. vLLM, PyTorch and NCCL make files of random names in /dev/shm, and a process
that is killed leaves them. So the files that the run's processes have mapped are listed while the run lives. `sweep`
decides when to list, to look and to remove.
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
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from hpc_serve.errors import HpcServeError, InvalidRequestError, RecordError, StoreError
from hpc_serve.job.machine.allocation import Allocation
from hpc_serve.job.machine.network import PortsInUseError
from hpc_serve.rendezvous.fields import run_name, to_json_text
from hpc_serve.rendezvous.files import create_private, make_private_folder, read_json, read_private, write_private
from hpc_serve.rendezvous.ownership import fault, require
from hpc_serve.rendezvous.store import ABANDONED_AFTER_S, WEEK_S, ServiceStore

# -- the run's files in /dev/shm

# vLLM makes psm_ (Python's own prefix), vllm_ (offloaded cache, processed images, ranks on a CPU) and sem.mp- (spawned
# processes). Ray's object store needs no entry: Ray unlinks its file when it has opened it.
_SEGMENT_NAME = re.compile(r"(?:psm_|vllm_|sem\.mp-|torch_|nccl-)[^/\\\s]+")
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, order=True)
class Segment:
    """A file in /dev/shm. The inode distinguishes it from a later file of the same name."""

    name: str
    inode: int


def list_segments(*, folder: Path = _SHARED_MEMORY) -> set[Segment]:
    """Return this user's segments with a name that matches `_SEGMENT_NAME`."""
    try:
        entries = [Segment(entry.name, entry.inode()) for entry in os.scandir(folder)]
    except OSError:
        return set()
    return {segment for segment in entries if _is_ours(segment, folder)}


def mapped_by(pids: Iterable[int], segments: Iterable[Segment], *, folder: Path = _SHARED_MEMORY) -> set[Segment]:
    """Return the `segments` that any of the processes has mapped. Processes with unreadable maps are left out."""
    inodes = {inode for pid in pids for inode in _mapped_inodes(pid, folder)}
    return {segment for segment in segments if segment.inode in inodes}


def remove_segments(segments: Iterable[Segment], *, folder: Path = _SHARED_MEMORY) -> list[Segment]:
    """Remove the segments that still exist, are this user's, and are mapped by none of the user's processes.

    Returns the removed ones.
    """
    existing = [segment for segment in segments if _is_ours(segment, folder)]
    if not existing:
        return []
    in_use = mapped_by(map(int, filter(str.isdigit, os.listdir("/proc"))), existing, folder=folder)
    removed = [segment for segment in existing if segment not in in_use]
    for segment in removed:
        with contextlib.suppress(OSError):
            (folder / segment.name).unlink()
    return removed


def _mapped_inodes(pid: int, folder: Path) -> Iterator[int]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        device = _device_of(folder)
    except OSError:
        return
    for line in lines:
        # The fields are address, permissions, offset, device, inode and path. The path is the name that the file had
        # when it was mapped. A semaphore is mapped before it gets its final name, so the inode is compared. Another
        # container has another /dev/shm, and there the same inode is another file.
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[3] == device and fields[5].startswith(f"{folder}/"):
            yield int(fields[4])


def _device_of(folder: Path) -> str:
    """As the kernel writes it in a process's maps."""
    device = os.stat(folder).st_dev
    return f"{os.major(device):02x}:{os.minor(device):02x}"


def _is_ours(segment: Segment, folder: Path) -> bool:
    try:
        found = os.lstat(folder / segment.name)
    except OSError:
        return False
    is_same = stat.S_ISREG(found.st_mode) and found.st_ino == segment.inode and found.st_uid == os.geteuid()
    return is_same and _SEGMENT_NAME.fullmatch(segment.name) is not None


# -- the run's folder in the shared home

_CONTROL_PORT = "control_port"
_RUN_DIR_NAME = re.compile(r"(?P<run>.+-r\d+(?:-\d+)?)-[0-9a-f]{8}")


def make_run_dir(home: Path, allocation: Allocation) -> Path:
    """Make the run's private folder (0700) with Ray's token (0600) in it.

    Raises StoreError if it cannot be made, or if another user can change what is in a folder above it.
    """
    make_private_folder(home, tighten=False)
    jobs = make_private_folder(home / "jobs")
    run_dir = jobs / f"{allocation.run_name}-{secrets.token_hex(4)}"
    run_dir.mkdir(mode=0o700)
    create_private(run_dir / "ray_token", secrets.token_hex(32))
    # Empty, and written in place: a file that was missing, or is replaced, may stay so for half a minute over NFS.
    create_private(run_dir / _CONTROL_PORT, "")
    return run_dir


def write_control_port(run_dir: Path, port: int) -> None:
    """Tell the other nodes where the head's launcher listens. Raises StoreError."""
    path = run_dir / _CONTROL_PORT
    try:
        with path.open("r+") as file:
            file.write(f"{port}\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}.") from error


def read_control_port(run_dir: Path) -> int | None:
    """Return the port where the head's launcher listens; None until it is written. Raises StoreError, RecordError."""
    try:
        text = read_private(run_dir / _CONTROL_PORT)
    except FileNotFoundError:
        return None
    return int(text) if text.endswith("\n") else None


def remove_run_dir(path: Path) -> None:
    """Remove a folder that `make_run_dir` has made. A path that it cannot have made stays."""
    if path.parent.name == "jobs" and _RUN_DIR_NAME.fullmatch(path.name) and _is_private_folder(path):
        shutil.rmtree(path, ignore_errors=True)


def remove_old_run_dirs(store: ServiceStore) -> None:
    """Remove the folders of runs that are over.

    A run is over if its record has been final for ABANDONED_AFTER_S, or has not changed for a week. A folder without a
    record is removed after a week.
    """
    with contextlib.suppress(HpcServeError, OSError):
        now = time.time()
        old = [path for path in (store.home / "jobs").iterdir() if now - path.stat().st_mtime > ABANDONED_AFTER_S]
        records = [record for name in store.services() for record in store.read(name).records] if old else []
        by_run = {run_name(record.job_id, record.restart, record.replica): record for record in records}
        for path in old:
            match = _RUN_DIR_NAME.fullmatch(path.name)
            record = by_run.get(match["run"]) if match else None
            changed_at = record.updated_at if record else path.stat().st_mtime
            if now - changed_at > (ABANDONED_AFTER_S if record and record.is_final else WEEK_S):
                remove_run_dir(path)


def _is_private_folder(path: Path) -> bool:
    """Return whether `path` is a folder that only this user can enter, and not a link to one."""
    return path.is_dir() and not path.is_symlink() and fault(path, "private") is None


# -- the launcher's folder on its node

_NAME = re.compile(r"hs-[0-9a-f]{8}")
_OWNER = "owner"
_SWEEP = "hpc_serve.job.cleanup.sweep"
_STOP_TIMEOUT_S = 5.0
_SEGMENTS = "shared-memory"
_SeenBy = Literal["watcher", "launcher"]
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
    return sorted(path for path in paths if _is_private_folder(path))


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


def write_segments(path: Path, segments: set[Segment], *, seen_by: _SeenBy) -> None:
    """Write down the run's segments in /dev/shm, in place of the earlier list of the program `seen_by`."""
    listed = json.dumps(sorted([segment.name, segment.inode] for segment in segments))
    with contextlib.suppress(OSError):
        write_private(path / f"{_SEGMENTS}-{seen_by}", listed)


def remove(path: Path, owner: DirOwner) -> None:
    """Remove the folder, the run's shared memory and its folder in the shared home.

    The caller has ended the run's processes and holds the folder's lock. The `owner` file is removed last, so that a
    removal that is interrupted can be done again.
    """
    remove_segments(read_segments(path))
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
    for seen_by in get_args(_SeenBy):
        with contextlib.suppress(OSError, ValueError, TypeError):
            listed = json.loads((path / f"{_SEGMENTS}-{seen_by}").read_text())
            found |= {Segment(str(name), int(inode)) for name, inode in listed}
    return found
