"""The socket that the engine serves on. The head's launcher makes it, and it listens from then on.

vLLM binds its port with SO_REUSEADDR and listens once it has loaded. Until then any user of the node can bind the same
port and listen first. vLLM therefore binds a port that nobody is told of, and its server serves on the launcher's
socket instead. The server asks for the socket when it is up, through a Unix socket in the node's private folder.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from hpc_serve.gate.launchers_socket import VARIABLE
from hpc_serve.job.machine.network import listen_on


class EngineSocket:
    """Listens on `port` of `host`, or with 0 on one of the kernel's choice, until the engine closes it, or `close`.

    One connection waits until the engine accepts it. The kernel drops others, so that they take no memory.
    `servers` is how many processes of the engine serve on it. Raises PortsInUseError.
    """

    def __init__(self, path: Path, *, host: str, port: int, servers: int) -> None:
        self._path, self._servers = path, servers
        self._listener = listen_on(port, host=host, most_waiting=0)
        self.port: int = self._listener.getsockname()[1]
        self.is_taken = asyncio.Event()
        """Whether a server of the engine has it, and accepts connections now or in a moment."""
        self._asked = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        self._asked.bind(str(path))
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
