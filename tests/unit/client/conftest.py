"""A service of stub engines, found by a client that does not wait long between two looks."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.client import connect, connect_async
from hpc_serve.client.connections.engine_pool import EnginePool
from hpc_serve.client.discovery import discovery, lost_replicas
from hpc_serve.client.discovery import wait as waiting
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.probe import probe_records
from hpc_serve.client.replicas.status import ProbeResult
from hpc_serve.trust.connection import Identity
from tests.support.patience import PATIENCE_S, be_patient
from tests.support.stubs import StubEngine, StubService

MODEL = "meta-llama/Llama-3.1-405B-Instruct"
HELLO: Any = [{"role": "user", "content": "Hello"}]


def port_of(answer: Any) -> int:
    """Which engine answered a chat: the stub says its port."""
    return int(answer.choices[0].message.content.split()[0].removeprefix("stub-"))


def say(client: Any, **options: Any) -> int:
    """Say hello; return the port of the engine that answered."""
    return port_of(client.chat.completions.create(model=client.model, messages=HELLO, **options))


def one_engine(service: StubService, *flags: str) -> tuple[StubEngine, Any]:
    """Start an engine; return it, and a client of the service that sends nothing again by itself."""
    return service.start(*flags), connect(service.service, max_retries=0)


def address(name: str = "a", *, signs: bool = True) -> ReplicaAddress:
    """The address of a replica that nobody asks."""
    return ReplicaAddress(name=name, host="h", port=1, identity=Identity(certificate="", api_key="k"), signs=signs)


def watch_told(service: StubService, answers: dict[str, Any], **options: Any) -> Any:
    """A watch to which the engines of records answer what stands there by their names."""

    def probe(records: Any, api_key: str) -> dict[str, ProbeResult]:
        return {record.name: ProbeResult(status=answers[record.name], host="127.0.0.1") for record in records}

    return ServiceWatch(service.store, service.service, probe=probe, **options)


class Asker:
    """A client in this thread, or in an event loop of its own. Both are asked by calls that block."""

    def __init__(self, *, is_async: bool, **options: Any) -> None:
        self._loop = asyncio.new_event_loop() if is_async else None
        self.client: Any = self._done((connect_async if is_async else connect)("405b", **options))

    def _done(self, asked: Any) -> Any:
        return asked if self._loop is None else self._loop.run_until_complete(asked)

    def create(self, *, is_chat: bool = True, **arguments: Any) -> Any:
        """Return an answer; of a stream an iterator of its chunks."""
        api = self.client.chat.completions if is_chat else self.client.completions
        answer = self._done(api.create(**arguments))
        return self._chunks(answer) if arguments.get("stream") else answer

    def _chunks(self, stream: Any) -> Iterator[Any]:
        if self._loop is None:
            yield from stream
            return
        with suppress(StopAsyncIteration):
            while True:
                yield self._done(stream.__anext__())

    def say(self) -> int:
        """Say hello; return the port of the engine that answered."""
        return port_of(self.create(model="405b", messages=HELLO))

    def close(self) -> None:
        self._done(self.client.close())
        if self._loop is not None:
            self._loop.close()


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asker(request: pytest.FixtureRequest) -> Iterator[Callable[..., Asker]]:
    """Connects to the service in one of the two ways."""
    made: list[Asker] = []

    def make(**options: Any) -> Asker:
        made.append(Asker(is_async=request.param, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def anyio_backend() -> str:
    """Tests that are coroutines run in asyncio's loop."""
    return "asyncio"


class FakeClock:
    """A clock that stands until it is moved on."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def stub_services(tmp_path: Path, monkeypatch: Any, kind: Any = StubService) -> Iterator[Callable[..., StubService]]:
    """Makes services of stub engines by their names, and ends their processes."""
    be_patient(monkeypatch)
    monkeypatch.setenv("HPC_SERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(waiting, "STEP_S", 0.05)
    with ExitStack() as made:
        yield lambda name="405b": made.enter_context(closing(kind(tmp_path / "home", name)))


@pytest.fixture
def services_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StubService]]:
    with stub_services(tmp_path, monkeypatch) as make:
        yield make


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubService]:
    with stub_services(tmp_path, monkeypatch) as make:
        yield make()


class WorkLog:
    """What engines that were started with these `flags` write down of their requests."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.flags = ("--stub-work-log", str(folder))
        self._folder = folder

    def count(self, event: str) -> int:
        return sum(log.read_text().count(f'"event": "{event}"') for log in self._folder.iterdir())


@pytest.fixture
def work_log(tmp_path: Path) -> WorkLog:
    return WorkLog(tmp_path / "work")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The connections that clients have opened for requests."""
    made: list[Any] = []
    connect = EnginePool.connect

    async def opening(*arguments: Any) -> Any:
        made.append(await connect(*arguments))
        return made[-1]

    monkeypatch.setattr(EnginePool, "connect", opening)
    return made


@pytest.fixture
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No record is read and no engine probed because of a request that is under way."""
    monkeypatch.setattr(ServiceWatch, "_look_after", lambda watch, names: lost_replicas.LookResult())


@pytest.fixture
def freeze(service: StubService, monkeypatch: pytest.MonkeyPatch) -> Callable[[StubEngine], None]:
    """Stops the process of an engine. From then on probes of it wait half a second; those of others have patience."""
    frozen: set[int] = set()
    probing = threading.Lock()

    def probe(records, api_key):
        results: dict[str, ProbeResult] = {}
        with probing:
            for is_frozen, timeout_s in ((True, 0.5), (False, PATIENCE_S)):
                asked = [record for record in records if (record.port in frozen) == is_frozen]
                results |= probe_records(asked, api_key, timeout_s=timeout_s)
        return results

    def stop(engine: StubEngine) -> None:
        with probing:
            os.kill(engine.process.pid, signal.SIGSTOP)
            frozen.add(engine.port)

    monkeypatch.setattr(discovery, "_probe", probe)
    return stop
