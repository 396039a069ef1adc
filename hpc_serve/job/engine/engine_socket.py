"""The socket that the engine serves on. The head's launcher makes it, and it listens from then on.

vLLM binds its port with SO_REUSEADDR and listens once it has loaded. Until then any user of the node can bind the same
port and listen first. vLLM therefore binds a port that nobody is told of, and its server serves on the launcher's
socket instead. The server asks for the socket when it is up, through a Unix socket in the node's private folder.
"""

from __future__ import annotations

import asyncio
import socket

from hpc_serve.gate.launchers_socket import VARIABLE
from hpc_serve.job.machine.network import LOOPBACK, listen_on
from hpc_serve.job.run.node import Node


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
