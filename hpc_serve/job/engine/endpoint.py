"""The address of a run's engine, and the run's certificate, by which the engine proves its identity.

The socket and the certificate are made before the engine starts, so that the record names them from the beginning.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_serve.job.engine.engine_socket import EngineSocket
from hpc_serve.job.engine.health import EngineAddress
from hpc_serve.job.run.node import Node
from hpc_serve.job.run.record_keeper import RecordKeeper, first_record
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.trust.authority import RunCertificate, make_run_certificate
from hpc_serve.trust.connection import Identity


@dataclass(frozen=True, kw_only=True)
class EngineEndpoint:
    """The socket of an engine, its address, and the certificate that it shows."""

    socket: EngineSocket
    address: EngineAddress
    certificate: RunCertificate

    @property
    def tls_files(self) -> tuple[str, str]:
        """Return the files of the key and the certificate, as the engine is told them."""
        return str(self.certificate.key_file), str(self.certificate.certificate_file)


def make_endpoint(node: Node, store: ServiceStore) -> tuple[EngineEndpoint, RecordKeeper]:
    """Listen, and publish this node's first record.

    Raises StoreError, RecordError, InvalidRequestError (no `cryptography`), PortsInUseError.
    """
    record = first_record(node)
    folder = Path(node.environ["HPC_SERVE_JOB_DIR"]) if node.allocation.is_head else node.node_dir
    addresses = dict.fromkeys((*record.hosts, node.address))
    certificate = make_run_certificate(store.home, folder, run=node.allocation.run_name, addresses=addresses)
    socket = EngineSocket(node)
    record = replace(record, port=socket.port, certificate=certificate.certificate, signs=True)
    identity = Identity.of(record, store.read_api_key(record.service))
    address = EngineAddress(host=node.address, port=record.port, identity=identity, token=secrets.token_hex(16))
    return EngineEndpoint(socket=socket, address=address, certificate=certificate), RecordKeeper(store, record)


def move_endpoint(node: Node, endpoint: EngineEndpoint) -> EngineEndpoint:
    """Return the endpoint with a new socket, for an engine that is started again.

    The old port went with the old engine. A port that the command names stays. Raises PortsInUseError.
    """
    socket = EngineSocket(node)
    return replace(endpoint, socket=socket, address=replace(endpoint.address, port=socket.port))
