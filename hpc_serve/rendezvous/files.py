"""Private files on a shared filesystem: folders are 0700 and files 0600 from their first byte.

A file is written whole or not at all, and read only if it belongs to us. Shared filesystems answer from caches: a file
that was just listed may be gone (ENOENT), and a handle may belong to a file that was replaced (ESTALE). Therefore files
are opened without asking first, and opened again when the handle is stale.

A private file may hold a key. A folder that a person names is made if it is missing, and used only if nobody else can
change what is in it. Other modules decide what the files mean, and who must show a key.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hpc_serve.errors import RecordError, StoreError
from hpc_serve.rendezvous.fields import check_log_path, from_json_text, to_json_text
from hpc_serve.rendezvous.ownership import (
    SHARED_FILE,
    SHARED_FOLDER,
    fault,
    give_to_group,
    is_open_to_group,
    open_itself,
    open_to_group,
    require,
    stat_fault,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    D = TypeVar("D", bound=DataclassInstance)

T = TypeVar("T")
FileVersion = tuple[int, int, int]
"""Time of the last change, inode and size: of two files of one name and one version, one is the other."""

_MAX_FILE_BYTES = 1 << 20
_STALE_HANDLE_TRIES = 3
_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_BLOCK_BYTES = 512  # of st_blocks, on every filesystem


def make_private_folder(path: Path, *, tighten: bool = True) -> Path:
    """Make the folder `path` and its missing parents, 0700. If `tighten`, a folder that exists becomes 0700 too.

    A folder that is shared with a group stays so, and so does one that only lets a group through. Returns
    `path`. Raises StoreError if it cannot be made, or if another user can change what is in it.
    """
    with explained("make the folder", path):
        try:
            make_folders(path)
        except FileExistsError:
            raise StoreError(
                f"{path} is in the way: it is not a folder. Move it, or choose another folder; for files of services, "
                "by HPC_SERVE_HOME."
            ) from None
        found = os.stat(path)
        mode = stat.S_IMODE(found.st_mode)
        is_loose = mode & 0o077 not in (0, stat.S_IXGRP) and mode != SHARED_FOLDER
        if tighten and found.st_uid == os.geteuid() and is_loose:
            os.chmod(path, 0o700)
    check_folder(path)
    return path


def make_folders(path: Path) -> None:
    """Make `path` and its missing parents, 0700 under any umask; OSErrors are the caller's to explain."""
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        make_folders(path.parent)
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not path.is_dir():
            raise


def check_folder(path: Path, *, owner: int | None = None) -> None:
    """Raise StoreError if somebody else can change the content of a folder of ours. A missing folder is fine.

    `owner` is the number of the user who shares it, if it is not ours.
    """
    reason = fault(path, "own", user=owner)
    if reason and owner is not None:
        raise StoreError(f"{reason}: only a folder that its owner alone can change is read.")
    if reason:
        raise StoreError(
            f"{reason}: records and keys in it would be theirs to read or replace. "
            "Set HPC_SERVE_HOME to a folder of your own, below folders that only you and root can write to, "
            "and that all nodes see."
        )


def write_private(path: Path, text: str, *, is_shared: bool = False) -> None:
    """Replace `path` by a file of `text`, 0600. Readers see the old file or the new one. Raises StoreError.

    If it `is_shared` and its folder is shared with a group, the group may read it.
    """
    with explained("write", path), private_temporary(path) as (temporary, descriptor):
        if is_shared:
            open_to_group(descriptor, path.parent)
        _write_whole(descriptor, text)
        os.replace(temporary, path)
        _sync_folder(path.parent)


def overwrite_private(path: Path, text: str) -> bool:
    """Write `text` over a file of ours, in the blocks that it has already: for a last word on a full disk.

    A reader may see half of it for a moment. Returns whether it is written.
    """
    with suppress(OSError), os.fdopen(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "wb", 0) as file:
        content, found = text.encode(), os.fstat(file.fileno())
        if len(content) <= found.st_blocks * _BLOCK_BYTES:
            file.write(content.ljust(found.st_size))  # blanks where the old text was longer
            os.fsync(file.fileno())
            return True
    return False


def create_private(path: Path, text: str, *, is_shared: bool = False) -> bool:
    """Make the file `path` unless it exists. If several processes try at once, exactly one of them makes it.

    No lock is used: locks do not work on every shared filesystem. Returns whether this call made it. `is_shared` is as
    in `write_private`. Raises StoreError.
    """
    with explained("write", path), private_temporary(path) as (temporary, descriptor):
        if is_shared:
            open_to_group(descriptor, path.parent)
        _write_whole(descriptor, text)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            return _create_without_links(path, text)
        _sync_folder(path.parent)
        return True


def read_private(path: Path, *, secret: bool = False, owner: int | None = None) -> str:
    """Return the text of a file that belongs to us, or to the `owner` who shares it.

    Nobody else may be able to read a `secret` one, but for the group that its folder is shared with. Raises
    FileNotFoundError, RecordError (not ours, readable by others, not text, too long) or StoreError.
    """
    content = _retry_stale_handle(lambda: _read_own(path, secret=secret, owner=owner), "read", path)
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise RecordError(f"{path} is not text: it is damaged or not ours; remove it.") from None


def write_json(path: Path, value: DataclassInstance, *, is_shared: bool = False) -> None:
    """Replace `path` by the JSON of a dataclass, as `write_private` does. Raises StoreError."""
    write_private(path, to_json_text(value), is_shared=is_shared)


def read_json(kind: type[D], path: Path) -> D:
    """Return the dataclass that `write_json` has written. Raises what `read_private` raises, RecordError for others."""
    return from_json_text(kind, read_private(path), source=str(path))


def list_newest_first(path: Path) -> list[tuple[str, FileVersion]]:
    """Return the names in a folder with their versions, the newest file first; none if there is no such folder.

    Raises StoreError.
    """

    def scan() -> list[tuple[str, FileVersion]]:
        found = []
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                found.append((entry.name, (status.st_mtime_ns, status.st_ino, status.st_size)))
        found.sort(key=itemgetter(1), reverse=True)
        return found

    try:
        return _retry_stale_handle(scan, "list", path)
    except FileNotFoundError:
        return []


def list_folder(path: Path) -> list[str]:
    """Return the names in a folder, sorted; none if there is no such folder. Raises StoreError."""
    try:
        return sorted(_retry_stale_handle(lambda: os.listdir(path), "list", path))
    except FileNotFoundError:
        return []


def remove_file(path: Path) -> None:
    """Remove a file that may be gone already. Raises StoreError."""
    with explained("remove", path), suppress(FileNotFoundError):
        os.unlink(path)


def _retry_stale_handle(read: Callable[[], T], what: str, path: Path) -> T:
    left = _STALE_HANDLE_TRIES
    while True:
        left -= 1
        try:
            return read()
        except (FileNotFoundError, StoreError):
            raise
        except OSError as error:
            if error.errno != errno.ESTALE or not left:
                raise StoreError(f"cannot {what} {path}: {error.strerror}.") from error


def _read_own(path: Path, *, secret: bool, owner: int | None) -> bytes:
    try:
        descriptor = open_itself(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RecordError(f"{path} is a symbolic link: it is not trusted. Remove it.") from None
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise RecordError(f"{path} is not a regular file: it is not trusted.")
    with os.fdopen(descriptor, "rb") as file:
        if reason := stat_fault(path, found, "own", user=owner):
            raise RecordError(f"{reason}: it is not trusted.")
        is_private = secret and owner is None and not is_open_to_group(found, path.parent)
        if is_private and (reason := stat_fault(path, found, "private")):
            raise RecordError(
                f"{reason}, so it is not secret any more: remove it to have a new one made, and restart what uses it."
            )
        # A buffer for the longest file would cost more than the reading. A cached size may be too small.
        expected = min(found.st_size, _MAX_FILE_BYTES) + 1
        content = file.read(expected)
        if len(content) == expected:
            content += file.read(_MAX_FILE_BYTES + 1 - expected)
    if len(content) > _MAX_FILE_BYTES:
        raise RecordError(f"{path} is longer than {_MAX_FILE_BYTES} bytes: it is no record of ours.")
    return content


@contextmanager
def private_temporary(path: Path) -> Iterator[tuple[Path, int]]:
    """Make a new file beside `path`, 0600, for a moment; yields it and its descriptor, which the caller closes."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield temporary, descriptor
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def share_folder(path: Path, group: int, names: Iterable[str]) -> None:
    """Let a group read a folder of ours, the files `names` in it, and those that are written later as shared.

    Raises StoreError, also if the file system does not keep group and mode.
    """
    with explained("share", path):
        give_to_group(path, group, SHARED_FOLDER)
        for name in names:
            with suppress(FileNotFoundError):
                give_to_group(path / name, group, SHARED_FILE)


def _create_without_links(path: Path, text: str) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    _write_whole(descriptor, text)
    return True


def _write_whole(descriptor: int, text: str) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(descriptor)


def _sync_folder(path: Path) -> None:
    # A hint only: several network filesystems refuse to sync a folder, and the rename stands without it.
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def explained(what: str, path: Path) -> Iterator[None]:
    """Raise StoreError for an OSError, with the reason and what to do about it."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        advice = ""
        if error.errno in _NO_PERMISSION:
            advice = " Choose a folder of your own that you can write to; for files of services, by HPC_SERVE_HOME."
        elif error.errno in _FULL:
            advice = (
                " The filesystem is full or your quota is used up: free space there, or write elsewhere; "
                "HPC_SERVE_HOME names the folder of services."
            )
        elif error.errno == errno.EFBIG:
            advice = " `ulimit -f` or the filesystem limits the size of a file: raise the limit, or write elsewhere."
        raise StoreError(f"cannot {what} {path}: {error.strerror}.{advice}") from error


# -- keys

_KEY = re.compile(r"[\x21-\x7e]{16,}")


def make_key(path: Path, *, is_shared: bool = False) -> None:
    """Write a new key unless a file is there; two makers at once end with one key. Raises StoreError.

    If it `is_shared` and its folder is shared with a group, the group may read it.
    """
    create_private(path, secrets.token_urlsafe(32) + "\n", is_shared=is_shared)


def read_key(path: Path, *, cure: str, owner: int | None = None) -> str:
    """Return the key. Never put it in a log, a command line or an error; `cure` is what to do about a file without one.

    `owner` is the number of another user who shares it. Raises FileNotFoundError, StoreError, RecordError
    (others can read it, or it is no key).
    """
    key = read_private(path, secret=True, owner=owner).strip()
    if not _KEY.fullmatch(key):
        raise RecordError(f"{path} holds no usable key (16 or more printable characters, no blanks): {cure}.")
    return key


# -- folders that a person names


def make_own_folder(path: Path, *, called: str, why: str) -> None:
    """Make a folder that a person has named, 0700, if it is missing. OSErrors are the caller's to explain.

    Raises InvalidRequestError, which says `why`, where others can change what is in it.
    """
    advice = f"{why}: set it to a folder of your own, below folders that only you and root can write to."
    require(path, "own", called=called, advice=advice)
    make_folders(path)
    require(path, "own", called=called, advice=advice)  # others may have made it, or one above it, a moment ago


def make_log_dir(path: Path, *, called: str) -> Path:
    """Make the folder of logs if it is missing, 0700, and return it. `called` is how a person named it.

    Raises InvalidRequestError where Slurm would not find it or others can change what is in it, StoreError where it
    cannot be made or written to.
    """
    check_log_path(str(path), called)
    try:
        make_own_folder(
            path,
            called=f"{called}={path}",
            why="Other users could put links in it, and logs would be written to wherever those lead",
        )
    except OSError as error:
        raise StoreError(f"the log folder {path} cannot be made: {error.strerror}. Set {called}.") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise StoreError(f"the log folder {path} cannot be written to. Set {called} to one that can.")
    return path
