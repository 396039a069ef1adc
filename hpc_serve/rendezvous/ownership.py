"""Decides whether a file or folder may be used: only its user and root can change its content, or replace it.

One function decides, `fault`: by owner, mode, ACL, sticky bit and links, of the path and of every folder above it.
Every folder above counts, because a user who can write to a folder can replace its entries. Weights need no trust,
because they hold numbers alone. Secrets, code, and words that decide what runs need it. The content of a file is left
to other modules.

The mode of a path does not show the users and groups of its access control list (ACL). POSIX ACLs are read, and the
NFSv4 ACLs that Linux's NFS client shows. The owner of a folder may open it to a Unix group, which may then read some of
the files in it.
"""

from __future__ import annotations

import errno
import functools
import grp
import os
import pwd
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_serve.errors import InvalidRequestError, SiteFileError, StoreError

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


def open_itself(path: Path) -> int:
    """Return a descriptor to read a path. A symbolic link is an OSError (ELOOP); a pipe does not hang its reader."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def give_to_group(path: Path, group: int, mode: int) -> None:
    """Give a folder or file of ours a group and a mode, in place of any ACL: `chmod` would make its entries count.

    Raises OSError, and StoreError if the file system keeps group and mode otherwise, or lets others read.
    """
    descriptor = open_itself(path)
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


Use = Literal["own", "private", "read", "scratch", "chosen"]
"""What a path is needed for.

own      a folder or file of the user's, which nobody else can change
private  the same, and nobody else can look into it
read     of the user's or root's, and nobody else can change it
scratch  a folder of the user's or root's for new names; others may write to it if its sticky bit is set, as in /tmp
chosen   of anybody, or of a group, from whom the user chose to have it; but not everybody can change it
"""
_MOST_LINKS = 40
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def require(path: Path, use: Use, *, called: str, advice: str) -> None:
    """Raises InvalidRequestError, which says what is wrong with the path and what to do: `advice`."""
    if reason := fault(path, use):
        raise InvalidRequestError(f"{called} is not used: {reason}. {advice}")


def check_args_file(path: Path, opened: os.stat_result) -> None:
    """Raises InvalidRequestError if somebody else can write a stand-in folder's file of engine arguments.

    `opened` is the status of the file that was opened: it may have come to `path` a moment ago, or be gone from there.
    The folder itself and the weights in it may be anybody's: a project's shared copy of a model is.
    """
    if reason := stat_fault(path, opened, "read") or fault(path, "read"):
        raise InvalidRequestError(
            f"{path} is not used: {reason}. Its words decide what runs as you. Give them on the command line after --, "
            "and set HPC_SERVE_MODEL to a folder of your own with links to the weights; or have the folder and that "
            "file made root's or yours."
        )


def check_chosen(path: Path, *, called: str) -> None:
    """Raise SiteFileError if everybody can change a file or folder that a person, or the site, has chosen."""
    if reason := fault(path, "chosen"):
        raise SiteFileError(
            f"{called} is not used: {reason}. Its words decide what runs as you: take that right from others "
            "(chmod o-w)."
        )


def fault(path: Path, use: Use, *, user: int | None = None) -> str | None:
    """Why `path` may not be used; None if it may. A path that is not there yet is judged by the folders above it.

    `user` is the number of another user, if the path must be theirs, as a service is that they share.
    """
    modes: dict[Path, int] = {}
    try:
        for step, found, is_last in _walk(path.absolute()):
            is_roots = _is_unseen_root(found, holder_mode=modes.get(step.parent, 0))
            judge = stat_fault if is_last else _folder_fault
            reason = judge(step, found, use, is_roots, user)
            if reason:
                return reason
            modes[step] = found.st_mode
    except (FileNotFoundError, NotADirectoryError):  # whoever makes it or opens it is told
        return None
    except OSError as error:
        return f"{path} cannot be looked at: {error.strerror}"
    return None


def stat_fault(
    path: Path, found: os.stat_result, use: Use, is_roots: bool = False, user: int | None = None
) -> str | None:
    """Return the fault of an open file by its `fstat`, without a look at the folders above it.

    `is_roots`: it is root's, in a container that does not show that. `user` is as in `fault`.
    """
    if use == "chosen":
        return _write_fault(path, found, use, user, sticky_counts=False)
    if _unseen_owner() in {os.geteuid(), user} - {None}:
        return (
            f"{path} cannot be judged: this container (user namespace) shows you and all other users as user "
            f"{os.geteuid()}. Start it so that it keeps your own user"
        )
    owner = os.geteuid() if user is None else user
    owners = {owner} if use in ("own", "private") else {owner, 0}
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in owners and not (is_roots and use == "scratch"):
        return f"{path} belongs to {_user(found.st_uid)}, not to {'you' if user is None else _user(user)}"
    if use == "private" and mode & 0o077:
        return f"{path} can be read by others (mode {mode:04o})"
    if use == "private" and (reader := _foreign(grants(path) or (), READ, found, user)):
        return f"{path} can be read by {reader} by its ACL"
    if reason := _write_fault(path, found, use, user, sticky_counts=use == "scratch"):
        return reason
    can_be_entered = stat.S_ISDIR(mode := found.st_mode) and mode & (stat.S_IXGRP | stat.S_IXOTH)
    inherited = inherited_grants(path) if use != "scratch" and can_be_entered else ()
    if writer := _foreign(inherited, WRITE, found, user):
        return f"new files in {path} can be changed by {writer} by its default ACL"
    return None


def _folder_fault(path: Path, found: os.stat_result, use: Use, is_roots: bool, user: int | None) -> str | None:
    """Return whether others can replace what is in a folder, or where a link leads."""
    if use != "chosen" and found.st_uid not in (os.geteuid(), 0, user) and not is_roots:
        return f"{path} belongs to {_user(found.st_uid)}, who can replace what is below it"
    if stat.S_ISLNK(found.st_mode):
        return None
    return _write_fault(path, found, use, user, sticky_counts=True)


def _write_fault(path: Path, found: os.stat_result, use: Use, user: int | None, *, sticky_counts: bool) -> str | None:
    mode = stat.S_IMODE(found.st_mode)
    if sticky_counts and mode & stat.S_ISVTX:
        return None
    sticky = ", without the sticky bit" if sticky_counts else ""
    shown = f"(mode {mode:04o}{sticky})"
    if mode & stat.S_IWOTH:
        return f"{path} can be changed by everybody {shown}"
    if use == "chosen":
        return None
    granted = grants(path)
    if writer := _foreign(granted or (), WRITE, found, user):
        return f"{path} can be changed by {writer} by its ACL"
    if not mode & stat.S_IWGRP or (granted is not None and _is_own_group(found.st_gid, user)):
        return None
    hidden = "" if granted is not None else ", and maybe by others: its file system does not show its ACL"
    return f"{path} can be changed by group {group_name(found.st_gid)} {shown}{hidden}"


def _foreign(grants: Iterable[Grant], rights: int, found: os.stat_result, user: int | None) -> str | None:
    """Return the first of an ACL's users and groups with one of the `rights` who is not the user, root or its group."""
    own = {os.geteuid(), os.geteuid() if user is None else user}
    for grant in grants:
        if not grant.rights & rights:
            continue
        if grant.kind == "others":
            return "everybody"
        if isinstance(grant.who, str):  # NFSv4's, as name@domain
            names = {"root", "0", *map(str, own), *map(_name_of, own)}
            if grant.kind == "group" or grant.who.partition("@")[0] not in names:
                return f"{grant.kind} {grant.who}"
        elif grant.kind == "group":
            number = found.st_gid if grant.who is None else grant.who
            if not _is_own_group(number, user):
                return f"group {group_name(number)}"
        elif grant.who not in {0, *own}:
            return _user(int(grant.who or 0))
    return None


def _walk(path: Path) -> Iterator[tuple[Path, os.stat_result, bool]]:
    """Every folder and link on the way to `path`, from / on, and at last what it is: path, status, is it the last."""
    rest = list(reversed(path.parts[1:]))
    here, links = Path("/"), 0
    yield here, os.lstat(here), not rest
    while rest:
        name = rest.pop()
        if name == "..":
            here = here.parent
            continue
        step = here / name
        found = os.lstat(step)
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(40, "too many symbolic links")
            yield step, found, False
            leads_to = Path(os.readlink(step))
            here = Path("/") if leads_to.is_absolute() else here
            rest += reversed([part for part in leads_to.parts if part != "/"])
        else:
            here = step
            if rest and not stat.S_ISDIR(found.st_mode):
                raise NotADirectoryError
            yield here, found, not rest


def _is_unseen_root(found: os.stat_result, *, holder_mode: int) -> bool:
    """Return whether this counts as root's in a container that shows no root. `holder_mode` is its folder's mode.

    In such a container files of root and of every other user show one number. If only root may write to a folder, root
    has put its entries there. If others may write, as in /tmp, anybody may have made them.
    """
    return found.st_uid == _unseen_owner() and not holder_mode & _OTHERS_WRITE


@functools.cache
def _unseen_owner() -> int | None:
    """Return the number that users have who are not of this container, root among them; None where root is shown."""
    try:
        lines = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if any(inside == "0" == outside for inside, outside, _ in lines):
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None


def _is_own_group(number: int, user: int | None = None) -> bool:
    """Return whether a group has the user's own name and no other member, as sites make one for each user."""
    try:
        group = grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == _name_of(os.geteuid() if user is None else user) and set(group.gr_mem) <= {group.gr_name}


def _name_of(user: int) -> str | None:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return None


def _user(number: int) -> str:
    if number == _unseen_owner():
        return f"a user that this container does not show (user {number})"
    name = _name_of(number)
    return f"user {number} ({name})" if name else f"user {number}"


def group_name(number: int) -> str:
    """Return the name of a group; its number where this host knows no name."""
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def user_name() -> str:
    """Return the user's name, as Slurm knows it; the number in a container without the site's user database."""
    return _name_of(os.getuid()) or str(os.getuid())
