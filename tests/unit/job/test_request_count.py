"""How the gate counts requests, and what a program in another job reads of an engine's load."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from hpc_serve.gate.gate import Gate
from hpc_serve.job.engine.health import EngineAddress, SmallRequest, ask, read_load
from hpc_serve.rendezvous.gate_headers import REQUESTS_HEADER, RequestCount, read_request_count
from hpc_serve.trust.connection import Identity
from tests.cluster import wait_for
from tests.support.stubs import StubService
from tests.unit.job.conftest import KEY, in_a_loop

BEARER = (b"authorization", f"Bearer {KEY}".encode())
CANARY = (b"X-HPC-Serve", b"canary")


@pytest.fixture
def gate(key_file):
    return Gate(_engine)


async def _engine(scope, receive, send):
    if scope["path"] == "/breaks":
        raise RuntimeError("the engine broke")
    if scope["path"] == "/waits":
        await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"let in"})


def scope_of(method: str, path: str, *headers) -> dict:
    return {"type": "http", "method": method, "path": path, "headers": [BEARER, *headers], "root_path": ""}


async def call(gate, scope, receive=None) -> list:
    sent = []

    async def send(message):
        sent.append(message)

    await gate(scope, receive, send)
    return sent


async def counted(gate) -> RequestCount:
    start, _ = await call(gate, scope_of("GET", "/metrics"))
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return read_request_count(headers)


async def whole_body():
    return {"type": "http.request", "body": b"", "more_body": False}


@in_a_loop
async def test_requests_with_the_key_are_counted_and_canaries_and_reading_are_not(gate):
    for scope in (
        scope_of("POST", "/v1/completions"),
        scope_of("POST", "/v1/embeddings"),
        scope_of("POST", "/v1/completions", CANARY),
        *(scope_of("GET", "/v1/models"), scope_of("HEAD", "/v1/models"), scope_of("GET", "/health")),
        {**scope_of("POST", "/v1/completions"), "headers": []},  # without the key
    ):
        await call(gate, scope, whole_body)
    found = await counted(gate)
    assert (found.count, found.under_way) == (2, 0)
    assert (await counted(Gate(_engine))).gate != found.gate  # each has a name of its own


@in_a_loop
async def test_one_that_is_not_answered_is_under_way(gate):
    has_begun, goes_on = asyncio.Event(), asyncio.Event()

    async def receive():
        has_begun.set()
        await goes_on.wait()

    task = asyncio.create_task(call(gate, scope_of("POST", "/waits"), receive))
    await has_begun.wait()
    meanwhile = await counted(gate)
    goes_on.set()
    await task
    after = await counted(gate)
    assert (meanwhile.count, meanwhile.under_way) == (1, 1)
    assert (after.count, after.under_way) == (1, 0)


def test_one_that_breaks_is_not_under_way_any_more(gate):
    with pytest.raises(RuntimeError):
        asyncio.run(call(gate, scope_of("POST", "/breaks")))
    found = asyncio.run(counted(gate))
    assert (found.count, found.under_way) == (1, 0)


@pytest.mark.parametrize("text", ["", "5f3a 17", "5f3a -1 0", "a b 1 2", "5f3a 1 2 3", "5f3a 9999999999999999 1"])
def test_what_is_no_count(text):
    assert read_request_count({REQUESTS_HEADER.decode(): text}) is None


@pytest.fixture
def stubs(tmp_path):
    found = StubService(tmp_path / "home")
    yield found
    found.close()


def address_of(stubs: StubService) -> EngineAddress:
    (record,) = stubs.store.read(stubs.service).records
    identity = Identity.of(record, stubs.key_file.read_text().strip())
    return EngineAddress(host="127.0.0.1", port=record.port, identity=identity)


def test_the_load_of_an_engine(stubs):
    stubs.start("--stub-slots", "1", "--stub-first-s", "600")
    address = address_of(stubs)
    load = read_load(address, timeout_s=60)
    assert (load.running, load.waiting, load.requests.count) == (0, 0, 0)
    request = SmallRequest(path="/v1/completions", body={"model": "405b", "prompt": "1", "max_tokens": 1})

    def canary() -> None:
        with contextlib.suppress(OSError):
            ask(address, request, timeout_s=600)

    def both_are_there():
        load = read_load(address, timeout_s=60)
        return load if load and (load.running, load.waiting) == (1, 1) else None

    for _ in range(2):
        threading.Thread(target=canary, daemon=True).start()
    load = wait_for(both_are_there, 60, what="two requests")
    assert (load.requests.count, load.requests.under_way) == (0, 0)  # the launcher's own are canaries


def test_an_engine_that_cannot_be_asked(stubs):
    engine = stubs.start()
    address = address_of(stubs)
    engine.kill()
    assert read_load(address, timeout_s=1.0) is None
