"""Requests under way at a replica that is lost: stub engines that are stopped, or whose records say that they ended."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest

from hpc_serve.client import connect
from hpc_serve.client.connections import answer_wait
from hpc_serve.client.connections.answer_wait import ReplicaLostError
from hpc_serve.client.connections.connections import ThreadPool
from hpc_serve.client.connections.engine_pool import EnginePool
from hpc_serve.client.discovery import lost_replicas
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.replicas import silence
from hpc_serve.client.replicas.event_loops import run_blocking
from hpc_serve.client.replicas.silence import MOST_SILENT_S, SILENT_S
from hpc_serve.client.replicas.status import ProbeResult
from hpc_serve.client.requests import exchange
from hpc_serve.errors import StreamBrokenError
from tests.support.patience import connect_to_all, wait_until
from tests.support.stub_engine import chat_context, greedy_answer
from tests.support.stubs import make_record
from tests.unit.client.conftest import HELLO, FakeClock, one_engine, port_of, watch_told

NEVER = ("--stub-first-s", "600")
ENDLESS = ("--stub-words", "100000", "--stub-word-s", "0.05")


@pytest.fixture
def service(service, work_log, monkeypatch):
    monkeypatch.setattr(exchange, "LOST_WAIT_S", 0.2)
    monkeypatch.setattr(answer_wait, "ASK_S", 0.1)
    monkeypatch.setattr(lost_replicas, "LOOK_S", 0.1)
    monkeypatch.setattr(lost_replicas, "DOUBT_S", 0.1)
    monkeypatch.setenv("STUB_ENGINE_ARGS", " ".join(work_log.flags))
    return service


def ask(client, **options):
    return client.chat.completions.create(model="405b", messages=HELLO, **options)


@pytest.fixture
def under_way(work_log):
    """So many requests on which the engines have begun to work."""

    @contextmanager
    def asked(client, count=1):
        with ThreadPoolExecutor(count) as threads:
            answers = [threads.submit(ask, client) for _ in range(count)]
            wait_until(lambda: work_log.count("begun") == count)
            yield answers

    return asked


def why_lost(error):
    """The reason that the transport gives, below what the SDK makes of it."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    lost = [each for each in chain if isinstance(each, ReplicaLostError)]
    assert lost, chain
    return str(lost[0])


def test_requests_at_a_frozen_engine_end_with_the_reason(service, freeze, under_way):
    engine, client = one_engine(service, *NEVER)
    with under_way(client, 8) as answers:
        freeze(engine)
        errors = [answer.exception(60) for answer in answers]
    for error in errors:
        assert isinstance(error, openai.APIConnectionError)
        assert "100-r0-0.json is lost: ready by its record, but no answer from 127.0.0.1" in why_lost(error)
    assert client._watch.pool._under_way == {}
    assert len(client._watch.pool) == 0


def test_a_stream_from_a_frozen_engine_ends_with_the_reason(service, freeze, asker):
    engine = service.start(*ENDLESS)
    stream = asker(max_retries=0).create(model="405b", messages=HELLO, stream=True)
    next(stream)
    freeze(engine)
    with pytest.raises(StreamBrokenError) as broken:
        list(stream)
    assert "no answer from" in why_lost(broken.value)


@pytest.mark.parametrize("state", ["failed", "stopped", "starting"])
def test_requests_end_when_the_record_says_that_the_engine_ended(service, state, under_way):
    engine, client = one_engine(service, *NEVER)
    with under_way(client) as (answer,):
        service.publish(engine, state=state, stage="", reason="the node is down", counter=2)
        assert f"its record says that it is {state}" in why_lost(answer.exception(60))
    assert len(client._watch.pool) == 0


def test_requests_end_when_the_record_is_gone_and_the_engine_does_not_answer(service, freeze, monkeypatch, under_way):
    looks = counted_looks(monkeypatch)
    engine, other = service.start(*NEVER), service.start(*NEVER, state="starting")
    client = connect("405b", max_retries=0)
    with under_way(client) as (answer,):
        (service.store.service_dir("405b") / "100-r0-0.json").unlink()
        seen = len(looks)
        wait_until(lambda: len(looks) > seen + 4)
        assert not answer.done(), "its engine answers: the record may only not be seen"
        freeze(engine)
        assert "its record was removed, and its engine does not answer" in why_lost(answer.exception(60))
    assert other.process.poll() is None
    client._watch.refresh()
    assert [replica.job_id for replica in client._watch.status.replicas] == ["101"]


@pytest.mark.parametrize(("pauses_s", "limit_s"), [([], 1.5), ([2.0], 3.0), ([20.0], 5.0)], ids=str)
def test_a_connection_may_take_as_long_as_its_replica_may_be_silent(service, monkeypatch, pauses_s, limit_s):
    monkeypatch.setattr(silence, "SILENT_S", SILENT_S)
    monkeypatch.setattr(silence, "MOST_SILENT_S", MOST_SILENT_S)
    engines = [service.start(), service.start()]
    client = connect_to_all(service, len(engines))
    lost, given = client._watch.lost, []
    for record in client._watch.pool.others(set()):
        for pause_s in pauses_s:
            lost.limit_of(record.name).note(lost.clock(), pause_s)
    connect_in = EnginePool.connect

    async def noted(pool, replica, timeout_s):
        given.append(timeout_s)
        return await connect_in(pool, replica, timeout_s)

    monkeypatch.setattr(EnginePool, "connect", noted)
    ask(client)
    assert given == [limit_s]


def test_the_sdks_retries_take_what_was_abandoned_to_another_replica(service, freeze, under_way):
    frozen = service.start(*NEVER)
    client = connect("405b", max_retries=1)
    well = service.start()
    with under_way(client, 4) as answers:
        freeze(frozen)
        assert {port_of(answer.result(60)) for answer in answers} == {well.port}


def test_a_slow_engine_and_a_draining_one_are_left_in_peace(service, monkeypatch, tmp_path, under_way):
    (tmp_path / "hang").touch()
    slow = service.start("--stub-hang-file", str(tmp_path / "hang"))
    looks = counted_looks(monkeypatch)
    client = connect("405b", max_retries=0)
    with under_way(client, 4) as answers:
        wait_until(lambda: len(looks) > 2)
        service.publish(slow, state="draining", counter=2)
        seen = len(looks)
        wait_until(lambda: len(looks) > seen + 2)
        (tmp_path / "hang").unlink()
        assert all(answer.result(60).choices for answer in answers)


def counted_looks(monkeypatch):
    looks = []
    looking = ServiceWatch._look_after

    def look(watch, names):
        looks.append(names)
        return looking(watch, names)

    monkeypatch.setattr(ServiceWatch, "_look_after", look)
    return looks


def test_one_probe_that_is_missed_costs_an_engine_nothing(service):
    """It is asked last until it has answered again; at the second in a row it is given up."""
    first, second = service.publish(service.start()), service.publish(service.start())
    answers = {first.name: "ready", second.name: "ready"}
    watch = watch_told(service, answers)
    names = {first.name, second.name}
    watch.refresh()
    answers[first.name] = "no answer"
    assert not watch._look_after(names).lost
    taken = [watch.pool.take() for _ in range(8)]
    assert {replica.name for replica in taken} == {second.name}
    assert watch.pool.take({second.name}).name == first.name
    answers[first.name] = "ready"
    assert not watch._look_after(names).lost
    answers[first.name] = "not ours"
    assert not watch._look_after(names).lost
    assert list(watch._look_after(names).lost) == [first.name]
    assert watch.pool.take({second.name}) is None


def test_an_engine_that_was_started_again_proves_itself_anew(service):
    """It has the name of the one before, and another port."""
    record = service.publish(service.start())
    again = replace(record, port=record.port - 1, counter=2)
    asked: list[int] = []

    def ask(records, key):
        asked.extend(record.port for record in records)
        status: Any = "ready" if records[0].port == again.port else "no answer"
        return {record.name: ProbeResult(status=status, host="127.0.0.1") for record in records}

    watch = ServiceWatch(service.store, "405b", probe=ask)
    assert not watch.refresh().ready
    service.store.write(again)
    assert [replica.record.port for replica in watch.refresh().ready] == [again.port]
    assert asked == [record.port, again.port], "what the other one did not answer says nothing"
    service.store.write(replace(record, counter=9))
    assert not watch.refresh().ready


def test_words_of_an_answer_are_a_sign_of_life(service):
    """An engine that ends gently closes its port and goes on with its streams."""
    record, clock = service.publish(service.start()), FakeClock()
    answers = {record.name: "ready"}
    watch = watch_told(service, answers, clock=clock)
    watch.refresh()
    answers[record.name] = "no answer"
    for _ in range(5):
        watch.lost.limit_of(record.name).note(clock(), 0.0)
        assert not watch._look_after({record.name}).lost
        clock.now_s += 5.0
    assert not watch._look_after({record.name}).lost, "it is the first probe that was missed in silence"
    assert watch._look_after({record.name}).lost


def test_a_host_without_power_is_noticed_by_the_kernel(service):
    record = service.publish(service.start())
    watch = ServiceWatch(service.store, "405b")
    watch.refresh()
    connection = run_blocking(ThreadPool(watch.lost).connect(watch.pool.take(), 60.0))
    found = connection.socket
    assert record.port == found.getpeername()[1]
    assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
    assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000
    connection.abort()


def test_records_of_replicas_without_requests_do_not_end_a_look(service):
    service.store.write(make_record(job_id="7", state="stopped"))
    engine = service.start("--stub-first-s", "1")
    assert port_of(ask(connect("405b", max_retries=0))) == engine.port


@pytest.fixture
def silence_counts(no_looks, monkeypatch):
    """Only silence tells of a lost replica, and it does so in the product's own time."""
    monkeypatch.setattr(silence, "SILENT_S", SILENT_S)
    monkeypatch.setattr(silence, "MOST_SILENT_S", MOST_SILENT_S)


def silence_of(fault, engine, freeze, tmp_path):
    freeze(engine) if fault == "frozen" else (tmp_path / "hang").touch()


@pytest.mark.parametrize("fault", ["frozen", "hung"])
def test_streams_go_on_elsewhere_when_their_engine_goes_silent(service, freeze, silence_counts, tmp_path, fault):
    flags = ("--stub-greedy", "--stub-words", "200", "--stub-word-s")
    engine = service.start(*flags, "0.2", "--stub-hang-file", str(tmp_path / "hang"))
    other = service.start(*flags, "0", state="starting")
    client = connect("405b", max_retries=0)
    stream = iter(ask(client, stream=True, temperature=0))
    seen = [next(stream)]
    service.publish(other, counter=2)
    client._watch.refresh()
    silence_of(fault, engine, freeze, tmp_path)
    seen += stream
    text = "".join(chunk.choices[0].delta.content or "" for chunk in seen if chunk.choices)
    assert text == greedy_answer(chat_context(HELLO), 200)
    assert [chunk.resumed["replica"] for chunk in seen if getattr(chunk, "resumed", None)] == ["101-r0-0.json"]


@pytest.mark.parametrize("fault", ["frozen", "hung"])
def test_a_whole_answer_is_asked_for_again_when_its_engine_goes_silent(
    service, freeze, silence_counts, tmp_path, fault, under_way
):
    engine, client = one_engine(service, *NEVER, "--stub-hang-file", str(tmp_path / "hang"))
    with under_way(client) as (answer,):
        other = service.start()
        client._watch.refresh()
        silence_of(fault, engine, freeze, tmp_path)
        assert port_of(answer.result(60)) == other.port
