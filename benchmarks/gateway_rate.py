"""Requests a second through the gateway and without it: `python -m benchmarks.gateway_rate`. A minute; needs no engine.

Two stub engines answer short chats. A client that does as little as it can (prepared bytes over connections that stay
open) asks one engine over TLS, and a gateway on its Unix socket, in turns of one run. Beside the rates it prints what a
request costs each program in CPU time, which tells more than the rate where programs share cores, and where the
gateway's own time goes (`--profile`, by package). Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import pstats
import selectors
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpc_serve.trust.pinned import pinned_context
from tests.cluster import wait_for
from tests.support.stubs import StubService

BODY = b'{"model":"405b","messages":[{"role":"user","content":"Why is the sky blue?"}],"temperature":0}'
CONNECTIONS = 32
TICKS = os.sysconf("SC_CLK_TCK")


def request(key: str) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY


class Client:
    """Connections, each with one request under way."""

    def __init__(self, connect: Callable[[], socket.socket], asked: bytes) -> None:
        self._asked = asked
        self._connections = [connect() for _ in range(CONNECTIONS)]

    def run(self, seconds: float) -> float:
        """Requests a second, for so long."""
        selector = selectors.DefaultSelector()
        got: dict[socket.socket, bytes] = {}
        for connection in self._connections:
            selector.register(connection, selectors.EVENT_READ)
            got[connection] = b""
            connection.sendall(self._asked)
        began, answered, waiting = time.perf_counter(), 0, len(got)
        while waiting:
            for key, _ in selector.select():
                ready: Any = key.fileobj
                data = got[ready] + ready.recv(65536)
                if not self._is_whole(data):
                    got[ready] = data
                    continue
                assert data.startswith(b"HTTP/1.1 200") or data.startswith(b"HTTP/1.0 200"), data[:300]
                answered += 1
                got[ready] = b""
                if time.perf_counter() - began < seconds:
                    ready.sendall(self._asked)
                else:
                    waiting -= 1
        selector.close()
        return answered / (time.perf_counter() - began)

    def _is_whole(self, data: bytes) -> bool:
        head, blank, body = data.partition(b"\r\n\r\n")
        if not blank:
            return False
        lower = head.lower()
        start = lower.find(b"content-length: ")
        if start == -1:
            return data.endswith(b"0\r\n\r\n")
        return len(body) >= int(lower[start + 16 :].split(b"\r\n", 1)[0])

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def to_engine(service: StubService) -> Callable[[], socket.socket]:
    engine = service.engines[0]
    assert engine.certificate is not None
    context: ssl.SSLContext = pinned_context(engine.certificate)

    def connect() -> socket.socket:
        return context.wrap_socket(socket.create_connection(("127.0.0.1", engine.port)))

    return connect


def to_gateway(path: Path) -> Callable[[], socket.socket]:
    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return connection

    return connect


def cpu_s(pids: Sequence[int]) -> float:
    """CPU time of processes until now."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(found[11]) + int(found[12]) for found in fields) / TICKS


def start_gateway(home: Path, path: Path, profile: Path | None) -> subprocess.Popen[bytes]:
    before = ["-m", "cProfile", "-o", str(profile)] if profile is not None else []
    argv = [sys.executable, *before, "-m", "hpc_serve.cli", "gateway", "--socket", str(path)]
    started = subprocess.Popen(argv, env={**os.environ, "HPC_SERVE_HOME": str(home)}, stdout=subprocess.DEVNULL)

    def listens() -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(path)) == 0

    wait_for(listens, 60, what="the gateway")
    return started


def by_package(profile: Path) -> Any:
    """Seconds of a profile by the package that they were spent in."""
    spent: Any = Counter()
    stats: Any = pstats.Stats(str(profile))
    for (file, _, name), (_, _, own, *_) in stats.stats.items():
        parts = Path(file).parts
        if "hpc_serve" in parts:
            place = parts.index("hpc_serve")
            spent[".".join(parts[place : place + 2])] += own
        elif "site-packages" in parts:
            spent[parts[parts.index("site-packages") + 1]] += own
        elif file == "~":
            spent["(waiting)" if "select" in name or "epoll" in name else "built-in functions, sockets and TLS"] += own
        else:
            spent["standard library"] += own
    return spent


def measure(home: Path, folder: Path, service: StubService, *, rounds: int, seconds: float) -> None:
    path = folder / "g.sock"
    gateway = start_gateway(home, path, None)
    engines = [engine.process.pid for engine in service.engines]
    clients = {
        "direct": Client(to_engine(service), request(service.key_file.read_text().strip())),
        "gateway": Client(to_gateway(path), request("none")),
    }
    rates: dict[str, list[float]] = {name: [] for name in clients}
    costs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in clients}
    try:
        for client in clients.values():
            client.run(1.0)  # connections, caches
        for _ in range(rounds):
            for name, client in clients.items():
                before = time.process_time(), cpu_s([gateway.pid]), cpu_s(engines)
                began = time.perf_counter()
                rate = client.run(seconds)
                answered = rate * (time.perf_counter() - began)
                after = time.process_time(), cpu_s([gateway.pid]), cpu_s(engines)
                rates[name].append(rate)
                client_s, gateway_s, engines_s = (end - start for start, end in zip(before, after, strict=True))
                costs[name].append((client_s / answered, gateway_s / answered, engines_s / answered))
    finally:
        for client in clients.values():
            client.close()
        gateway.send_signal(signal.SIGTERM)
        gateway.wait()
    for name in clients:
        client_ms, gateway_ms, engines_ms = (
            1e3 * statistics.median(column) for column in zip(*costs[name], strict=True)
        )
        print(
            f"{name:8} {statistics.median(rates[name]):7.0f} requests/s; CPU ms a request: client {client_ms:.2f},"
            f" gateway {gateway_ms:.2f}, engines {engines_ms:.2f}"
        )
    ratio = statistics.median(
        through / direct for through, direct in zip(rates["gateway"], rates["direct"], strict=True)
    )
    own_ms = 1e3 * statistics.median(cost[1] for cost in costs["gateway"])
    print(f"through the gateway: {ratio:.2f} of the direct rate; one core carries {1e3 / own_ms:.0f} requests/s of it")


def profiled(home: Path, folder: Path, seconds: float) -> None:
    path, profile = folder / "p.sock", folder / "profile"
    gateway = start_gateway(home, path, profile)
    client = Client(to_gateway(path), request("none"))
    client.run(seconds)
    client.close()
    gateway.send_signal(signal.SIGTERM)
    gateway.wait()
    spent = by_package(profile)
    del spent["(waiting)"]
    print("where the gateway's time goes (the profiler makes calls dearer, so shares only):")
    for package, own in spent.most_common(10):
        print(f"  {own / spent.total():5.0%}  {package}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway_rate", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hpc-serve-rate-") as name:
        folder = Path(name)
        service = StubService(folder / "home")
        try:
            for _ in range(2):
                service.start("--stub-greedy", "--stub-words", "4")
            measure(folder / "home", folder, service, rounds=options.rounds, seconds=options.seconds)
            if options.profile:
                profiled(folder / "home", folder, options.seconds)
        finally:
            service.close()


if __name__ == "__main__":
    main()
