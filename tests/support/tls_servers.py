"""TLS servers on loopback that answer one connection after the other and write down what they were sent, for tests."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path

from tests.support.listener import Listener

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


class RecordingServer(Listener):
    """Listens on 127.0.0.1:`port`; `received` is everything that arrived inside its connections, in the clear."""

    def __init__(self, context: ssl.SSLContext | None = None, *, answer: bytes = ANSWER, port: int = 0) -> None:
        self.received = b""
        self.connections = 0
        self._context, self._answer = context, answer
        super().__init__(port)

    def handle(self, connection: socket.socket) -> None:
        self.connections += 1
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.settimeout(60)
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True)
            self.received += connection.recv(65536)
            connection.sendall(self._answer)
            connection.close()


def server_context(certificate_file: Path, key_file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate_file, key_file)
    return context
