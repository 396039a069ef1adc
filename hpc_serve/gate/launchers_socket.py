"""In the engine's process: its server serves on the socket that the launcher made (job/engine/engine_process.py).

The server asks for the socket when it is up, through a Unix socket in the node's private folder.
"""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any

VARIABLE = "HPC_SERVE_ENGINE_SOCKET"
"""The Unix socket's path, for the engine's processes."""
_ANSWER_S = 60.0


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
    """Take the launcher's socket, and return it. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as launcher:
        launcher.settimeout(_ANSWER_S)
        launcher.connect(path)
        _, descriptors, _, _ = socket.recv_fds(launcher, 1, 1, socket.MSG_CMSG_CLOEXEC)
    return socket.socket(fileno=descriptors[0])
