"""The replica's record while it lives: published early, renewed on a lease, left behind with the reason of its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_serve.errors import HpcServeError
from hpc_serve.job.allocation import Allocation
from hpc_serve.job.network import PortsInUseError
from hpc_serve.rendezvous.record import EndpointRecord, Progress
from hpc_serve.rendezvous.store import ServiceStore, default_home

LEASE_S = 30.0
_MOST_WRITES_PER_S = 1.0


def publish_failure(
    service: str, allocation: Allocation | None, error: HpcServeError, environ: Mapping[str, str]
) -> None:
    """Leave a record of a run that ended before it had one, so that `status` can say why; a clash is tried again."""
    if allocation is None or isinstance(error, PortsInUseError):
        return
    now = time.time()
    record = EndpointRecord(
        service=service,
        model="",
        cluster=allocation.cluster,
        job_id=allocation.job_id,
        restart=allocation.restart,
        user=user_name(),
        state="failed",
        failed_part="launcher",
        reason=str(error),
        exit_code=error.exit_code,
        hosts=(),
        port=0,
        num_nodes=allocation.num_nodes,
        started_at=now,
        updated_at=now,
        log_dir=environ.get("HPC_SERVE_LOG_DIR"),
    )
    with contextlib.suppress(HpcServeError, OSError):
        store = ServiceStore(default_home(environ))
        store.ensure_service(service)
        store.write(record)


def user_name() -> str:
    """The user's name, or number in a container without the site's user database."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


class RecordKeeper:
    """The one writer of one record. `update` changes it, `keep` renews it until cancelled."""

    def __init__(self, store: ServiceStore, record: EndpointRecord) -> None:
        self._store = store
        self.record = record
        self._counter = record.counter
        self._changed = asyncio.Event()
        self._writing = threading.Lock()
        self._write()

    def update(self, **changes: Any) -> None:
        """Change fields; they reach the file within a second, a change of state at once."""
        changed = replace(self.record, **changes)
        if changed == self.record:
            return
        state_before, self.record = self.record.state, changed
        if changed.state != state_before:
            self._write()
        else:
            self._changed.set()

    def stage(self, stage: str, done: int | None = None, total: int | None = None) -> None:
        progress = Progress(done=done, total=total) if done is not None and total is not None else None
        self.update(stage=stage, progress=progress)

    def measure(self, figures: Mapping[str, float]) -> None:
        """Add the engine's own figures, as its log gave them."""
        if figures:
            self.update(measured={**self.record.measured, **figures})

    async def keep(self) -> None:
        """Write what changed, and renew the lease when nothing did."""
        while True:
            try:
                await asyncio.wait_for(self._changed.wait(), LEASE_S / 3)
            except asyncio.TimeoutError:
                pass
            self._changed.clear()
            await asyncio.to_thread(self._write)
            await asyncio.sleep(1 / _MOST_WRITES_PER_S)

    def _write(self) -> None:
        # A renewal, written from a thread, must neither undo a change nor be written over it.
        with self._writing:
            self._counter += 1
            record = replace(self.record, counter=self._counter, updated_at=time.time())
            try:
                self._store.write(record)
            except OSError as error:  # a full or absent shared filesystem must not end a service that works
                print(f"hpc-serve: cannot write the record: {error}", file=sys.stderr, flush=True)
