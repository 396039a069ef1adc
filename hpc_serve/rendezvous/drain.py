"""How a replica is asked to drain: a file beside its record, which its head looks for.

Every program that may write into the service's folder may ask: `hpc-serve stop`, or the batch script before the time
limit. The head decides what draining is, and how long it may take in fact.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hpc_serve.errors import RecordError, StoreError
from hpc_serve.rendezvous.fields import MAY_BE_MISSING, from_json_text
from hpc_serve.rendezvous.files import read_private, write_json
from hpc_serve.rendezvous.store import ServiceStore

# slurm: before the time limit or a preemption. handover: another replica has taken over. stop: a person ends it.
# surplus: it is not needed. unknown: the file is there and cannot be read, for example as the disk was full.
DrainCause = Literal["slurm", "handover", "stop", "surplus", "unknown"]
_UNKNOWN_S = 100.0  # what the batch script leaves of a notice of two minutes


@dataclass(frozen=True, kw_only=True)
class DrainRequest:
    """A request to drain: its author, its cause, and the seconds that requests under way may take; 0 ends at once.

    The batch script writes no cause: it asks when Slurm does. `requested_at` is seconds since the epoch by the author's
    clock. The head counts by its own clock.
    """

    by: str
    deadline_s: float
    requested_at: float | None = field(default=None, metadata=MAY_BE_MISSING)
    cause: DrainCause = field(default="slurm", metadata=MAY_BE_MISSING)


def drain_file(store: ServiceStore, service: str, record_name: str) -> Path:
    """Return the path of a request to drain the replica of a record. Raises InvalidRequestError for a wrong service."""
    return store.beside_record(service, record_name, ".drain")


def ask_to_drain(path: Path, request: DrainRequest) -> None:
    """Ask the replica of `path`; a later request takes the place of an earlier one. Raises StoreError."""
    write_json(path, request)


def read_drain_request(path: Path) -> DrainRequest | None:
    """Return what is asked; None if nothing is, if the folder cannot be read now, or if it is not ours.

    A file that is empty or damaged asks for a drain, too: its writer died, or had no room on the disk.
    """
    try:
        text = read_private(path)
    except (FileNotFoundError, StoreError, RecordError):  # or others may have written it
        return None
    try:
        request = from_json_text(DrainRequest, text, source=str(path))
    except RecordError as error:
        return DrainRequest(by=f"an unreadable request ({error})", cause="unknown", deadline_s=_UNKNOWN_S)
    return replace(request, deadline_s=max(0.0, request.deadline_s))
