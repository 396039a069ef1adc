"""The rights that others have on a path: by access control lists (ACLs), and by a mode that opens a folder to a group.

The mode of a path does not show the users and groups of its ACL. POSIX ACLs are read, and the NFSv4 ACLs that Linux's
NFS client shows. `ownership` decides whether a right matters. The owner of a folder may open it to a Unix group, which
may then read some of the files in it.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_serve.errors import StoreError

# -- access control lists

READ, WRITE, SEARCH = 4, 2, 1
Kind = Literal["user", "group", "others"]
_POSIX_KINDS: dict[int, Kind] = {0x02: "user", 0x04: "group", 0x08: "group", 0x20: "others"}
_POSIX_OWNING_GROUP, _POSIX_MASK = 0x04, 0x10
_NFS_ALLOW, _NFS_OF_GROUP = 0, 0x40
_NFS_READ = 0x1
_NFS_SEARCH = 0x20
_NFS_WRITE = 0x2 | 0x4 | 0x40 | 0x40000 | 0x80000  # data, new entries, deletion of entries, the ACL, the owner


@dataclass(frozen=True, kw_only=True)
class Grant:
    """The `rights` (READ, WRITE, SEARCH) of one user or group.

    `who` is a number, or NFSv4's name; None: the owning group.
    """

    kind: Kind
    who: int | str | None = None
    rights: int


def grants(path: Path) -> tuple[Grant, ...] | None:
    """Return the rights of all whom the ACL of `path` names; None if the file system does not show its ACLs."""
    content = _attribute(path, "system.posix_acl_access")
    if content is not None:
        return tuple(one for one in _posix(content) if one.who is not None)
    content = _attribute(path, "system.nfs4_acl")
    return None if content is None else _nfs(content)


def inherited_grants(path: Path) -> tuple[Grant, ...]:
    """Return the rights of others that new files in the folder `path` will have."""
    return _posix(_attribute(path, "system.posix_acl_default") or b"")


def _attribute(path: Path, name: str) -> bytes | None:
    """Return an extended attribute, empty where the path has none; None where it cannot be read."""
    try:
        return os.getxattr(path, name)
    except OSError as error:
        return b"" if error.errno == errno.ENODATA else None


def _posix(content: bytes) -> tuple[Grant, ...]:
    """Return the entries of the kernel's binary form but the owner's, bounded by the mask."""
    entries = list(struct.iter_unpack("<HHI", content[4:]))
    mask = next((rights for tag, rights, _ in entries if tag == _POSIX_MASK), READ | WRITE | SEARCH)
    found = []
    for tag, rights, number in entries:
        if kind := _POSIX_KINDS.get(tag):
            is_named = kind != "others" and tag != _POSIX_OWNING_GROUP
            bounded = rights if kind == "others" else rights & mask
            found.append(Grant(kind=kind, who=number if is_named else None, rights=bounded))
    return tuple(found)


def _nfs(content: bytes) -> tuple[Grant, ...] | None:
    """Return the entries that allow something, without those of the mode (OWNER@, GROUP@, EVERYONE@)."""
    found = []
    try:
        (count,), place = struct.unpack_from(">I", content) if content else (0,), 4
        for _ in range(count):
            kind, flags, mask, length = struct.unpack_from(">4I", content, place)
            who = content[place + 16 : place + 16 + length].decode(errors="replace")
            place += 16 + length + -length % 4
            known = {READ: _NFS_READ, WRITE: _NFS_WRITE, SEARCH: _NFS_SEARCH}
            rights = sum(right for right, bits in known.items() if mask & bits)
            if kind == _NFS_ALLOW and not who.endswith("@"):
                found.append(Grant(kind="group" if flags & _NFS_OF_GROUP else "user", who=who, rights=rights))
    except struct.error:
        return None
    return tuple(found)


# -- folders that are open to a group

SHARED_FOLDER = 0o3750  # read by its group, which new files get (setgid); the sticky bit marks it as ours
SHARED_FILE = 0o640


def is_shared_folder(path: Path) -> bool:
    """Return whether a folder of ours is open to a group. Nobody sets that mode by accident."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == SHARED_FOLDER


def give_to_group(path: Path, group: int, mode: int) -> None:
    """Give a folder or file of ours a group and a mode, in place of any ACL: `chmod` would make its entries count.

    Raises OSError, and StoreError if the file system keeps group and mode otherwise, or lets others read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for attribute in ("system.posix_acl_access", "system.posix_acl_default"):
            with suppress(OSError):
                os.removexattr(descriptor, attribute)
        os.fchown(descriptor, -1, group)
        os.fchmod(descriptor, mode)
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if (found.st_gid, stat.S_IMODE(found.st_mode)) != (group, mode):
        raise StoreError(f"{path} cannot be shared: its file system does not keep its group and mode.")
    if others := [one for one in grants(path) or () if one.rights & READ]:
        raise StoreError(f"{path} cannot be shared: by its ACL {others[0].kind} {others[0].who} could read it, too.")


def open_to_group(descriptor: int, folder: Path) -> None:
    """Let the group of a shared folder read a file; the file has this group, as the folder's mode makes it."""
    found = os.stat(folder)
    if is_shared_folder(folder) and os.fstat(descriptor).st_gid == found.st_gid:
        os.fchmod(descriptor, SHARED_FILE)


def is_open_to_group(found: os.stat_result, folder: Path) -> bool:
    """Return whether the group of a shared folder, and nobody else, may read a file in it."""
    is_of_group = stat.S_IMODE(found.st_mode) == SHARED_FILE and found.st_gid == os.stat(folder).st_gid
    return is_of_group and is_shared_folder(folder)
