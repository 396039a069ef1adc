"""How many connections requests take: a stream's is used again, unless its engine does not end the stream's body."""

import asyncio
import threading
import time

import openai
import pytest

from hpc_serve.client import connect, connect_async
from hpc_serve.client.connections.engine_pool import LIMITS
from hpc_serve.client.replicas.event_loops import run_blocking
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


def run(coroutine_of, *, is_async, **options):
    """Run `coroutine_of(stream)`, where `stream()` gives the chunks of a stream; return the client's watch."""
    if is_async:

        async def talk():
            client = await connect_async("405b", max_retries=0, **options)

            async def chunks():
                return [chunk async for chunk in await stream(client)]

            await coroutine_of(chunks)
            return client._watch

        return asyncio.run(talk())
    client = connect("405b", max_retries=0, **options)

    async def chunks():
        return list(stream(client))

    run_blocking(coroutine_of(chunks))
    return client._watch


@pytest.mark.parametrize("is_async", [False, True], ids=["thread", "loop"])
@pytest.mark.parametrize("resume", [True, False], ids=["resume", "no-resume"])
def test_streams_one_after_the_other_take_one_connection(service, opened, resume, is_async):
    service.start(*GREEDY)

    async def talk(chunks):
        for _ in range(STREAMS):
            assert text_of(await chunks()) == ANSWER

    assert run(talk, is_async=is_async, resume=resume).pool._under_way == {}
    assert len(opened) == 1


@pytest.mark.parametrize("is_async", [False, True], ids=["thread", "loop"])
@pytest.mark.parametrize("resume", [True, False], ids=["resume", "no-resume"])
@pytest.mark.parametrize("end", ["open", "broken"])
def test_a_body_without_an_end_costs_its_connection_alone(service, opened, monkeypatch, end, resume, is_async):
    monkeypatch.setattr(attempt, "END_S", 0.02 if end == "open" else 60.0)
    service.start(*GREEDY, "--stub-stream-end", end)

    async def talk(stream_chunks):
        for number in range(2):
            chunks = await stream_chunks()
            assert text_of(chunks) == ANSWER
            assert not any(getattr(chunk, "resumed", None) for chunk in chunks)
            assert len(opened) == number + 1

    watch = run(talk, is_async=is_async, resume=resume)
    assert watch.pool._under_way == {}
    assert len(watch.pool) == 1


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
