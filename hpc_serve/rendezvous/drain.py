"""How a replica is asked to drain: a file beside its record, which its head looks for.

Whoever may write into the service's folder may ask: `hpc-serve stop`, or the batch script before the time limit. What
draining is, and how long it may take in fact, is decided by the head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hpc_serve.errors import RecordError, StoreError
from hpc_serve.rendezvous.fields import MAY_BE_MISSING, from_json_text, to_json_text
from hpc_serve.rendezvous.files import read_private, remove_file, write_private
from hpc_serve.rendezvous.names import drain_file_name
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ServiceStore


@dataclass(frozen=True, kw_only=True)
class DrainRequest:
    """Who asks, and how many seconds the requests under way may take; with 0 the replica ends at once.

    `requested_at` is seconds since the epoch by the clock of who asks. The head counts by its own.
    """

    by: str
    deadline_s: float
    requested_at: float | None = field(default=None, metadata=MAY_BE_MISSING)


def drain_file(store: ServiceStore, service: str, *, job_id: str, restart: int, replica: int) -> Path:
    """Where a replica is asked. Raises InvalidRequestError for names that cannot be files."""
    return store.service_dir(service) / drain_file_name(job_id, restart, replica)


def drain_file_of(store: ServiceStore, record: EndpointRecord) -> Path:
    """Where the replica of a record is asked. Raises InvalidRequestError for names that cannot be files."""
    return drain_file(store, record.service, job_id=record.job_id, restart=record.restart, replica=record.replica)


def ask_to_drain(path: Path, request: DrainRequest) -> None:
    """Ask the replica of `path`; a later request takes the place of an earlier one. Raises StoreError."""
    write_private(path, to_json_text(request))


def read_drain_request(path: Path) -> DrainRequest | None:
    """What is asked; None if nothing is, or if the folder cannot be read now. Raises RecordError."""
    try:
        request = from_json_text(DrainRequest, read_private(path), source=str(path))
    except (FileNotFoundError, StoreError):
        return None
    if request.deadline_s < 0:
        raise RecordError(f"{path} asks for a drain of {request.deadline_s} s; remove it.")
    return request


def forget_drain_request(path: Path) -> None:
    """Remove what was asked. Raises StoreError."""
    remove_file(path)
