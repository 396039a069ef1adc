"""The engine's process on the head: its socket, its address and certificate, its command, and imports before its start.

Socket and certificate are made first, so that the record names them from the beginning. vLLM binds its port with
SO_REUSEADDR and listens once it has loaded; until then any user of the node can bind that port too, and listen first.
So vLLM binds a port that nobody is told of, and its server asks for the launcher's socket when it is up.

Over Ray the engine starts once all nodes have joined. Until then a child imports vLLM's command line (`engine_start`),
five seconds of a core, and is told the command later. The command itself is started if `vllm` is not the script of this
Python, if the device is a TPU (an import may take its chips), and whenever the engine is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hpc_serve.gate.engine_facts import LEAST_STEP_VARIABLE
from hpc_serve.gate.launchers_socket import VARIABLE
from hpc_serve.job.engine import engine_start
from hpc_serve.job.engine.health import EngineAddress
from hpc_serve.job.machine.network import LOOPBACK, listen_on
from hpc_serve.job.machine.process import ENGINE_MARK, Child, is_own_script, mark_environ
from hpc_serve.job.run.node import Node
from hpc_serve.job.run.parts import Parts, StopOrder, drain_s_after_signal
from hpc_serve.job.run.record_keeper import RecordKeeper, first_record
from hpc_serve.rendezvous.gate_headers import LAUNCHER_VARIABLE
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.trust.certificates import RunCertificate, make_run_certificate
from hpc_serve.trust.connection import Identity
from hpc_serve.vllm.command import server_args

_log = logging.getLogger(__name__)
_NAME = "engine"
_GRACE_S = 1.0


class EngineSocket:
    """Listens on the port that the engine's command names, or on one of the kernel's choice, until the engine closes
    it, or `close`.

    One connection waits until the engine accepts it. The kernel drops others, so that they take no memory. Raises
    PortsInUseError.
    """

    def __init__(self, node: Node) -> None:
        self._path, self._servers = node.node_dir / "engine.socket", node.command.api_servers
        host = LOOPBACK if node.allocation.cluster == "local" else ""
        self._listener = listen_on(node.command.port or 0, host=host, most_waiting=0)
        self.port: int = self._listener.getsockname()[1]
        self.is_taken = asyncio.Event()
        """Whether a server of the engine has it, and accepts connections now or in a moment."""
        self._asked = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path.unlink(missing_ok=True)
        self._asked.bind(str(self._path))
        self._asked.listen()
        self._asked.setblocking(False)

    @property
    def environ(self) -> dict[str, str]:
        return {VARIABLE: str(self._path)}

    async def hand_over(self) -> None:
        """Give the socket to each server that asks. Afterwards it lives as long as they do."""
        loop = asyncio.get_running_loop()
        for _ in range(self._servers):
            server, _ = await loop.sock_accept(self._asked)
            with server:
                socket.send_fds(server, [b"1"], [self._listener.fileno()])
            self.is_taken.set()
        self.close()

    def close(self) -> None:
        """Close the launcher's own end."""
        self._listener.close()
        self._asked.close()


@dataclass(frozen=True, kw_only=True)
class EngineEndpoint:
    """The socket of an engine, its address, and the certificate that it shows."""

    socket: EngineSocket
    address: EngineAddress
    certificate: RunCertificate


def make_endpoint(node: Node, store: ServiceStore) -> tuple[EngineEndpoint, RecordKeeper]:
    """Listen, and publish this node's first record.

    Raises StoreError, RecordError, InvalidRequestError (no `cryptography`), PortsInUseError.
    """
    record = first_record(node)
    folder = Path(node.environ["HPC_SERVE_JOB_DIR"]) if node.allocation.is_head else node.node_dir
    addresses = dict.fromkeys((*record.hosts, node.address))
    certificate = make_run_certificate(store.home, folder, run=node.allocation.run_name, addresses=addresses)
    opened = EngineSocket(node)
    record = replace(record, port=opened.port, certificate=certificate.certificate, signs=True)
    identity = Identity.of(record, store.read_api_key(record.service))
    address = EngineAddress(host=node.address, port=record.port, identity=identity, token=secrets.token_hex(16))
    return EngineEndpoint(socket=opened, address=address, certificate=certificate), RecordKeeper(store, record)


def move_endpoint(node: Node, endpoint: EngineEndpoint) -> EngineEndpoint:
    """Return the endpoint with a new socket, for an engine that is started again.

    The old port went with the old engine. A port that the command names stays. Raises PortsInUseError.
    """
    opened = EngineSocket(node)
    return replace(endpoint, socket=opened, address=replace(endpoint.address, port=opened.port))


class EngineProcess:
    """Starts the engine's process on the head. `on_line` gets its lines, without the lines that are noise."""

    def __init__(
        self, node: Node, parts: Parts, *, on_line: Callable[[str], None], is_noise: Callable[[str], bool]
    ) -> None:
        self._node, self._parts = node, parts
        self._start_child = partial(parts.start_child, _NAME, on_line=on_line, is_noise=is_noise)
        self._held: Child | None = None

    async def hold(self, endpoint: EngineEndpoint, environ: Mapping[str, str]) -> None:
        """Start the import of vLLM, if possible. `environ` lacks only RAY_ADDRESS of what `start` will have."""
        script = shutil.which(self._node.command.argv[0], path=environ.get("PATH"))
        if self._node.options.device == "TPU" or not is_own_script(script, engine_start.VLLM_MODULE):
            return
        assert script is not None
        argv = [sys.executable, "-m", engine_start.__name__, script, *self._argv(endpoint)[1:]]
        self._parts.add(StopOrder.ENGINE, self._end_held)
        with contextlib.suppress(OSError):  # the start says what is wrong
            self._held = await self._start_child(argv, self._environ(endpoint, environ), told=True)

    async def start(self, endpoint: EngineEndpoint, environ: Mapping[str, str]) -> Child:
        """Start the engine with exactly `environ` and what its endpoint needs. Raises PartFailedError."""
        argv = self._argv(endpoint)
        _log.info("engine command: %s", " ".join(argv))
        held, self._held = self._held, None
        if held is not None and held.exit_code is None:
            held.tell(json.dumps({"RAY_ADDRESS": environ["RAY_ADDRESS"]}))
            return held
        return await self._start_child(argv, self._environ(endpoint, environ))

    async def _end_held(self) -> None:
        if self._held is not None:
            await self._held.stop(min(_GRACE_S, self._parts.run_end.grace_s))

    def _argv(self, endpoint: EngineEndpoint) -> list[str]:
        node, command, shown = self._node, self._node.command, endpoint.certificate
        added = server_args(
            command,
            tls_files=(str(shown.key_file), str(shown.certificate_file)),
            shutdown_timeout_s=int(drain_s_after_signal(node.options.kill_wait_s)),
        )
        return [*command.argv, *added, *node.rank_args()]

    def _environ(self, endpoint: EngineEndpoint, environ: Mapping[str, str]) -> dict[str, str]:
        least_step = {LEAST_STEP_VARIABLE: str(self._node.options.canary_s)}
        mark = mark_environ(self._node.run_mark, variable=ENGINE_MARK)
        adapters: dict[str, str] = {}
        if self._node.command.takes_adapters:
            adapters = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", LAUNCHER_VARIABLE: endpoint.address.token}
        return {**environ, **endpoint.socket.environ, **least_step, **adapters, **mark}
