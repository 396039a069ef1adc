"""How many connections requests take: a stream's is used again, unless its engine does not end the stream's body."""

import asyncio
import threading
from typing import Any

import openai
import pytest

from hpc_serve.client import connect, connect_async
from hpc_serve.client.connections.engine_pool import LIMITS
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.requests import attempt
from tests.support.patience import connect_to_all, wait_until
from tests.support.stub_engine import greedy_answer

WORDS = 8
GREEDY = ("--stub-greedy", "--stub-words", str(WORDS))
ENDLESS = ("--stub-words", "100000", "--stub-word-s", "0.02")
ANSWER = greedy_answer("Why?", WORDS)


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch):
    """Nothing here is to depend on how fast the machine is."""
    monkeypatch.setattr(attempt, "END_S", 60.0)
    monkeypatch.setitem(LIMITS, "keepalive_expiry", 600.0)


STREAM: Any = {"model": "405b", "prompt": "Why?", "temperature": 0, "stream": True}


def text_of(chunks):
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


@pytest.mark.parametrize("resume", [True, False], ids=["resume", "no-resume"])
def test_streams_one_after_the_other_take_one_connection(service, opened, resume, asker):
    service.start(*GREEDY)
    asking = asker(max_retries=0, resume=resume)
    for _ in range(5):
        assert text_of(asking.create(is_chat=False, **STREAM)) == ANSWER
    assert asking.client._watch.pool._under_way == {}
    assert len(opened) == 1


@pytest.mark.parametrize("resume", [True, False], ids=["resume", "no-resume"])
@pytest.mark.parametrize("end", ["open", "broken"])
def test_a_body_without_an_end_costs_its_connection_alone(service, opened, monkeypatch, end, resume, asker):
    monkeypatch.setattr(attempt, "END_S", 0.02 if end == "open" else 60.0)
    service.start(*GREEDY, "--stub-stream-end", end)
    asking = asker(max_retries=0, resume=resume)
    for number in range(2):
        chunks = list(asking.create(is_chat=False, **STREAM))
        assert text_of(chunks) == ANSWER
        assert not any(getattr(chunk, "resumed", None) for chunk in chunks)
        assert len(opened) == number + 1
    assert asking.client._watch.pool._under_way == {}
    assert len(asking.client._watch.pool) == 1


def test_a_stream_that_is_closed_half_way_is_cancelled_at_once(service, work_log):
    service.start(*ENDLESS, *work_log.flags)
    begun = connect("405b", max_retries=0).completions.create(**STREAM)
    next(begun)
    begun.close()
    wait_until(lambda: work_log.count("abort"))


@pytest.mark.anyio
async def test_an_async_stream_that_is_closed_half_way_is_cancelled_at_once(service, work_log):
    service.start(*ENDLESS, *work_log.flags)
    begun = await (await connect_async("405b", max_retries=0)).completions.create(**STREAM)
    await begun.__anext__()
    await begun.close()
    await asyncio.to_thread(wait_until, lambda: work_log.count("abort"))


def test_a_stream_that_another_thread_closes_does_not_go_on_elsewhere(service, opened):
    for _ in range(2):
        service.start("--stub-greedy", "--stub-words", "1000", "--stub-word-s", "0.1")
    client = connect_to_all(service, 2)
    read = client.completions.create(**STREAM)
    next(iter(read))
    closing = threading.Timer(0.3, read.close)
    closing.start()
    with pytest.raises((openai.APIError, http.TransportError)):
        for _ in read:
            pass
    assert len(opened) == 1
