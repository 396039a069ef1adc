"""Who may use a service's name: replicas of one model share it, another model has to wait until they are over.

The claim is one file, guarded by the only lock there is among the shared files. Whether a job that seems to hold the
name still lives is the scheduler's to say: whoever can ask it brings the judge.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc_serve.errors import RecordError, ServiceConflictError, StoreError
from hpc_serve.rendezvous.fields import FieldReader
from hpc_serve.rendezvous.files import read_private, remove_file, write_private
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import SILENT_S, WEEK_S, Holder, ServiceRecords, ServiceStore

# A claim is checked and written in milliseconds; a holder that is silent for ten seconds has died.
_LOCK_LEASE_S = 10.0
_LOCK_TIMEOUT_S = 45.0
_UNUSED_CLAIM_S = 60.0


def claim(store: ServiceStore, service: str, model: str, *, is_over: Callable[[Holder], bool] | None = None) -> None:
    """Take the name `service` for `model`; replicas of the same model share it.

    A record or a submitted job of another model holds the name unless it is final or `is_over` says that it ended:
    ask the scheduler there. Without it, SILENT_S without a renewal, or a week in the queue, is taken as the end.
    Raises ServiceConflictError, StoreError.
    """
    judge = is_over or _is_long_silent
    path = _claim_path(store, service)
    store.ensure_service(service)
    with locked(store, service):
        found = store.read(service)
        for holder in _holders(found):
            if holder.model != model and not judge(holder):
                raise ServiceConflictError(_taken(service, model, holder))
        _check_claim(path, service, model, found)
        write_private(path, json.dumps({"model": model, "claimed_at": time.time()}) + "\n")


def release(store: ServiceStore, service: str, model: str) -> None:
    """Give up a claim that came to nothing (sbatch refused the job). Raises StoreError."""
    path = _claim_path(store, service)
    with locked(store, service):
        if (found := _read_claim(path)) is not None and found[0] == model:
            remove_file(path)


@contextmanager
def locked(store: ServiceStore, service: str) -> Iterator[None]:
    """Hold the lock of a service's claim. Raises StoreError if it is held for too long."""
    # flock is local to a node on some shared filesystems; a lock file with a lease works on all, clocks aside.
    from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

    path = store.service_dir(service) / ".lock"
    lease = SoftFileLease(path, lease_duration=_LOCK_LEASE_S, timeout=_LOCK_TIMEOUT_S, mode=0o600)
    try:
        lease.acquire()
    except (Timeout, LeaseSettingsMismatch, OSError) as error:
        raise StoreError(
            f"cannot lock {path} within {_LOCK_TIMEOUT_S:.0f} s ({type(error).__name__}): another submit holds it, "
            "or the filesystem does not answer. If no other is running, remove that file."
        ) from error
    try:
        yield
    finally:
        lease.release()


def _claim_path(store: ServiceStore, service: str) -> Path:
    return store.service_dir(service) / "service.json"


def _check_claim(path: Path, service: str, model: str, found: ServiceRecords) -> None:
    """Two first submits at once: neither has a record yet, so the fresh claim of the other one counts."""
    claimed = _read_claim(path)
    everything: tuple[Holder, ...] = (*found.records, *found.submitted)
    if claimed is None or claimed[0] == model or any(entry.model == claimed[0] for entry in everything):
        return
    age_s = time.time() - claimed[1]
    if 0 <= age_s < _UNUSED_CLAIM_S:
        raise ServiceConflictError(
            f"{service} was claimed for {claimed[0]} {age_s:.0f} s ago by another submit, which has no job yet. "
            f"Try again in a minute, or give {model} another name with --service."
        )


def _holders(found: ServiceRecords) -> Iterable[Holder]:
    return (*(record for record in found.records if not record.is_final), *found.coming())


def _is_long_silent(holder: Holder) -> bool:
    if isinstance(holder, EndpointRecord):
        return time.time() - holder.updated_at > SILENT_S
    return time.time() - holder.submitted_at > WEEK_S


def _taken(service: str, model: str, holder: Holder) -> str:
    state = f"{holder.state}: {holder.stage}" if isinstance(holder, EndpointRecord) else "submitted"
    return (
        f"{service} is taken by {holder.model} (job {holder.job_id}, {state}). "
        f"Give {model} another name with --service, or end the other one first: hpc-serve stop {service}"
    )


def _read_claim(path: Path) -> tuple[str, float] | None:
    try:
        read = FieldReader.parse(read_private(path), str(path))
        return read.text("model"), read.number("claimed_at")
    except (FileNotFoundError, RecordError):  # a damaged claim claims nothing
        return None
