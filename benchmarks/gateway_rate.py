"""Requests a second through the gateway, through vllm-router and without them: `python -m benchmarks.gateway_rate`.

Two stub engines answer short chats, whole and as streams, and long ones as streams. A client that does as little as
it can (prepared bytes over connections that stay open) asks one engine over TLS, a gateway on its Unix socket, one of
two workers, and, where `--router` or PATH has it, vllm-router over TCP, which cannot be given a run's certificate:
its engines are two more, without TLS. A request on each connection goes before a turn, since idle connections to
engines are closed while others have theirs. Beside the rates stands what a request costs each program in CPU time,
which tells more than the rate where programs share cores, and where the gateway's own time goes, by package. Twenty
minutes; needs no engine.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import pstats
import selectors
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import Benchmark, Figures, Measured, run_alone
from hpc_serve.trust.connection import pinned_context
from tests.cluster import wait_for
from tests.support.children import children_of
from tests.support.stubs import StubEngine, StubService

IN_FLIGHT = (1, 16, 64, 256, 1000)
DIRECT, GATEWAY, WORKERS, ROUTER = "direct", "gateway", "gateway, 2 workers", "vllm-router"
WORDS = {"whole answers": 4, "streams": 4, "long streams": 64}
FURTHER_EVENTS = 2  # the role before the words of a stream, and `[DONE]`
START_S = 120.0
TICKS = os.sysconf("SC_CLK_TCK")


def request(key: str, *, kind: str) -> bytes:
    asked = {"model": "405b", "messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}
    body = json.dumps({**asked, "max_tokens": WORDS[kind], "stream": "streams" in kind}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Client:
    """Connections, each with one request under way."""

    def __init__(self, connect: Callable[[], socket.socket], asked: bytes, in_flight: int) -> None:
        self._asked = asked
        self._connections = [connect() for _ in range(in_flight)]

    def run(self, seconds: float) -> tuple[int, float]:
        """How many requests were answered in how many seconds."""
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
                more = ready.recv(65536)
                assert more, (
                    f"{len(got) - waiting} of {len(got)} were done, and a connection ended after {got[ready]!r}"
                )
                data = got[ready] + more
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
        return answered, time.perf_counter() - began

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


def to_engine(engine: StubEngine) -> Callable[[], socket.socket]:
    assert engine.certificate is not None
    context: ssl.SSLContext = pinned_context(engine.certificate)

    def connect() -> socket.socket:
        return context.wrap_socket(socket.create_connection(("127.0.0.1", engine.port)))

    return connect


def to_port(port: int) -> Callable[[], socket.socket]:
    return lambda: socket.create_connection(("127.0.0.1", port))


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


def start_gateway(home: Path, path: Path, *words: str, profile: Path | None = None) -> subprocess.Popen[bytes]:
    before = ["-m", "cProfile", "-o", str(profile)] if profile is not None else []
    argv = [sys.executable, *before, "-m", "hpc_serve.cli", "gateway", "--socket", str(path), *words]
    started = subprocess.Popen(argv, env={**os.environ, "HPC_SERVE_HOME": str(home)}, stdout=subprocess.DEVNULL)

    def listens() -> bool:
        if started.poll() is not None:
            raise SystemExit(f"the gateway has ended with {started.returncode}; it says why above")
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(path)) == 0

    wait_for(listens, 60, what="the gateway")
    return started


def start_router(program: str, ports: Sequence[int], log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """vllm-router in front of engines without TLS, and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics = free.getsockname()[1], other.getsockname()[1]
    argv = [program, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    argv += ["--policy", "round_robin", "--worker-urls", *(f"http://127.0.0.1:{engine}" for engine in ports)]
    argv += ["--log-level", "error"]
    with log.open("wb") as out:
        started = subprocess.Popen(argv, stdout=out, stderr=out)

    def answers() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/readiness")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    wait_for(answers, START_S, what="vllm-router")
    return started, port


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


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to the engines: how to connect, the key to show, the processes of what stands between, and the engines'."""

    connect: Callable[[], socket.socket]
    key: str
    between: Sequence[int]
    engines: Sequence[int]


def turn(way: Way, kind: str, in_flight: int, seconds: float) -> Figures:
    client = Client(way.connect, request(way.key, kind=kind), in_flight)
    client.run(0.0)
    before = time.process_time(), cpu_s(way.between), cpu_s(way.engines)
    answered, took_s = client.run(seconds)
    after = time.process_time(), cpu_s(way.between), cpu_s(way.engines)
    client.close()
    client_ms, between_ms, engines_ms = (
        1e3 * (end - start) / answered for start, end in zip(before, after, strict=True)
    )
    costs = {"CPU ms a request between": between_ms, "of the engines": engines_ms, "of the client": client_ms}
    if "streams" in kind:
        costs["between, an event"] = between_ms / (WORDS[kind] + FURTHER_EVENTS)
    return {"requests/s": answered / took_s, **costs}


def compare(ways: Mapping[str, Way], options: argparse.Namespace, measured: Measured) -> None:
    for kind in WORDS:
        for count in options.in_flight:
            turns = {name: partial(turn, way, kind, count, options.seconds) for name, way in ways.items()}
            measured.take_turns(f"{kind}, {count} in flight", turns, rounds=options.rounds, base=DIRECT)


def note_profile(home: Path, path: Path, seconds: float, measured: Measured) -> None:
    """Where the gateway's time goes."""
    profile = path.with_suffix(".profile")
    gateway = start_gateway(home, path, profile=profile)
    client = Client(to_gateway(path), request("none", kind="whole answers"), 32)
    client.run(seconds)
    client.close()
    end(gateway)
    spent = by_package(profile)
    del spent["(waiting)"]
    shares = ", ".join(f"{own / spent.total():.0%} {package}" for package, own in spent.most_common(10))
    measured.notes.append(f"The gateway's time by package, under a profiler, which makes calls dearer: {shares}.")


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait()


def measure(options: argparse.Namespace, measured: Measured) -> None:
    router = options.router or shutil.which("vllm-router")
    with tempfile.TemporaryDirectory(prefix="hpc-serve-rate-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        service, plain = StubService(folder / "home"), StubService(folder / "plain")
        stack.callback(service.close)
        stack.callback(plain.close)
        words = ("--stub-greedy", "--stub-words", str(max(WORDS.values())))
        engines = [service.start(*words) for _ in range(2)]
        pids = [engine.process.pid for engine in engines]
        paths = {GATEWAY: folder / "g.sock", WORKERS: folder / "w.sock"}
        gateway = start_gateway(folder / "home", paths[GATEWAY])
        stack.callback(end, gateway)
        first = start_gateway(folder / "home", paths[WORKERS], "--workers", "2")
        stack.callback(end, first)
        key = service.key_file.read_text().strip()
        ways = {
            DIRECT: Way(connect=to_engine(engines[0]), key=key, between=[], engines=pids),
            GATEWAY: Way(connect=to_gateway(paths[GATEWAY]), key="none", between=[gateway.pid], engines=pids),
            WORKERS: Way(connect=to_gateway(paths[WORKERS]), key="none", between=children_of(first.pid), engines=pids),
        }
        if router:
            names = ("--served-model-name", plain.service)
            others = [StubEngine(*names, *words, key_file=plain.key_file) for _ in range(2)]
            plain.engines += others
            process, port = start_router(router, [engine.port for engine in others], folder / "router.log")
            stack.callback(end, process)
            ways[ROUTER] = Way(
                connect=to_port(port),
                key=plain.key_file.read_text().strip(),
                between=[process.pid],
                engines=[engine.process.pid for engine in others],
            )
        else:
            measured.notes.append("vllm-router is not installed and was left out.")
        compare(ways, options, measured)
        if options.profile:
            note_profile(folder / "home", folder / "p.sock", options.seconds, measured)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--in-flight", type=int, nargs="+", default=IN_FLIGHT)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--router", metavar="FILE", help="the program vllm-router (envs/vllm-router/requirements.txt)")
    parser.add_argument("--no-profile", dest="profile", action="store_false", help="only the rates")


BENCHMARK = Benchmark(
    name="gateway_rate",
    about=__doc__,
    measure=measure,
    rounds=3,
    options=add_options,
    short={"in_flight": [2], "seconds": 0.05, "profile": False},
)

if __name__ == "__main__":
    run_alone(BENCHMARK)
