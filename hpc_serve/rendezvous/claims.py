"""Two files of a service that are changed under its lock: the claim of its name, and what people want of it.

Replicas of one model share a name; another model waits until all of them are over. Only the scheduler knows whether the
job that holds a name still exists, so callers that can ask it pass `is_over`. wanted.py has the values of what is
wanted. If several programs change them at once, each sees the change before its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_serve.errors import HpcServeError, RecordError, ServiceConflictError, StoreError
from hpc_serve.rendezvous.files import check_folder, explained, read_json, remove_file, write_json
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ABANDONED_AFTER_S, WEEK_S, JobEntry, ServiceRecords, ServiceStore
from hpc_serve.rendezvous.wanted import Wanted

# A claim is checked and written in milliseconds: whoever holds the lock for ten seconds has died.
_LOCK_LEASE_S = 10.0
_LOCK_TIMEOUT_S = 45.0
_UNUSED_CLAIM_S = 60.0
_FILELOCK = "filelock>=3.30"


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """The content of service.json; `claimed_at` is seconds since the epoch."""

    model: str
    claimed_at: float


def claim(store: ServiceStore, service: str, model: str, *, is_over: Callable[[JobEntry], bool] | None = None) -> None:
    """Take the name `service` for `model`; replicas of the same model share it.

    A record or a submitted job of another model holds the name until its job is over. `is_over` decides that, best by
    asking the scheduler. If `is_over` is None, two things count as over: a record that was not renewed for
    ABANDONED_AFTER_S, and a job that was submitted a week ago. Raises ServiceConflictError, StoreError.
    """
    is_over = is_over or _is_abandoned
    path = _claim_path(store, service)
    store.ensure_service(service)
    with locked(store, service):
        found = store.read(service)
        for holder in _holders(found):
            if holder.model != model and not is_over(holder):
                raise ServiceConflictError(_taken(service, model, holder))
        _check_claim(path, service, model, found, now=time.time())
        write_json(path, _Claim(model=model, claimed_at=time.time()))


def release(store: ServiceStore, service: str, model: str) -> None:
    """Give up the claim of a job that was not submitted. Raises StoreError."""
    path = _claim_path(store, service)
    with locked(store, service):
        if (found := _read_claim(path)) is not None and found.model == model:
            remove_file(path)


def require_filelock() -> None:
    """Raises StoreError where this environment's filelock is missing or too old, so that no name can be claimed."""
    try:
        from filelock import SoftFileLease  # noqa: F401
    except ImportError as error:
        import importlib.metadata

        try:
            found = f"filelock {importlib.metadata.version('filelock')}, which is too old"
        except importlib.metadata.PackageNotFoundError:
            found = "no filelock"
        raise StoreError(
            f"this environment ({sys.prefix}) has {found}: hpc-serve needs {_FILELOCK}. Install that beside hpc-serve "
            f"(pip install '{_FILELOCK}'), in the image where the job runs in one."
        ) from error


@contextlib.contextmanager
def locked(store: ServiceStore, service: str) -> Iterator[None]:
    """Hold the lock of a service's claim. Raises StoreError if it is held for too long, or there is no such service."""
    store.require_service(service)  # filelock would make the folders of a home that was moved away
    with lock_file(store.service_dir(service) / ".lock"):
        yield


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold a lock that all nodes see, a file in a folder that exists. Raises StoreError if it is held for too long."""
    require_filelock()
    # flock is local to a node on some shared filesystems; a lock file with a lease works on all, clocks aside.
    from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

    patience_s, before = 2 * _LOCK_LEASE_S, _version(path)
    lease = SoftFileLease(path, lease_duration=_LOCK_LEASE_S, timeout=patience_s, mode=0o600)
    with explained("lock", path):
        try:
            try:
                lease.acquire()
            except Timeout:
                # filelock breaks no empty lock, and none where the filesystem cannot exchange two names, as NFS.
                if _version(path) == before:
                    remove_file(path)
                lease.acquire(timeout=_LOCK_TIMEOUT_S - patience_s)
        except (Timeout, LeaseSettingsMismatch) as error:
            raise StoreError(
                f"cannot lock {path} within {_LOCK_TIMEOUT_S:.0f} s ({type(error).__name__}): another hpc-serve holds "
                "it, or the filesystem does not answer. If no other is running, remove that file."
            ) from error
    try:
        yield
    finally:
        lease.release()


def _version(path: Path) -> tuple[int, int]:
    """Return when a lock was made or renewed, and its inode; whoever holds it renews it every few seconds."""
    with contextlib.suppress(OSError), path.open("rb") as file:  # NFS may show older times to who does not open it
        found = os.fstat(file.fileno())
        return found.st_mtime_ns, found.st_ino
    return 0, 0


def _claim_path(store: ServiceStore, service: str) -> Path:
    return store.service_dir(service) / "service.json"


def _check_claim(path: Path, service: str, model: str, found: ServiceRecords, *, now: float) -> None:
    """Refuse a name that another submit claimed a moment ago and has no job for yet."""
    claimed = _read_claim(path)
    everything: tuple[JobEntry, ...] = (*found.records, *found.submitted)
    if claimed is None or claimed.model == model or any(entry.model == claimed.model for entry in everything):
        return
    age_s = now - claimed.claimed_at
    if 0 <= age_s < _UNUSED_CLAIM_S:
        raise ServiceConflictError(
            f"{service} was claimed for {claimed.model} {age_s:.0f} s ago by another submit, which has no job yet. "
            f"Try again in a minute, or give {model} another name with --service."
        )


def _holders(found: ServiceRecords) -> Iterable[JobEntry]:
    return (*(record for record in found.records if not record.is_final), *found.awaiting_record())


def _is_abandoned(holder: JobEntry) -> bool:
    if isinstance(holder, EndpointRecord):
        return time.time() - holder.updated_at > ABANDONED_AFTER_S
    return time.time() - holder.submitted_at > WEEK_S


def _taken(service: str, model: str, holder: JobEntry) -> str:
    state = f"{holder.state}: {holder.stage}" if isinstance(holder, EndpointRecord) else "submitted"
    return (
        f"{service} is taken by {holder.model} (job {holder.job_id}, {state}). "
        f"Give {model} another name with --service, or end the other one first: hpc-serve stop {service}"
    )


def _read_claim(path: Path) -> _Claim | None:
    try:
        return read_json(_Claim, path)
    except (FileNotFoundError, RecordError):  # a damaged claim claims nothing
        return None


# -- what is wanted


def wanted_file(store: ServiceStore, service: str) -> Path:
    """Return where it is written. Raises InvalidRequestError for names that cannot be files."""
    return store.service_dir(service) / "wanted.json"


def read_wanted(store: ServiceStore, service: str) -> Wanted | None:
    """Return what is written; None if nothing is. Raises StoreError, and RecordError if the file is damaged."""
    path = wanted_file(store, service)
    check_folder(path.parent)
    try:
        return read_json(Wanted, path)
    except FileNotFoundError:
        return None
    except RecordError as error:
        raise RecordError(
            f"What is wanted of {service} is unknown. Wait a minute first: the program that keeps it writes the file "
            f"again. If none does: {error} Then give its options again: hpc-serve submit --name {service}."
        ) from None


def read_wanted_or_none(store: ServiceStore, service: str) -> Wanted | None:
    """Return what is written as far as it can be read, for programs that only show it."""
    try:
        return read_wanted(store, service)
    except HpcServeError:
        return None


def change_wanted(
    store: ServiceStore,
    service: str,
    change: Callable[[Wanted | None], Wanted | None],
    *,
    if_damaged: Wanted | None = None,
) -> Wanted | None:
    """Replace what is written by what `change` makes of it, and return that; None, from `change` too, changes nothing.

    `change` gets `if_damaged` in place of a damaged file. Raises StoreError, and RecordError if that is not given.
    """
    with locked(store, service):
        try:
            found = read_wanted(store, service)
        except RecordError:
            if if_damaged is None:
                raise
            found = if_damaged
        changed = change(found)
        if changed is not None:
            changed = replace(changed, counter=(found.counter if found is not None else 0) + 1)
            write_json(wanted_file(store, service), changed)
        return changed
