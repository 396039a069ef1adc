"""Listens for a gateway: on a Unix socket that only its user reaches, or on a port.

A socket's folder is 0700, so nobody else can connect. The socket's name has the host in it, since a socket on a shared
filesystem works only on the host that made it. The gateway holds a lock while it runs; the lock tells a used socket
from a stale one.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import resource
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_serve.errors import HpcServeError, InvalidRequestError
from hpc_serve.job.machine.guarded_folders import make_named_folder
from hpc_serve.job.machine.network import PortsInUseError
from hpc_serve.rendezvous.files import make_folders, make_private_folder
from hpc_serve.rendezvous.ownership import require

LONGEST_PATH = 100  # the kernel allows 107 bytes
MOST_WAITING = 1024
_MOST_FILES = 65_536
_ANSWER_S = 1.0
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)


@dataclass(frozen=True, kw_only=True)
class ListenAddress:
    """A listener and what it is reached by: a socket's path, whose `lock` is held by a descriptor, or an address."""

    listener: socket.socket
    lock: int | None = None
    path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def is_loopback(self) -> bool:
        return self.path is not None or ipaddress.ip_address(self.host.partition("%")[0]).is_loopback


@contextmanager
def on_socket(path: Path) -> Iterator[ListenAddress]:
    """Listen on a socket in a folder of this user's own, 0700, which is made if it is missing.

    Raises InvalidRequestError if the folder is open to others, the path is too long, or another gateway is there.
    """
    _allow_files()
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise InvalidRequestError(
            f"the socket's path {path} has {len(os.fsencode(path))} bytes, and {LONGEST_PATH} are possible: give"
            " --socket a shorter one."
        )
    folder_advice = "Give --socket a path in a folder of your own that nobody else can look into (chmod 700)."
    try:
        make_folders(path.parent)
    except OSError as error:
        raise InvalidRequestError(f"{path.parent} cannot be made: {error.strerror}. {folder_advice}") from error
    require(path.parent, "private", called=f"the socket's folder {path.parent}", advice=folder_advice)
    with _lock_of(path) as lock:
        _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            listener.listen(MOST_WAITING)
            yield ListenAddress(listener=listener, lock=lock, path=path)
        finally:
            listener.close()
            with suppress(OSError):
                os.unlink(path)


def default_socket(home: Path, environ: Mapping[str, str]) -> Path:
    """Return the path of this host's socket: below the home, or on this node if the home cannot have a socket.

    Its folder is made if it is missing.
    """
    host = socket.gethostname().partition(".")[0]
    path = home / "gateway" / f"{host}.sock"
    if len(os.fsencode(path)) <= LONGEST_PATH:
        make_private_folder(home, tighten=False)
        make_private_folder(path.parent)
        if _can_have_sockets(path.parent):
            return path
    base = Path(environ.get("HPC_SERVE_TMPDIR") or "/tmp")
    with suppress(PortsInUseError):  # then the folder has another name
        make_named_folder(base, "gateway", home, called="HPC_SERVE_TMPDIR")
    return make_named_folder(base, "gateway", home, called="HPC_SERVE_TMPDIR") / "gateway.sock"


def is_answered(path: Path) -> bool:
    """Return whether a program of this host listens on a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_ANSWER_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # its queue is full: somebody is there
            return True
    return True


@contextmanager
def on_port(host: str, port: int) -> Iterator[ListenAddress]:
    """Listen on a port of one address of this host, 0 for any port. Raises InvalidRequestError."""
    _allow_files()
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server((str(address[0]), port), family=family, backlog=MOST_WAITING)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InvalidRequestError(
            f"the gateway cannot listen on port {port} of {host}: {why}. Give another --port (0 for any free one)."
        ) from error
    with listener:
        name = listener.getsockname()
        yield ListenAddress(listener=listener, host=str(name[0]), port=int(name[1]))


def _allow_files() -> None:
    """Raise this process's limit of open files, often 1024. A request takes two: its client's and its engine's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextmanager
def _lock_of(path: Path) -> Iterator[int]:
    """Hold the lock of a socket's path. Without file locks, a gateway that answers is the owner."""
    descriptor = os.open(
        path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _taken(path) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise HpcServeError(f"{path}.lock cannot be locked: {error.strerror}.") from error
        yield descriptor
    finally:
        os.close(descriptor)


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens on. Raises InvalidRequestError if somebody does, or it is no socket."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise InvalidRequestError(f"{path} is in the way: it is no socket. Remove it, or give another --socket.")
    except FileNotFoundError:
        return
    if is_answered(path):
        raise _taken(path)
    with suppress(FileNotFoundError):
        os.unlink(path)


def _taken(path: Path) -> InvalidRequestError:
    return InvalidRequestError(
        f"another gateway listens on {path}. Use it, end it, or give this one another path with --socket."
    )


def _can_have_sockets(folder: Path) -> bool:
    """Return whether the filesystem of a folder carries Unix sockets. Some network filesystems do not."""
    path = folder / f".try-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        try:
            trial.bind(str(path))
            trial.listen(1)
        except OSError:
            return False
        finally:
            with suppress(OSError):
                os.unlink(path)
    return True
