"""The modes of a folder that its owner has opened to a Unix group, and of the files in it that the group may read."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from hpc_serve.errors import StoreError
from hpc_serve.rendezvous import acl

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
    if others := [one for one in acl.grants(path) or () if one.rights & acl.READ]:
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
