"""TLS servers on loopback that answer one connection after the other and write down what they were sent, for tests."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


class RecordingServer:
    """Listens on 127.0.0.1:`port`; `received` is everything that arrived inside its connections, in the clear."""

    def __init__(self, context: ssl.SSLContext | None = None, *, answer: bytes = ANSWER, port: int = 0) -> None:
        self.received = b""
        self.connections = 0
        self._context, self._answer = context, answer
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._answer_one, args=(connection,), daemon=True).start()

    def _answer_one(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.settimeout(10)
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True)
            self.received += connection.recv(65536)
            connection.sendall(self._answer)
            connection.close()

    def close(self) -> None:
        # A thread that waits in accept() keeps the socket listening: shutdown wakes it.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def server_context(certificate_file: Path, key_file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate_file, key_file)
    return context
