"""The file of what is wanted of a service, in the service's folder. Each change is made under the service's lock.

If several programs change it at once, each sees the change before its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hpc_serve.errors import HpcServeError, RecordError
from hpc_serve.rendezvous.claims import locked
from hpc_serve.rendezvous.files import check_folder, read_json, write_json
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.rendezvous.wanted import Wanted

_FILE = "wanted.json"


def wanted_file(store: ServiceStore, service: str) -> Path:
    """Return where it is written. Raises InvalidRequestError for names that cannot be files."""
    return store.service_dir(service) / _FILE


def read_wanted(store: ServiceStore, service: str) -> Wanted | None:
    """Return what is written; None if nothing is, or if the file is damaged. Raises StoreError."""
    path = wanted_file(store, service)
    check_folder(path.parent)
    with contextlib.suppress(FileNotFoundError, RecordError):
        return read_json(Wanted, path)
    return None


def read_wanted_or_none(store: ServiceStore, service: str) -> Wanted | None:
    """Return what is written as far as it can be read, for programs that only show it."""
    try:
        return read_wanted(store, service)
    except HpcServeError:
        return None


def change_wanted(store: ServiceStore, service: str, change: Callable[[Wanted | None], Wanted | None]) -> Wanted | None:
    """Replace what is written by what `change` makes of it, and return that; None, from `change` too, changes nothing.

    Raises StoreError.
    """
    with locked(store, service):
        found = read_wanted(store, service)
        changed = change(found)
        if changed is not None:
            changed = replace(changed, counter=(found.counter if found is not None else 0) + 1)
            write_json(wanted_file(store, service), changed)
        return changed
