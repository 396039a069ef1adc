"""A stranger in the middle: listens on a port of its own and passes every byte on, both ways, and writes them down."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from tests.support.listener import Listener


class Relay(Listener):
    """Passes connections on to 127.0.0.1:`target`. `heard` is what clients sent, `change` may alter it on its way."""

    def __init__(self, target: int, *, change: Callable[[bytes, socket.socket], bytes] | None = None) -> None:
        self.heard = b""
        self._target, self._change = target, change
        super().__init__()

    def handle(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, socket.create_connection(("127.0.0.1", self._target)) as engine:
            back = threading.Thread(target=_copy, args=(engine, connection), daemon=True)
            back.start()
            while data := connection.recv(65536):
                self.heard += data
                engine.sendall(self._change(data, connection) if self._change else data)
            engine.shutdown(socket.SHUT_WR)
            back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
