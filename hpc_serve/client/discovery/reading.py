"""What a client reads of its service, what it goes on with where that cannot be read, and whom it asks first.

A shared filesystem may hang: a call on it then returns when the filesystem is back, or never. A client that has proven
replicas waits for a reading a few seconds, and leaves it to a thread of its own.

A search asks the replicas whose records were written last first, side by side, and is over with the first that answers.
The others go on being asked in threads of their own, and replicas that do not renew their records come after all that
do. The caller decides what an answer means.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from hpc_serve.background import in_background
from hpc_serve.client.replicas.probe import Proofs
from hpc_serve.client.replicas.status import ProbeResult
from hpc_serve.errors import HpcServeError, RecordError, StoreError
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import RecordFile, ServiceRecords, ServiceStore

T = TypeVar("T")

READ_S = 3.0  # for a reading, where replicas are known
_FIRST = 4  # so many are asked first, then twice as many, and so on
_MOST_AT_ONCE = 64  # replicas that do not renew their records and are asked at the same time
_PAUSE_S = 0.05  # before the next ones are asked, while none of the newer ones has answered
_MOST_GRACE_S = 0.05


class Search:
    """One search. `answers` are all records that were asked, with what they answered; None until they do.

    `read` gives the records of files, `ask` asks the engine of one. `ask` is called in threads.
    """

    def __init__(
        self,
        *,
        read: Callable[[Sequence[RecordFile]], Sequence[EndpointRecord]],
        ask: Callable[[EndpointRecord], ProbeResult],
    ) -> None:
        self.answers: dict[str, tuple[EndpointRecord, ProbeResult | None]] = {}
        self.is_ready = False
        self._read = read
        self._ask = ask
        self._changed = threading.Condition()
        self._waiting = 0

    def run(self, files: Sequence[RecordFile]) -> None:
        """Ask until one is ready, or all have answered. Once one is ready the others have as long again as it took."""
        began_at_s, read, count = time.monotonic(), 0, _FIRST
        overdue: list[EndpointRecord] = []
        while read < len(files) and not self.is_ready:
            records = self._read(files[read : read + count])
            renewed = [record for record in records if not record.is_overdue(time.time())]
            overdue += [record for record in records if record not in renewed]
            for record in renewed:
                self._start(record)
            read += count
            count *= 2
            self._wait(_PAUSE_S if renewed else 0.0)
        overdue.sort(key=lambda record: record.updated_at)
        while overdue and not self.is_ready:
            self._start(overdue.pop())
            with self._changed:
                self._changed.wait_for(lambda: self.is_ready or self._waiting < _MOST_AT_ONCE)
        if self.is_ready or self._wait(None):
            took_s = time.monotonic() - began_at_s
            with self._changed:
                self._changed.wait_for(lambda: not self._waiting, timeout=min(took_s, _MOST_GRACE_S))

    def _start(self, record: EndpointRecord) -> None:
        with self._changed:
            self.answers[record.name] = record, None
            self._waiting += 1
        in_background(self._ask_one, record)

    def _ask_one(self, record: EndpointRecord) -> None:
        result = None
        try:
            result = self._ask(record)
        finally:
            with self._changed:
                self.answers[record.name] = record, result
                self.is_ready = self.is_ready or (result is not None and result.status == "ready")
                self._waiting -= 1
                self._changed.notify_all()

    def _wait(self, timeout_s: float | None) -> bool:
        """Wait until one is ready or all have answered; whether one is ready."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_ready or not self._waiting, timeout=timeout_s)
            return self.is_ready


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
