"""How many connections requests take: a stream's is used again, unless its engine does not end the stream's body."""

import asyncio
import threading
import time

import openai
import pytest

from hpc_serve.client import connect, connect_async
from hpc_serve.client.connections.engine_pool import LIMITS
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.requests import attempt
from tests.support.patience import connect_to_all
from tests.support.stub_engine import greedy_answer

WORDS = 8
GREEDY = ("--stub-greedy", "--stub-words", str(WORDS))
STREAMS = 5
ANSWER = greedy_answer("Why?", WORDS)


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch):
    """Nothing here is to depend on how fast the machine is."""
    monkeypatch.setattr(attempt, "END_S", 60.0)
    monkeypatch.setitem(LIMITS, "keepalive_expiry", 600.0)


def stream(client, **options):
    return client.completions.create(model="405b", prompt="Why?", temperature=0, stream=True, **options)


def text_of(chunks):
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


@pytest.mark.parametrize("resume", [True, False], ids=["resume", "no-resume"])
def test_streams_one_after_the_other_take_one_connection(service, opened, resume):
    service.start(*GREEDY)
    client = connect("405b", max_retries=0, resume=resume)
    for _ in range(STREAMS):
        assert text_of(stream(client)) == ANSWER
    assert client.completions.create(model="405b", prompt="Why?", temperature=0).choices[0].text == ANSWER
    assert len(opened) == 1
    assert client._watch.pool._under_way == {}


@pytest.mark.parametrize("resume", [True, False], ids=["resume", "no-resume"])
def test_async_streams_one_after_the_other_take_one_connection(service, opened, resume):
    service.start(*GREEDY)

    async def ask():
        client = await connect_async("405b", max_retries=0, resume=resume)
        for _ in range(STREAMS):
            assert text_of([chunk async for chunk in await stream(client)]) == ANSWER
        assert client._watch.pool._under_way == {}

    asyncio.run(ask())
    assert len(opened) == 1


@pytest.mark.parametrize("resume", [True, False], ids=["resume", "no-resume"])
@pytest.mark.parametrize("end", ["open", "broken"])
def test_a_body_without_an_end_costs_its_connection_alone(service, opened, monkeypatch, end, resume):
    monkeypatch.setattr(attempt, "END_S", 0.02 if end == "open" else 60.0)
    service.start(*GREEDY, "--stub-stream-end", end)
    client = connect("405b", max_retries=0, resume=resume)
    for number in range(2):
        chunks = list(stream(client))
        assert text_of(chunks) == ANSWER
        assert not any(getattr(chunk, "resumed", None) for chunk in chunks)
        assert len(opened) == number + 1
    assert client._watch.pool._under_way == {}
    assert len(client._watch.pool) == 1


@pytest.mark.parametrize("resume", [True, False], ids=["resume", "no-resume"])
@pytest.mark.parametrize("end", ["open", "broken"])
def test_an_async_body_without_an_end_costs_its_connection_alone(service, opened, monkeypatch, end, resume):
    monkeypatch.setattr(attempt, "END_S", 0.02 if end == "open" else 60.0)
    service.start(*GREEDY, "--stub-stream-end", end)

    async def ask():
        client = await connect_async("405b", max_retries=0, resume=resume)
        for number in range(2):
            chunks = [chunk async for chunk in await stream(client)]
            assert text_of(chunks) == ANSWER
            assert not any(getattr(chunk, "resumed", None) for chunk in chunks)
            assert len(opened) == number + 1
        assert client._watch.pool._under_way == {}
        assert len(client._watch.pool) == 1

    asyncio.run(ask())


def until_aborted(folder):
    deadline = time.monotonic() + 60
    while not any('"abort"' in log.read_text() for log in folder.iterdir()):
        assert time.monotonic() < deadline, "the engine did not abort the request"
        time.sleep(0.01)


def endless(tmp_path):
    (tmp_path / "work").mkdir()
    return ("--stub-words", "100000", "--stub-word-s", "0.02", "--stub-work-log", str(tmp_path / "work"))


def test_a_stream_that_is_closed_half_way_is_cancelled_at_once(service, tmp_path):
    service.start(*endless(tmp_path))
    begun = stream(connect("405b", max_retries=0))
    next(begun)
    begun.close()
    until_aborted(tmp_path / "work")


def test_an_async_stream_that_is_closed_half_way_is_cancelled_at_once(service, tmp_path):
    service.start(*endless(tmp_path))

    async def ask():
        begun = await stream(await connect_async("405b", max_retries=0))
        await begun.__anext__()
        await begun.close()
        await asyncio.to_thread(until_aborted, tmp_path / "work")

    asyncio.run(ask())


def test_a_stream_that_another_thread_closes_does_not_go_on_elsewhere(service, opened):
    for _ in range(2):
        service.start("--stub-greedy", "--stub-words", "1000", "--stub-word-s", "0.1")
    client = connect_to_all(service, 2)
    read = stream(client)
    next(iter(read))
    closing = threading.Timer(0.3, read.close)
    closing.start()
    with pytest.raises((openai.APIError, http.TransportError)):
        for _ in read:
            pass
    assert len(opened) == 1
