"""What a stranger on the cluster tries; run by the tests as a second user. `python stranger.py TRY ARGUMENTS …`.

Each try prints one JSON object. It needs no part of hpc_serve: a stranger writes his own bytes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import resource
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SYNC = "/ray.rpc.syncer.RaySyncer/StartSync"
NODES = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"


def call_ray(host: str, ports: str, most_s: str, *folder: str) -> dict[str, str]:
    """Two calls of `most_s` seconds on each port, with no certificate, or with the one in `folder`; what came back.

    StartSync without its `node_id` metadata ends a Ray that listens to it. No token is sent unless `folder` has one.
    """
    grpc = importlib.import_module("grpc")

    def channel(port: str) -> Any:
        if not folder:
            return grpc.insecure_channel(f"{host}:{port}")
        files = (Path(folder[0]) / name for name in ("authority.pem", "node.key", "node.pem"))
        credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
        return grpc.secure_channel(f"{host}:{port}", credentials)

    def call(port: str, path: str) -> str:
        with channel(port) as open_channel:
            try:
                for _ in open_channel.stream_stream(path)(iter([b""]), timeout=float(most_s)):
                    pass
                return "answered"
            except grpc.RpcError as error:
                return str(error.code().name)

    calls = [(port, path) for port in ports.split(",") for path in (NODES, SYNC)]
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda one: call(*one), calls)
    return {f"{port}{path}": answer for (port, path), answer in zip(calls, answers, strict=True)}


def call_with_wrong_token(host: str, port: str, folder: str) -> dict[str, str]:
    """Ask for the list of nodes with a certificate of the run and a token that is not its own."""
    grpc = importlib.import_module("grpc")
    files = (Path(folder) / name for name in ("authority.pem", "node.key", "node.pem"))
    credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
    with grpc.secure_channel(f"{host}:{port}", credentials) as channel:
        try:
            channel.unary_unary(NODES)(b"", timeout=120, metadata=(("authorization", "Bearer " + "0" * 64),))
            return {"answer": "answered"}
        except grpc.RpcError as error:
            return {"answer": error.code().name}


def take_a_port_in_every_block() -> dict[str, int]:
    """Listen on one port of every 256, say so, and stay until the input ends."""
    held = []
    for first in range(10_240, 32_768, 256):
        for port in range(first + 9, first + 200):
            try:
                held.append(socket.create_server(("", port)))
                break
            except OSError:
                continue
    print(json.dumps({"held": len(held)}), flush=True)
    time.sleep(3600)
    return {}


def listen_beside_silent_ports(enough: str) -> dict[str, list[int]]:
    """Listen on every port that a program has bound and does not listen on, until a file is there; which those were.

    With SO_REUSEADDR on both sockets anybody may bind the same port, and the first that listens has it.
    """
    taken: dict[int, socket.socket] = {}
    print(json.dumps({"began": True}), flush=True)
    while not Path(enough).exists():
        for port in range(10_240, 65_536):
            if port not in taken and (own := listener_beside(port)) is not None:
                taken[port] = own
    return {"taken": sorted(taken)}


def listener_beside(port: int) -> socket.socket | None:
    """A listener on a port that another program has bound; None if none has, or if it listens."""
    if (free := bind(port)) is not None:
        free.close()
        return None
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        own.bind(("", port))
        own.listen()
    except OSError:
        own.close()
        return None
    return own


def bind(port: int) -> socket.socket | None:
    bound = socket.socket()
    try:
        bound.bind(("", port))
    except OSError:
        bound.close()
        return None
    return bound


def take_the_range_after_prepare(enough: str) -> dict[str, int]:
    """Hold every port below the ephemeral ones for a second after each `prepare`, until a file is there; how often."""
    times = 0
    print(json.dumps({"began": True}), flush=True)
    while not Path(enough).exists():
        if not is_preparing():
            continue
        while is_preparing():
            pass
        times += 1
        for first in range(10_240, 32_768, 2_816):  # one process may have too few descriptors for all
            if not os.fork():
                held = [bind(port) for port in range(first, first + 2_816)]
                time.sleep(1.2)
                os._exit(len(held) == 0)
        for _ in range(10_240, 32_768, 2_816):
            os.wait()
    return {"times": times}


def is_preparing() -> bool:
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and b"hpc_serve.job.prepare" in (process / "cmdline").read_bytes():
                return True
    return False


def take_ports_seen_in_command_lines(enough: str) -> dict[str, bool]:
    """Listen on every port that is named in a process's command line, as soon as it is seen, until a file is there.

    Tells of each port that was seen whether it could be taken.
    """
    taken: dict[int, bool] = {}
    held = []
    print(json.dumps({"began": True}), flush=True)
    is_last = False
    while not is_last:
        is_last = Path(enough).exists()  # what ran by then is seen once more
        for process in Path("/proc").iterdir():
            try:
                line = (process / "cmdline").read_bytes().decode(errors="replace") if process.name.isdigit() else ""
            except OSError:
                continue
            for port in {int(number) for number in re.findall(r"port\W(\d{4,5})\b", line)} - set(taken):
                try:
                    held.append(socket.create_server(("", port)))
                    taken[port] = True
                except (OSError, OverflowError):
                    taken[port] = False
    return {str(port): was_taken for port, was_taken in taken.items()}


def reach(host: str, port: str, scheme: str) -> socket.socket:
    connection = socket.create_connection((host, int(port)), timeout=60)
    if scheme == "http":
        return connection
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(connection)


def leave_open(host: str, port: str, scheme: str, said: str, count: str) -> dict[str, int]:
    """Open connections, say that much on each, and no more; how many the other end closed within two minutes.

    With the scheme `tcp`, no TLS handshake is begun either.
    """
    connections = []
    for _ in range(int(count)):
        connection = reach(host, port, "http" if scheme == "tcp" else scheme)
        connection.sendall(said.encode())
        connections.append(connection)
    deadline = time.monotonic() + 120
    closed: set[int] = set()
    while len(closed) < len(connections) and time.monotonic() < deadline:
        for number, connection in enumerate(connections):
            if number in closed:
                continue
            connection.settimeout(0.01)
            try:
                if connection.recv(4096) == b"":
                    closed.add(number)
            except TimeoutError:
                continue
            except OSError:
                closed.add(number)
    return {"opened": len(connections), "closed": len(closed)}


def endless_headers(host: str, port: str, scheme: str, total: str) -> dict[str, int]:
    """Send headers without end; how many bytes went before the other end closed."""
    sent = 0
    with reach(host, port, scheme) as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\n")
            while sent < int(total):
                connection.sendall(b"x: " + b"a" * 8000 + b"\r\n")
                sent += 8005
        except OSError:
            pass
    return {"sent": sent}


def flood_log(host: str, port: str, scheme: str, count: str) -> dict[str, int]:
    """Ask for long paths, without the key, so many times, as fast as one connection can."""
    asked = 0
    deadline = time.monotonic() + 300
    request = b"GET /" + b"a" * 30_000 + b" HTTP/1.1\r\nHost: e\r\n\r\n"
    while asked < int(count) and time.monotonic() < deadline:
        try:
            with reach(host, port, scheme) as connection:
                while asked < int(count) and time.monotonic() < deadline:
                    connection.sendall(request)
                    if not connection.recv(4096):
                        break
                    asked += 1
        except OSError:
            continue
    return {"asked": asked}


def flood_control(host: str, port: str, count: str) -> dict[str, int]:
    """Open connections to the control port, say something deeply nested on each, and keep them open until ended."""
    connections: list[socket.socket] = []
    refused = 0
    for _ in range(int(count)):
        try:
            connection = socket.create_connection((host, int(port)), timeout=10)
            connection.sendall(b"[" * 50_000 + b"\n" if len(connections) % 2 else b"{")
            connections.append(connection)
        except OSError:
            refused += 1
    print(json.dumps({"opened": len(connections), "refused": refused}), flush=True)
    time.sleep(3600)
    return {}


def flood_without_end(host: str, port: str, said: str, held: str) -> dict[str, int]:
    """Open connections without pause until ended, say that much on each, keep the latest open; say when it began."""
    most = min(int(held), resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 50)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 50, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    connections: list[socket.socket] = []
    opened = 0
    while True:
        connection = socket.socket()
        connection.setblocking(False)
        try:
            connection.connect_ex((host, int(port)))
            if said:
                connection.send(said.encode())
        except OSError:
            pass
        if len(connections) < most:
            connections.append(connection)
        else:
            connections[opened % most].close()
            connections[opened % most] = connection
        opened += 1
        if opened == 1_000:
            print(json.dumps({"opened": opened}), flush=True)


def ask_for_metrics(host: str, ports: str) -> dict[str, list[int]]:
    """Which of the ports answer a plain question for metrics."""
    found = []
    for port in ports.split(","):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=3) as connection:
            connection.sendall(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            status, _, _ = connection.recv(65_536).partition(b"\r\n")
            if status.startswith(b"HTTP/") and status.split()[1] == b"200":
                found.append(int(port))
    return {"answer": found}


def stay_until(enough: str) -> None:
    """Say that this program listens, and wait until a file is there."""
    print(json.dumps({"listens": True}), flush=True)
    while not Path(enough).exists():
        time.sleep(0.05)


def serve_connections(port: str, handle: Callable[[socket.socket], None]) -> None:
    """Listen on a port that may have been another program's a moment ago, each connection in a thread.

    The kernel keeps it for a minute or two where that program's connections had not ended.
    """
    deadline = time.monotonic() + 240
    while True:
        try:
            listener = socket.create_server(("", int(port)), backlog=512)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)

    def accept() -> None:
        while True:
            threading.Thread(target=handle, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def record_all(port: str, folder: str, enough: str) -> dict[str, Any]:
    """Listen on a port in the place of an engine, and write down all that is sent, inside TLS too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{folder}/node.pem", f"{folder}/node.key")
    heard, connections = bytearray(), [0]

    def handle(connection: socket.socket) -> None:
        connections[0] += 1
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.settimeout(60)
            if connection.recv(1, socket.MSG_PEEK) == b"\x16":
                connection = context.wrap_socket(connection, server_side=True)
            heard.extend(connection.recv(65_536))
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")

    serve_connections(port, handle)
    stay_until(enough)
    return {"heard": heard.decode("latin-1"), "connections": connections[0]}


def relay(port: str, host: str, target: str, enough: str) -> dict[str, Any]:
    """Pass every byte on to an engine, and write down all that was sent to it."""
    heard = bytearray()

    def copy(source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if kept is not None:
                    kept.extend(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def handle(connection: socket.socket) -> None:
        with connection, socket.create_connection((host, int(target))) as engine:
            back = threading.Thread(target=copy, args=(engine, connection, None), daemon=True)
            back.start()
            copy(connection, engine, heard)
            back.join()

    serve_connections(port, handle)
    stay_until(enough)
    return {"heard": heard.decode("latin-1")}


if __name__ == "__main__":
    result = globals()[sys.argv[1]](*sys.argv[2:])
    if result:
        print(json.dumps(result), flush=True)
