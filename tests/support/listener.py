"""A listener on loopback that hands each connection to a method, in a thread of its own, for tests."""

from __future__ import annotations

import contextlib
import socket
import threading


class Listener:
    """Listens on 127.0.0.1:`port` from the moment it is made until `close`."""

    def __init__(self, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def handle(self, connection: socket.socket) -> None:
        raise NotImplementedError

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self.handle, args=(connection,), daemon=True).start()

    def close(self) -> None:
        # A thread that waits in accept() keeps the socket listening: shutdown wakes it.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
