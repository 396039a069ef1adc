"""A gateway to services of stub engines, in a thread of the test or as the program that a user starts."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import wait_for
from tests.support.patience import PATIENCE_S
from tests.support.stub_engine import greedy_answer
from tests.support.stubs import StubEngine, StubService
from tests.unit.client.conftest import service

assert service  # a fixture of the client's tests

WORDS = 12
GREEDY = ("--stub-greedy", "--stub-words", str(WORDS))
ANSWER = greedy_answer("Why?", WORDS)
ASKED: dict[str, Any] = {"model": "405b", "prompt": "Why?", "temperature": 0}


@pytest.fixture
def extra() -> None:
    """Skip a test where the packages of the extra `gateway` are missing."""
    pytest.importorskip("prometheus_client", reason="the gateway needs it")


@pytest.fixture
def engine(service: StubService) -> StubEngine:
    """The one engine of the service 405b, which answers `Why?` with ANSWER."""
    return service.start(*GREEDY)


@pytest.fixture
def hanging(service: StubService, tmp_path: Path) -> Callable[..., Path]:
    """Starts an engine with some flags that gives no answer while the file is there that is returned."""

    def start(*flags: str) -> Path:
        file = tmp_path / "hang"
        file.touch()
        service.start(*GREEDY, "--stub-hang-file", str(file), *flags)
        return file

    return start


@dataclass
class Answer:
    """An answer as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> Any:
        return self.json["error"]["code"]

    def check_refusal(self, status: int, code: str, words: str = "") -> None:
        """Check that it is an error of this status and code, whose message has these words."""
        assert (self.status, self.code) == (status, code), self.body
        assert words in self.json["error"]["message"]


class Front:
    """A gateway on a port of the loopback address."""

    def __init__(self, port: int) -> None:
        self.port = port

    def open(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = self.open()
        try:
            named = {name.replace("_", "-").lower(): text for name, text in headers.items()}
            kind = {"content-type": "application/json"} if method == "POST" else {}
            connection.request(method, path, content, {**kind, **named})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def complete(self, model: str | None = "405b", *, content_type: str = "application/json", **fields: Any) -> Answer:
        body = {**ASKED, "model": model, **fields}
        if model is None:
            del body["model"]
        return self.ask("POST", "/v1/completions", body, content_type=content_type)

    def stream(self, **fields: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """The beginning of a stream: its connection, and its response to read."""
        connection = self.open()
        asked = {**ASKED, "max_tokens": 100, "stream": True, **fields}
        connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's values with these labels."""
        total = 0.0
        for line in self.ask("GET", "/metrics").body.decode().splitlines():
            head, _, value = line.rpartition(" ")
            found = head.partition("{")[0] == f"hpc_serve_gateway_{name}"
            if found and all(f'{label}="{text}"' in head for label, text in labels.items()):
                total += float(value)
        return total


@contextmanager
def served(store: Any, settings: Any) -> Iterator[int]:
    """Serve a gateway in a thread; yields the port."""
    from hpc_serve.gateway.app import Gateway
    from hpc_serve.gateway.server import Server, end_tasks, new_event_loop

    loop, ready, servers = new_event_loop(), threading.Event(), []

    async def run() -> None:
        servers.append(Server(Gateway(store, settings), grace_s=PATIENCE_S))
        await servers[0].run(listener, None, ready.set)
        await end_tasks()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
        thread.start()
        assert ready.wait(PATIENCE_S)
        yield listener.getsockname()[1]
        for _ in range(2):
            loop.call_soon_threadsafe(servers[0].stop)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        loop.close()


@pytest.fixture
def gateway(service, extra, monkeypatch) -> Iterator[Callable[..., Front]]:
    """Starts a gateway with some settings to the services of the test's home."""
    from hpc_serve.gateway import backend, directory
    from hpc_serve.gateway.settings import Settings

    for module, name in ((backend, "_FIRST_LOOK_S"), (backend, "_MODELS_S"), (directory, "_READ_S")):
        monkeypatch.setattr(module, name, PATIENCE_S)

    with ExitStack() as stack:

        def start(**settings: Any) -> Front:
            return Front(stack.enter_context(served(service.store, Settings(**{"wait_s": 0.0, **settings}))))

        yield start


@pytest.fixture
def front(engine: StubEngine, gateway: Callable[..., Front]) -> Front:
    """A gateway to that engine."""
    return gateway()


class Program:
    """`hpc-serve gateway`, started by a user, and what it has printed. The code `first` runs in its process before."""

    def __init__(self, home: Path, *words: str, first: str = "") -> None:
        environ = {**os.environ, "HPC_SERVE_HOME": str(home), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{first}\nfrom hpc_serve.cli.main import main; main()", "gateway", *words],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def said(self) -> str:
        return "".join(self.lines)

    @property
    def port(self) -> int:
        """The port that it named."""
        found = re.search(r"https?://[^/\s]+:(\d+)/v1", self.said)
        assert found, self.said
        return int(found[1])

    def started(self) -> Program:
        """Once it has said where it is."""
        wait_for(lambda: "Gateway to" in self.said or self.process.poll() is not None, 180, what="the gateway")
        assert self.process.poll() is None, self.said
        wait_for(lambda: "curl" in self.said or "OPENAI_API_KEY" in self.said, 60, what="its address")
        return self

    def ended(self) -> int:
        """Its exit code."""
        code = self.process.wait(180)
        self._reader.join(60)
        return code

    def ended_by(self, sent: int) -> int:
        """Its exit code after a signal."""
        self.process.send_signal(sent)
        return self.ended()

    def close(self) -> None:
        self.process.kill()
        self.ended()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def program(service, extra) -> Iterator[Callable[..., Program]]:
    """Starts `hpc-serve gateway` with some words for the services of the test's home."""
    started: list[Program] = []

    def start(*words: str, first: str = "") -> Program:
        started.append(Program(service.store.home, *words, first=first))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def refused(service, extra, monkeypatch, ran) -> Callable[..., str]:
    """What `hpc-serve gateway` prints where it refuses to serve, and ends with this exit code."""
    monkeypatch.setenv("HPC_SERVE_HOME", str(service.store.home))
    return lambda *words, code=2: "".join(ran(["gateway", *words], code))
