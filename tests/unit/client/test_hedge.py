"""A second request beside the first, at stub engines: which answer is taken, and what becomes of the other request."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from hpc_serve.client import connect, connect_async
from hpc_serve.client.requests import exchange, hedge, repeats
from hpc_serve.client.silence import request_watch
from hpc_serve.client.silence.request_watch import HEDGES, MOST_HEDGES, ONE_HEDGE_FOR
from tests.support.patience import connect_to_all, wait_until

HELLO: Any = [{"role": "user", "content": "Hello"}]


class Ears:
    """In place of `Silence`: a replica is late once it is named, and none is lost."""

    def __init__(self) -> None:
        self.late: set[str] = set()
        self.heard = 0

    def listen(self, requests: object) -> dict[str, str]:
        self.heard += bool(self.late)
        return {}

    def stood_still(self, seconds: float) -> None:
        pass


@pytest.fixture
def service(service, tmp_path, monkeypatch, no_looks):
    monkeypatch.setattr(exchange, "LOST_WAIT_S", 0.2)
    monkeypatch.setattr(request_watch, "LISTEN_S", 0.02)
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("STUB_ENGINE_ARGS", f"--stub-work-log {tmp_path / 'work'}")
    return service


@pytest.fixture
def never(tmp_path) -> tuple[str, str]:
    """What makes an engine work for ever, until its client leaves."""
    (tmp_path / "never").touch()
    return "--stub-hang-file", str(tmp_path / "never")


def ask(client, **options):
    return client.chat.completions.create(model="405b", messages=HELLO, **options)


def ears_of(client) -> Ears:
    """The client listens with these from now on."""
    ears: Any = Ears()
    client._watch.requests._silence = ears
    return ears


def events(service) -> list[str]:
    lines = [line for log in service.store.home.with_name("work").iterdir() for line in log.read_text().splitlines()]
    return [json.loads(line)["event"] for line in lines if line.endswith("}")]


def until(service, event: str, count: int = 1) -> None:
    wait_until(lambda: events(service).count(event) == count)


def name_of(service, engine) -> str:
    return f"{100 + service.engines.index(engine)}-r0-0.json"


def in_threads(service, count: int = 2) -> tuple[Any, Callable[[], Any], Callable[[], None]]:
    """A client, what asks it in a thread of its own, and what ends that."""
    client = connect_to_all(service, count, max_retries=0)
    threads = ThreadPoolExecutor(8)
    return client, lambda: threads.submit(ask, client), lambda: threads.shutdown(wait=False)


def in_a_loop(service, count: int = 2) -> tuple[Any, Callable[[], Any], Callable[[], None]]:
    """The same for asyncio: the loop runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    client = asyncio.run_coroutine_threadsafe(connect_async("405b", max_retries=0), loop).result(60)
    client._watch.refresh()
    assert len(client._watch.pool) == count

    def end() -> None:
        asyncio.run_coroutine_threadsafe(client.close(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    return client, lambda: asyncio.run_coroutine_threadsafe(ask(client), loop), end


@pytest.fixture(params=[in_threads, in_a_loop], ids=["threads", "asyncio"])
def talk(request, service):
    """Makes a client of so many replicas."""
    ends = []

    def make(count: int = 2) -> tuple[Any, Callable[[], Any]]:
        client, submit, end = request.param(service, count)
        ends.append(end)
        return client, submit

    yield make
    for end in ends:
        end()


def text_of(answer) -> str:
    return answer.result(60).choices[0].message.content


def late_first(service, client, submit) -> tuple[Any, str]:
    """A request whose replica is late from the moment that it works on it, and that replica's name."""
    ears = ears_of(client)
    answer = submit()
    until(service, "begun")
    (name,) = client._watch.pool._under_way
    ears.late = {name}
    return answer, name


def test_the_answer_of_the_second_is_taken_and_the_first_is_cancelled(service, talk, never):
    late = service.start(*never)
    well = service.start(state="starting")
    client, submit = talk(1)
    ears = ears_of(client)
    answer = submit()
    until(service, "begun")
    service.publish(well, counter=2)
    client._watch.refresh()
    ears.late = {name_of(service, late)}
    assert text_of(answer).startswith(f"stub-{well.port}")
    until(service, "abort")
    assert events(service).count("begun") == 2
    assert client._watch.pool._under_way == {}
    assert name_of(service, late) in client._watch.pool, "it is no reason to ask it no more"
    assert client.last_replica == name_of(service, well).removesuffix(".json")
    wait_until(lambda: client._watch.requests._thread is None)


def test_the_first_answer_is_taken_where_it_comes_first_and_the_second_is_cancelled(service, talk, tmp_path, never):
    (tmp_path / "hang").touch()
    late = service.start("--stub-hang-file", str(tmp_path / "hang"))
    service.start(*never)
    client, submit = talk()
    client._watch.pool.drop("101-r0-0.json")
    ears = ears_of(client)
    answer = submit()
    until(service, "begun")
    client._watch.refresh()
    ears.late = {name_of(service, late)}
    until(service, "begun", 2)
    (tmp_path / "hang").unlink()
    assert text_of(answer).startswith(f"stub-{late.port}")
    until(service, "abort")
    wait_until(lambda: client._watch.pool._under_way == {})
    assert "101-r0-0.json" in client._watch.pool


def test_a_request_that_is_lost_waits_for_its_second_and_begins_no_third(service, talk, tmp_path):
    (tmp_path / "hang").touch()
    engines = [service.start("--stub-hang-file", str(tmp_path / "hang")) for _ in range(3)]
    client, submit = talk(3)
    answer, name = late_first(service, client, submit)
    until(service, "begun", 2)
    lost = next(engine for engine in engines if name_of(service, engine) == name)
    lost.kill()
    wait_until(lambda: name not in client._watch.pool)
    (tmp_path / "hang").unlink()
    text_of(answer)
    assert events(service).count("begun") == 2


def test_both_are_lost(service, talk, never):
    engines = [service.start(*never) for _ in range(2)]
    client, submit = talk()
    answer, _ = late_first(service, client, submit)
    until(service, "begun", 2)
    for engine in engines:
        engine.kill()
    with pytest.raises(openai.APIConnectionError, match="was lost with its replica and is not sent again"):
        answer.result(60)
    wait_until(lambda: client._watch.pool._under_way == {})


def test_a_second_that_fails_leaves_the_first_alone(service, talk, tmp_path):
    (tmp_path / "hang").touch()
    late = service.start("--stub-hang-file", str(tmp_path / "hang"))
    client, submit = talk(1)
    ears = ears_of(client)
    answer = submit()
    until(service, "begun")
    service.start("--stub-error", "500")
    client._watch.refresh()
    ears.late = {name_of(service, late)}
    (first,) = (attempt for attempt in client._watch.requests._attempts if not attempt.is_second)
    wait_until(lambda: first.second is not None and first.second._is_over.is_set())
    (tmp_path / "hang").unlink()
    assert text_of(answer).startswith(f"stub-{late.port}")


def test_no_replica_is_asked_beside_that_is_in_doubt_itself(service, talk, tmp_path):
    (tmp_path / "hang").touch()
    for _ in range(2):
        service.start("--stub-hang-file", str(tmp_path / "hang"))
    client, submit = talk()
    client._watch.pool.doubt_also({"100-r0-0.json", "101-r0-0.json"})
    looks = []
    taking = client._watch.pool.take

    def take(*args, **options):
        looks.append(options)
        return taking(*args, **options)

    client._watch.pool.take = take
    answer, _ = late_first(service, client, submit)
    wait_until(lambda: len([look for look in looks if look]) > 3)
    (tmp_path / "hang").unlink()
    text_of(answer)
    assert events(service).count("begun") == 1


def test_a_request_that_its_user_cancels_ends_both(service, never):
    for _ in range(2):
        service.start(*never)
    client, submit, end = in_a_loop(service)
    answer, _ = late_first(service, client, submit)
    until(service, "begun", 2)
    answer.cancel()
    until(service, "abort", 2)
    wait_until(lambda: client._watch.pool._under_way == {})
    end()


@pytest.mark.parametrize("kind", [in_threads, in_a_loop], ids=["threads", "asyncio"])
def test_a_request_that_times_out_ends_both(service, kind, never):
    for _ in range(2):
        service.start(*never)
    client, submit, end = kind(service)
    client.timeout = 3.0
    ears_of(client).late = {"100-r0-0.json", "101-r0-0.json"}
    with pytest.raises(openai.APITimeoutError):
        submit().result(60)
    wait_until(lambda: events(service).count("abort") == events(service).count("begun"))
    wait_until(lambda: client._watch.pool._under_way == {})
    end()


def test_the_other_requests_of_a_late_replica_go_on(service, tmp_path):
    """It is not given up: a stream is read to its end there."""
    hang = tmp_path / "hang"
    late = service.start("--stub-words", "40", "--stub-word-s", "0.05", "--stub-hang-file", str(hang))
    client, submit, end = in_threads(service, 1)
    ears = ears_of(client)
    stream = iter(ask(client, stream=True))
    next(stream)
    hang.touch()
    answer = submit()
    until(service, "begun", 2)
    well = service.start()
    client._watch.refresh()
    ears.late = {name_of(service, late)}
    assert text_of(answer).startswith(f"stub-{well.port}")
    until(service, "abort")
    hang.unlink()
    assert len([chunk for chunk in stream if chunk.choices]) == 39
    assert events(service).count("abort") == 1
    end()


def test_a_frozen_first_is_left_while_it_is_being_connected(service, freeze):
    """It takes connections, and answers nothing on them: there is no request yet that could be cancelled."""
    frozen = service.start()
    client = connect("405b", max_retries=0)
    ears = ears_of(client)
    freeze(frozen)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(ask, client)
        wait_until(lambda: client._watch.pool._under_way)
        well = service.start()
        client._watch.refresh()
        ears.late = {name_of(service, frozen)}
        assert text_of(answer).startswith(f"stub-{well.port}")
    os.kill(frozen.process.pid, signal.SIGCONT)


class Waiting:
    """A request that waits."""

    is_waiting = True

    def __init__(self, began_at_s: float, *, is_second: bool = False, has_another: bool = True) -> None:
        self.began_at_s, self.is_second, self.has_another, self.beside = began_at_s, is_second, has_another, 0

    def ask_beside(self, attempt: object) -> bool:
        self.beside += 1
        return self.has_another


@pytest.mark.parametrize(
    ("requests", "seconds", "most"),
    [
        (10, 0, HEDGES),
        (10, 5, HEDGES - 5),
        (10, HEDGES, 0),
        (20 * ONE_HEDGE_FOR, 0, 20),
        (100 * ONE_HEDGE_FOR, 0, MOST_HEDGES),
    ],
)
def test_few_are_asked_twice_at_a_time_and_the_oldest_first(requests, seconds, most):
    attempts: Any = [Waiting(float(-place)) for place in range(requests - seconds)]
    attempts += [Waiting(-1e9, is_second=True) for _ in range(seconds)]
    late = attempts[: requests - seconds]
    request_watch._ask_beside(late, attempts)
    asked = [attempt for attempt in late if attempt.beside]
    assert len(asked) == min(most, len(late))
    assert asked == late[len(late) - len(asked) :]


def test_those_that_can_be_asked_of_no_other_replica_keep_none_from_it():
    attempts: Any = [Waiting(0.0, has_another=False) for _ in range(2 * HEDGES)] + [Waiting(1.0)]
    request_watch._ask_beside(attempts, attempts)
    assert attempts[-1].beside == 1


def test_a_body_is_read_once_to_see_whether_it_may_be_asked_twice(service, talk, tmp_path, monkeypatch):
    """It may be megabytes, and the question comes up ten times a second."""
    (tmp_path / "hang").touch()
    late = service.start("--stub-hang-file", str(tmp_path / "hang"))
    client, submit = talk(1)
    read = []

    def loads(text):
        read.append(text)
        return json.loads(text)

    monkeypatch.setattr(repeats, "json", SimpleNamespace(loads=loads))
    ears = ears_of(client)
    answer = submit()
    until(service, "begun")
    ears.late = {name_of(service, late)}
    wait_until(lambda: ears.heard > 10)
    (tmp_path / "hang").unlink()
    text_of(answer)
    assert len(read) == 1


def test_a_first_that_fails_while_its_second_is_being_begun_waits_for_it(service, talk, never, monkeypatch):
    first = service.start(*never)
    client, submit = talk(1)
    begin = hedge.SecondRequest.begin

    def begin_late(second, *args):
        begin(second, *args)
        first.kill()  # before the watching thread has seen whether the first one still waits
        wait_until(lambda: second.is_waited_for)

    monkeypatch.setattr(hedge.SecondRequest, "begin", begin_late)
    ears = ears_of(client)
    answer = submit()
    until(service, "begun")
    service.start("--stub-word-s", "0.2")
    client._watch.refresh()
    ears.late = {name_of(service, first)}
    text_of(answer)
    assert events(service).count("begun") == 2
    assert "abort" not in events(service)
