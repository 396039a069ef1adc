"""Which job takes over from a replica before its time limit: one file beside the record, and who may submit that job.

Several programs may want to submit a successor at once: `replace_successor` lets one of them claim it. When one is
needed is decided in submit/services/handover.py.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from hpc_serve.errors import HpcServeError, RecordError
from hpc_serve.rendezvous.claims import locked
from hpc_serve.rendezvous.fields import Timestamp, from_json_text, to_json_text
from hpc_serve.rendezvous.files import read_private, write_private
from hpc_serve.rendezvous.names import successor_file_name
from hpc_serve.rendezvous.store import ServiceStore

# sbatch is given a minute, and tries again itself: whoever says for so long that it submits has died.
_SUBMITTING_S = 180.0


@dataclass(frozen=True, kw_only=True)
class Successor:
    """What has been done for a successor. `job_id` is empty until one was submitted, `tries` counts them.

    `problem` says why there is none, or why the last one does not count any more; then another is submitted at
    `next_try_at`. Times are seconds since the epoch by the clock of the job's first node.
    """

    job_id: str = ""
    tries: int = 0
    claimed_at: Timestamp = 0.0
    problem: str = ""
    next_try_at: Timestamp = 0.0

    def may_be_tried(self, now: float) -> bool:
        """Whether another may be submitted: the last one failed, or nobody is at it any more."""
        if self.problem:
            return now >= self.next_try_at
        return not self.job_id and now - self.claimed_at > _SUBMITTING_S

    @property
    def is_submitted(self) -> bool:
        """Whether there is one that may become ready."""
        return bool(self.job_id) and not self.problem


def successor_file(store: ServiceStore, service: str, *, job_id: str, replica: int = 0) -> Path:
    """Raises InvalidRequestError for names that cannot be files."""
    return store.service_dir(service) / successor_file_name(job_id, replica)


def read_successor(path: Path) -> Successor | None:
    """What is written; None if nothing is, or if the file is damaged. Raises StoreError."""
    with contextlib.suppress(FileNotFoundError, RecordError):
        return from_json_text(Successor, read_private(path), source=str(path))
    return None


def write_successor(path: Path, successor: Successor) -> None:
    """Replace what is written. Raises StoreError."""
    write_private(path, to_json_text(successor))


def replace_successor(store: ServiceStore, service: str, path: Path, *, seen: Successor | None, by: Successor) -> bool:
    """Replace what is written if it is still as `seen`; returns whether it was. Of several that try at once one does.

    Raises StoreError if the service's lock is held for too long.
    """
    with locked(store, service):
        if read_successor(path) != seen:
            return False
        write_successor(path, by)
        return True


def successor_of(store: ServiceStore, service: str, *, job_id: str, replica: int) -> Successor | None:
    """The successor of a replica as far as it can be read, for those who show it."""
    try:
        return read_successor(successor_file(store, service, job_id=job_id, replica=replica))
    except HpcServeError:
        return None
