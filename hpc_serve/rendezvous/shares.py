"""Shares a service with a Unix group, and finds the services that others share.

The group may read the records and the key of that service; all else stays its owner's. The mode of the service's folder
says that it is shared, so that every job that serves it, now or later, keeps to it.
"""

from __future__ import annotations

import grp
import os
import shlex
import stat
from pathlib import Path

from hpc_serve.errors import InvalidRequestError, StoreError
from hpc_serve.rendezvous import ownership
from hpc_serve.rendezvous.fields import is_record_file_name
from hpc_serve.rendezvous.files import list_folder, remove_file, share_folder
from hpc_serve.rendezvous.ownership import group_name, is_shared_folder
from hpc_serve.rendezvous.store import ServiceStore

_LETS_THROUGH = 0o710


def check_share(store: ServiceStore, group: str) -> int:
    """Return the number of a group that a service of the store can be shared with. Raises InvalidRequestError."""
    try:
        found = grp.getgrnam(group)
    except KeyError:
        raise InvalidRequestError(f"--share {group}: there is no such group. `id -Gn` lists yours.") from None
    if found.gr_gid not in {os.getegid(), *os.getgroups()}:
        raise InvalidRequestError(f"--share {group}: you are not in that group. `id -Gn` lists yours.")
    real = Path(os.path.realpath(store.home))
    for folder in sorted({*store.home.parents, *real.parents}):
        if folder.exists() and not _lets_through(folder, found.gr_gid):
            named = shlex.quote(str(folder))
            raise InvalidRequestError(
                f"--share {group}: that group cannot reach {store.home}, because {folder} lets nobody of it through. "
                f"Open it, which shows no names in it: setfacl -m g:{shlex.quote(group)}:x {named}; or set "
                "HPC_SERVE_HOME to a folder that the group can reach."
            )
    return found.gr_gid


def share(store: ServiceStore, service: str, group: int) -> None:
    """Let a group read the records and the key of a service, which has both. Raises StoreError, InvalidRequestError."""
    folder = store.service_dir(service)
    if is_shared_folder(folder) and folder.stat().st_gid != group:
        raise InvalidRequestError(
            f"{service} is shared with group {shared_with(store, service)}, which has its key. Stop it, and submit it "
            "once without --share, which gives it a new key."
        )
    for above in (store.home, folder.parent):
        _let_through(store, above, group)
    records = filter(is_record_file_name, list_folder(folder))
    share_folder(folder, group, [store.api_key_path(service).name, *records])


def unshare(store: ServiceStore, service: str) -> None:
    """Make a service its owner's alone, with a new key: the group knows the old one. Raises StoreError.

    The folder counts as shared until all else is closed, so a call that was killed is completed by the next one.
    """
    folder = store.service_dir(service)
    if is_shared_folder(folder):
        group = folder.stat().st_gid
        if _services_shared_with(store, group) == [service]:
            for above in (store.home, folder.parent):
                _shut_out(above, group)
        remove_file(store.api_key_path(service))
        folder.chmod(0o700)
        store.ensure_api_key(service)


def shared_with(store: ServiceStore, service: str) -> str:
    """Return the name of the group that a service of ours is shared with; "" if it is not."""
    folder = store.service_dir(service)
    return group_name(folder.stat().st_gid) if is_shared_folder(folder) else ""


def named_service(named: str, home: Path) -> tuple[ServiceStore, str]:
    """Return the store and the name of a service: `named` is one of `home`, or the path of a service's folder.

    Whoever gives a path trusts the owner of that folder. Raises StoreError if it cannot be reached.
    """
    if not is_service_folder(named):
        return ServiceStore(home), named
    folder = Path(os.path.expanduser(named))
    try:
        owner = folder.lstat().st_uid
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be looked at: {error.strerror}. Its owner shares it by `hpc-serve submit --share GROUP`, "
            "with a group of yours."
        ) from error
    return ServiceStore(folder.parent.parent, owner=None if owner == os.geteuid() else owner), folder.name


def is_service_folder(named: str) -> bool:
    """Return whether a service is named by its folder, as /home/alice/.hpc-serve/services/70b."""
    path = Path(os.path.expanduser(named))  # the name of nobody stays as it is
    return path.is_absolute() and path.parent.name == "services"


def _lets_through(folder: Path, group: int) -> bool:
    """Return whether members of a group can use what is in a folder, by its mode or its ACL."""
    found = folder.stat()
    if found.st_mode & stat.S_IXOTH or (found.st_mode & stat.S_IXGRP and found.st_gid == group):
        return True
    named = (str(group), group_name(group))
    return any(
        one.kind == "group" and one.rights & ownership.SEARCH and str(one.who).partition("@")[0] in named
        for one in ownership.grants(folder) or ()
    )


def _let_through(store: ServiceStore, folder: Path, group: int) -> None:
    """Let a group use what it may read in a folder of ours, without seeing which names there are."""
    if _lets_through(folder, group):
        return
    present = folder.stat().st_gid
    if present != group and (shared := _services_shared_with(store, present)):
        raise InvalidRequestError(
            f"{folder} is open to group {group_name(present)}, which {', '.join(shared)} is shared with, and can be "
            "open to one group. Set HPC_SERVE_HOME to another folder for services of this group."
        )
    try:
        os.chown(folder, -1, group)
        os.chmod(folder, _LETS_THROUGH)
    except OSError as error:
        raise StoreError(f"{folder} cannot be given to group {group_name(group)}: {error.strerror}.") from error


def _shut_out(folder: Path, group: int) -> None:
    """Undo `_let_through`."""
    found = folder.stat()
    if found.st_gid == group and stat.S_IMODE(found.st_mode) == _LETS_THROUGH:
        folder.chmod(0o700)


def _services_shared_with(store: ServiceStore, group: int) -> list[str]:
    """Return the services of ours that are shared with a group. Raises StoreError."""
    folders = {name: store.service_dir(name) for name in store.services()}
    return [name for name, path in folders.items() if is_shared_folder(path) and path.stat().st_gid == group]
