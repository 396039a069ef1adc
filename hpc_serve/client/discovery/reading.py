"""What a client reads of its service, and what it goes on with where that cannot be read.

A shared filesystem may hang: a call on it then returns when the filesystem is back, or never. A client that has proven
replicas waits for a reading a few seconds, and leaves it to a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from hpc_serve.background import in_background
from hpc_serve.client.replicas.proofs import Proofs
from hpc_serve.errors import HpcServeError, RecordError, StoreError
from hpc_serve.rendezvous.entries import RecordFile, ServiceRecords
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ServiceStore

READ_S = 3.0

T = TypeVar("T")


class RecordReader:
    """Reads one service's files. Safe to share between threads."""

    def __init__(self, store: ServiceStore, service: str, proofs: Proofs) -> None:
        self._store = store
        self._service = service
        self._proofs = proofs
        self._live = store.live(service)
        self._hanging: Future[Any] | None = None

    def files(self) -> Sequence[RecordFile]:
        """The files of records that may be live, the newest first. Raises StoreError."""
        return self._in_time(lambda: self._live.files()[0])

    def read(self, files: Sequence[RecordFile]) -> Sequence[EndpointRecord]:
        """The records in these files that can be read and have not ended. Raises StoreError."""
        return self._in_time(lambda: self._live.read(files, []))

    def records(self, wanted: Set[str], *, is_complete: bool) -> ServiceRecords:
        """All that can be read, with the last records of proven replicas for those that cannot. Raises StoreError.

        Records that have ended are there if they are `wanted`, or if it `is_complete`.
        """
        known = self._proofs.proven.keys() | wanted
        try:
            found = self._in_time(
                lambda: self._store.read(self._service) if is_complete else self._live.read_all(known)
            )
        except StoreError as error:
            if not self._proofs.proven:
                raise
            found = ServiceRecords(service=self._service, problems=(str(error),))
        return self._proofs.keep_known(found)

    def record(self, name: str) -> EndpointRecord | None:
        """One record; None if it cannot be read."""
        try:
            records = self._in_time(lambda: self._live.read_all({name})).records
        except HpcServeError:
            return None
        return next((record for record in records if record.name == name), None)

    def api_key(self, known: str) -> str:
        """The service's key; `known`, which the proven replicas took, where the file cannot be read."""
        try:
            return self._in_time(lambda: self._store.read_api_key(self._service))
        except (StoreError, RecordError):
            if not self._proofs.proven:
                raise
            return known

    def _in_time(self, read: Callable[[], T]) -> T:
        """Return what `read` returns. Raises what it raises, or StoreError if it is too late and replicas are known."""
        if not self._proofs.proven:
            return read()
        late = f"{self._store.home} has not answered for {READ_S:.0f} s: its filesystem hangs."
        if self._hanging is not None and not self._hanging.done():
            raise StoreError(late)
        found = in_background(read)
        if not wait([found], timeout=READ_S).done:
            self._hanging = found
            raise StoreError(late)
        return found.result()
