"""The run of a job, as the duties of the program beside its launcher (service_keeper.py) find it in the home."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpc_serve.rendezvous.drain import DrainRequest, drain_file, read_drain_request
from hpc_serve.rendezvous.files import read_private
from hpc_serve.rendezvous.names import record_file_name
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ServiceStore


@dataclass(kw_only=True)
class OwnRun:
    """One run of a job with one replica: the base of each duty."""

    store: ServiceStore
    service: str
    job_id: str
    restart: int

    @property
    def own_name(self) -> str:
        """The name of its record."""
        return record_file_name(self.job_id, self.restart, 0)

    @property
    def own_drain_file(self) -> Path:
        """Where it is asked to drain."""
        return drain_file(self.store, self.service, job_id=self.job_id, restart=self.restart, replica=0)

    def own_drain_request(self) -> DrainRequest | None:
        """What it was asked. Raises RecordError."""
        return read_drain_request(self.own_drain_file)

    def own_record(self) -> EndpointRecord | None:
        """Its record; None before its launcher has written one. Raises StoreError, RecordError."""
        path = self.store.service_dir(self.service) / self.own_name
        try:
            return EndpointRecord.from_json(read_private(path), source=str(path))
        except FileNotFoundError:
            return None
