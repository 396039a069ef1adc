"""A stranger's program that listens where a record says that an engine is: python -m tests.faults.hostile MANNER

It prints its port, then takes connections: `silent` answers none of them, `nonsense` answers what is no protocol.
"""

from __future__ import annotations

import contextlib
import socket
import sys

MANNERS = ("silent", "nonsense")


def main(manner: str) -> None:
    kept = []
    with socket.create_server(("0.0.0.0", 0), backlog=128) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            kept.append(connection)
            if manner == "nonsense":
                with contextlib.suppress(OSError), kept.pop():
                    connection.sendall(b"220 nonsense\r\n" * 100)


if __name__ == "__main__":
    main(sys.argv[1])
