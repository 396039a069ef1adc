"""The socket that the engine serves on. The head's launcher makes it, and it listens from then on.

vLLM binds its port with SO_REUSEADDR and listens once it has loaded. Until then any user of the node can bind the same
port and listen first. So vLLM binds a port that nobody is told of, and its server serves on the launcher's socket in
place of that. The server asks for the socket when it is up, through a Unix socket in the node's private folder.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
from pathlib import Path
from typing import Any

from hpc_serve.job.machine.network import listen_on

VARIABLE = "HPC_SERVE_ENGINE_SOCKET"
"""The Unix socket's path, for the engine's processes."""
_ANSWER_S = 60.0


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


def serve_on_launchers_socket() -> None:
    """Have every uvicorn server of this process serve on the launcher's socket, if there is a launcher."""
    if (path := os.environ.get(VARIABLE)) is None:
        return
    server: Any = importlib.import_module("uvicorn").Server
    serve = server.serve

    async def serve_there(self: Any, sockets: list[socket.socket] | None = None) -> None:
        for unused in sockets or ():
            unused.close()
        await serve(self, [take(path)])

    server.serve = serve_there


def take(path: str) -> socket.socket:
    """The launcher's socket. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as launcher:
        launcher.settimeout(_ANSWER_S)
        launcher.connect(path)
        _, descriptors, _, _ = socket.recv_fds(launcher, 1, 1, socket.MSG_CMSG_CLOEXEC)
    return socket.socket(fileno=descriptors[0])
