"""Where the engine of a run listens, and the certificate of the run by which it shows that it is this engine.

The certificate is made before the engine starts, so that the record names it from the beginning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hpc_serve.job.health import EngineAddress
from hpc_serve.job.network import choose_ports
from hpc_serve.job.node import Node
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.trust.authority import RunCertificate, make_run_certificate
from hpc_serve.trust.connection import Identity


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The record to publish, and what belongs to it."""

    record: EndpointRecord
    address: EngineAddress
    certificate: RunCertificate

    @property
    def url(self) -> str:
        return f"https://{self.address.host}:{self.address.port}"

    @property
    def tls_files(self) -> tuple[str, str]:
        """The files of the key and the certificate, as the engine is told them."""
        return str(self.certificate.key_file), str(self.certificate.certificate_file)


def make_endpoint(node: Node, record: EndpointRecord, store: ServiceStore) -> Endpoint:
    """Complete the run's first record. Raises StoreError, RecordError, InvalidRequestError (no `cryptography`)."""
    run_dir = Path(node.environ["HPC_SERVE_JOB_DIR"])
    addresses = dict.fromkeys((*record.hosts, node.head))
    certificate = make_run_certificate(store.home, run_dir, run=node.allocation.run_name, addresses=addresses)
    record = replace(record, certificate=certificate.certificate)
    identity = Identity.of(record, store.read_api_key(record.service))
    address = EngineAddress(host=node.head, port=record.port, identity=identity)
    node.write_settings(port=record.port)
    return Endpoint(record=record, address=address, certificate=certificate)


def move_endpoint(node: Node, endpoint: Endpoint) -> Endpoint:
    """The same endpoint on another port, for an engine that is started again.

    The old port may be somebody else's by then. One that the command names stays. Raises StoreError.
    """
    port = node.command.port or next(port for port in choose_ports(2) if port != endpoint.record.port)
    node.write_settings(port=port)
    return replace(endpoint, record=replace(endpoint.record, port=port), address=replace(endpoint.address, port=port))
