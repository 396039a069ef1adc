"""What TLS on the endpoint costs: `python -m benchmarks.tls_cost`. About five minutes; needs vLLM on CPUs.

Two engines of one tiny model, one in the clear, one with TLS, are asked the same things in turn. CPU time of the
engine's server process is the figure to trust on a shared machine; requests per second count what is left of the
machine beside the client.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.common import Benchmark, Figures, Measured, run_alone
from hpc_serve.demo_model import make_demo_model
from hpc_serve.trust.certificates import make_run_certificate
from hpc_serve.trust.connection import pinned_context
from hpc_serve.vllm.arguments import ARGS_FILE
from hpc_serve.vllm.command import GATE

KEY = "k" * 32
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
THREADS = 4
START_S = 300.0
_CPU_CLOCK_OF_PROCESS = 2  # CPUCLOCK_SCHED of linux/posix-timers.h: what clock_getcpuclockid(3) makes of a pid


@dataclass(frozen=True)
class Engine:
    """A running engine; `certificate` is None in the clear."""

    port: int
    process: subprocess.Popen[bytes]
    certificate: str | None

    def connect(self) -> http.client.HTTPConnection:
        if self.certificate is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        context = pinned_context(self.certificate)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=context)

    def cpu_s(self) -> float:
        """CPU seconds of the server's own process, which speaks HTTP; the model runs in another one."""
        return time.clock_gettime((~self.process.pid << 3) | _CPU_CLOCK_OF_PROCESS)


@contextlib.contextmanager
def engine(folder: Path, *flags: str, certificate: str | None = None) -> Iterator[Engine]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model = folder / "model"
    words = shlex.split((model / ARGS_FILE).read_text(), comments=True)
    argv = [
        str(Path(sys.executable).with_name("vllm")),
        "serve",
        str(model),
        "--served-model-name",
        "m",
        *words,
        "--host",
        "127.0.0.1",
    ]
    argv += ["--port", str(port), "--middleware", GATE, "--disable-uvicorn-access-log", *flags]
    environ = {
        **os.environ,
        "HPC_SERVE_API_KEY_FILE": str(folder / "key"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }
    with open(folder / f"{port}.log", "wb") as log:
        process = subprocess.Popen(argv, env=environ, stdout=log, stderr=subprocess.STDOUT)
    found = Engine(port, process, certificate)
    try:
        _wait_until_healthy(found)
        yield found
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_healthy(found: Engine) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if found.process.poll() is not None:
            break
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = found.connect()
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.5)
    sys.exit(f"the engine on port {found.port} did not start")


def ask(connection: http.client.HTTPConnection, path: str, body: dict[str, object] | None = None) -> None:
    connection.request("GET" if body is None else "POST", path, json.dumps(body) if body else None, HEADERS)
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        sys.exit(f"{path} answered {response.status}: {content[:200]!r}")


Work = Callable[[Engine, int], None]


def models(engine: Engine, requests: int) -> None:
    """A request that costs the engine little: what HTTP costs shows."""
    connection = engine.connect()
    for _ in range(requests):
        ask(connection, "/v1/models")
    connection.close()


def one_token(engine: Engine, requests: int) -> None:
    connection = engine.connect()
    for _ in range(requests):
        ask(connection, "/v1/completions", {"model": "m", "prompt": "the sky is", "max_tokens": 1})
    connection.close()


def stream(engine: Engine, requests: int) -> None:
    connection = engine.connect()
    body: dict[str, object] = {"model": "m", "prompt": "the sky", "max_tokens": 64, "ignore_eos": True, "stream": True}
    for _ in range(requests):
        ask(connection, "/v1/completions", body)
    connection.close()


def long_prompt(engine: Engine, requests: int) -> None:
    """256 KiB a request, refused as too long by the tokenizer: what the bytes cost shows."""
    connection = engine.connect()
    body = json.dumps({"model": "m", "prompt": "the sky " * 32_768, "max_tokens": 1})
    for _ in range(requests):
        connection.request("POST", "/v1/completions", body, HEADERS)
        connection.getresponse().read()
    connection.close()


def new_connections(engine: Engine, requests: int) -> None:
    for _ in range(requests):
        connection = engine.connect()
        ask(connection, "/v1/models")
        connection.close()


WORKS: dict[str, tuple[Work, int]] = {
    "GET /v1/models, kept connections": (models, 250),
    "GET /v1/models, a connection each": (new_connections, 100),
    "completion of 1 token": (one_token, 100),
    "stream of 64 tokens": (stream, 10),
    "256 KiB of prompt": (long_prompt, 50),
}


def turn(engine: Engine, work: Work, requests: int) -> Figures:
    """`requests` from each of THREADS threads at once."""
    threads = [threading.Thread(target=work, args=(engine, requests)) for _ in range(THREADS)]
    cpu_s, start_s = engine.cpu_s(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = requests * THREADS
    wall_s = time.perf_counter() - start_s
    return {"requests/s": total / wall_s, "server CPU ms a request": 1000 * (engine.cpu_s() - cpu_s) / total}


def first_answer_ms(engine: Engine) -> float:
    """From nothing to the first byte of an answer: connection, handshake, request."""
    start_s = time.perf_counter()
    connection = engine.connect()
    connection.request("GET", "/health")
    connection.getresponse()
    taken_s = time.perf_counter() - start_s
    connection.close()
    return 1000 * taken_s


def first_answers(engine: Engine) -> Figures:
    return {"ms": statistics.median(first_answer_ms(engine) for _ in range(25))}


def measure(options: argparse.Namespace, measured: Measured) -> None:
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        folder = Path(root)
        make_demo_model(folder / "model")
        (folder / "key").write_text(KEY)
        made = make_run_certificate(folder / "home", folder, run="benchmark", addresses=[])
        flags = ("--ssl-keyfile", str(made.key_file), "--ssl-certfile", str(made.certificate_file))
        engines = {
            "plain": stack.enter_context(engine(folder)),
            "TLS": stack.enter_context(engine(folder, *flags, certificate=made.certificate)),
        }
        for name, (work, requests) in WORKS.items():
            turns = {mode: partial(turn, found, work, requests) for mode, found in engines.items()}
            measured.take_turns(name, turns, rounds=options.rounds, base="plain")
        firsts = {mode: partial(first_answers, found) for mode, found in engines.items()}
        what = "from no connection to the first answer of /health"
        measured.take_turns(what, firsts, rounds=options.rounds, base="plain")


BENCHMARK = Benchmark(name="tls_cost", about=__doc__, measure=measure, rounds=9, needs="a real engine")

if __name__ == "__main__":
    run_alone(BENCHMARK)
