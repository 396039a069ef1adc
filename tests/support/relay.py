"""A stranger in the middle: listens on a port of its own and passes every byte on, both ways, and writes them down."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Relay:
    """Passes connections on to 127.0.0.1:`target`. `heard` is what clients sent, `change` may alter it on its way."""

    def __init__(self, target: int, *, change: Callable[[bytes, socket.socket], bytes] | None = None) -> None:
        self.heard = b""
        self._target, self._change = target, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self._target)) as engine:
            back = threading.Thread(target=_copy, args=(engine, client), daemon=True)
            back.start()
            while data := client.recv(65536):
                self.heard += data
                engine.sendall(self._change(data, client) if self._change else data)
            engine.shutdown(socket.SHUT_WR)
            back.join()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
