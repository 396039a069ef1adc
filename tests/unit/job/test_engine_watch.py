"""An engine is watched from outside: real processes of the stub engine that stop, hang and go on; real records."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from hpc_serve.job.engine.engine_watch import Adapters, EngineWatch, HealthAnswers
from hpc_serve.job.engine.health import Look, SmallRequest, ask, look, read_load, told
from hpc_serve.job.run.record_keeper import RecordKeeper
from hpc_serve.rendezvous.claims import change_wanted
from hpc_serve.rendezvous.record import Adapter, EndpointRecord
from hpc_serve.rendezvous.wanted import Wanted
from tests.cluster import wait_for
from tests.support.stubs import StubService
from tests.unit.job.conftest import address_of

REQUEST = SmallRequest(path="/v1/completions", body={"model": "405b", "prompt": "1", "max_tokens": 1})


@pytest.fixture
def service(tmp_path):
    service = StubService(tmp_path)
    yield service
    service.close()


class Scene:
    def __init__(self, service: StubService, *flags: str, **limits: float) -> None:
        self.service, self.engine = service, service.start(*flags)
        (record,) = service.store.read("405b").records
        self.keeper = RecordKeeper(service.store, record)
        self.address = address_of(service.store, "405b")
        limits = {"limit_s": 1.0, "give_up_s": 60.0, "interval_s": 0.1, "look_timeout_s": 0.5, **limits}
        self.watch = EngineWatch(address=self.address, request=REQUEST, keeper=self.keeper, **limits)

    @property
    def record(self) -> EndpointRecord:
        (record,) = self.service.store.read("405b").records
        return record

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.engine.process.pid, number)

    async def until(self, state: str) -> EndpointRecord:
        """The record, once it is in this state. On a busy machine a later one may be in another."""

        def look() -> EndpointRecord | None:
            record = self.record
            return record if record.state == state else None

        return await asyncio.to_thread(wait_for, look, 60)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        watching = asyncio.create_task(self.watch.run())
        try:
            yield
            assert not watching.done()
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching


async def test_an_engine_that_hangs_while_its_api_answers_is_unresponsive_until_it_goes_on(service, tmp_path):
    hang = tmp_path / "hang"
    scene = Scene(service, "--stub-hang-file", str(hang), look_timeout_s=60.0)  # it answers on a busy machine, too
    async with scene.watched():
        hang.touch()
        found = await scene.until("unresponsive")
        assert look(scene.address, timeout_s=60).status == 200
        assert "its engine has made no step" in found.reason
        hang.unlink()
        await scene.until("ready")


async def test_one_that_stays_unresponsive_is_given_up(service):
    scene = Scene(service, give_up_s=1.0)
    scene.signal(signal.SIGSTOP)
    reason = await asyncio.wait_for(scene.watch.run(), 60)
    assert re.fullmatch(r"was unresponsive for \d+ s: its engine has left /health unanswered for \d+ s", reason)


@pytest.mark.parametrize("limit_s", [1.0, 0.0])
async def test_one_with_a_fault_on_another_node_is_given_up_even_if_nobody_asks(service, limit_s):
    scene = Scene(service, limit_s=limit_s)
    fault = "its process VLLM::Worker (7) on n2 was stopped for 60 s"
    asyncio.get_running_loop().call_later(0.5, setattr, scene.watch, "fault", fault)  # after some looks
    reason = await asyncio.wait_for(scene.watch.run(), 60)
    assert reason == f"was given up: {fault}"


@pytest.mark.parametrize(("state", "limit_s"), [("ready", 0.0), ("draining", 1.0)])
async def test_with_a_limit_of_0_or_during_a_drain_nobody_asks(service, monkeypatch, state, limit_s):
    asked = []
    monkeypatch.setattr("hpc_serve.job.engine.engine_watch.look", lambda *words, **more: asked.append(words))
    scene = Scene(service, limit_s=limit_s)
    scene.keeper.update(state=state)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(scene.watch.run(), 0.5)
    assert not asked


@pytest.mark.parametrize("limit_s", [0.0, 1.0])
def test_where_nobody_asks_no_line_is_noise(service, limit_s):
    report = (
        "Avg prompt throughput: 0.1 tokens/s, Avg generation throughput: 0.4 tokens/s, Running: 0 reqs, Waiting: 0 reqs"
    )
    assert Scene(service, limit_s=limit_s).watch.is_noise(report) is bool(limit_s)


def test_lines_that_tell_of_its_own_questions_are_no_news(service):
    scene = Scene(service)
    look(scene.address, timeout_s=60)
    assert ask(scene.address, REQUEST, timeout_s=60) == 200
    line = '(APIServer pid=7) INFO:     127.0.0.1:{} - "POST /v1/completions HTTP/1.1" 200 OK'
    assert [scene.watch.is_noise(line.format(port)) for port in scene.address.own_ports] == [True, True]
    assert not scene.watch.is_noise(line.format(1))


async def test_the_record_says_what_an_engine_calls_its_weights(service, monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    scene = Scene(service)

    def until(version: str) -> None:
        wait_for(lambda: scene.keeper.record.weight_version == version, 60)

    following = asyncio.create_task(scene.watch.follow_weights())
    await asyncio.to_thread(until, "default")
    for name in ("step-1", "s" * 1000):
        assert not told(scene.address, "/update_weight_version", {"new_version": name}, timeout_s=60)
        await asyncio.to_thread(until, name[:200])
    scene.engine.kill()
    await asyncio.sleep(0.5)
    assert not following.done()
    following.cancel()
    assert scene.keeper.record.weight_version == "s" * 200


async def test_an_engine_that_names_no_weights_is_asked_once(service):
    scene = Scene(service)
    await asyncio.wait_for(scene.watch.follow_weights(), 60)
    assert scene.keeper.record.weight_version == ""


def test_the_load_of_an_engine_is_what_it_works_on_and_the_launchers_own_requests_do_not_count(service):
    service.start("--stub-slots", "1", "--stub-first-s", "600")
    address = address_of(service.store, "405b")
    load = read_load(address, timeout_s=60)
    assert (load.running, load.waiting, load.requests.count) == (0, 0, 0)

    def canary() -> None:
        with contextlib.suppress(OSError):
            ask(address, REQUEST, timeout_s=600)

    def both_are_there():
        load = read_load(address, timeout_s=60)
        return load if load and (load.running, load.waiting) == (1, 1) else None

    for _ in range(2):
        threading.Thread(target=canary, daemon=True).start()
    load = wait_for(both_are_there, 60, what="two requests")
    assert (load.requests.count, load.requests.under_way) == (0, 0)
    service.engines[0].kill()
    assert read_load(address, timeout_s=1.0) is None


def test_a_canary_goes_after_all_others_where_the_engine_has_priorities():
    assert REQUEST.after_all_others() == replace(REQUEST, body={**REQUEST.body, "priority": 1_000_000})


LIVES, IDLE, SILENT = (Look(status=200, words="busy"), Look(status=200, words="idle"), Look(status=None))
HANGS = Look(status=200, words="its engine's process VLLM::EngineCor is stopped")
SICK, OLD = Look(status=503), Look(status=200)

TABLE = {
    "it works": ([LIVES, IDLE, LIVES], ""),
    "one look has no answer": ([LIVES, SILENT], ""),
    "no answer for long": ([LIVES, SILENT, SILENT, SILENT, SILENT], "left /health unanswered for 6 s"),
    "one error": ([LIVES, SICK], ""),
    "two errors": ([LIVES, SICK, SICK], "/health answers 503"),
    "two errors, and it answers again": ([SICK, SICK, LIVES], ""),
    "an error, an answer, an error": ([SICK, LIVES, SICK], ""),
    "its gate says that it hangs": ([LIVES, HANGS], "is stopped"),
    "it hangs, and leaves a look unanswered": ([HANGS, SILENT], "is stopped"),
    "it made a step again": ([HANGS, LIVES], ""),
    "a gate that says nothing": ([OLD, OLD], ""),
}


@pytest.mark.parametrize("row", TABLE)
def test_what_follows_from_the_answers(row):
    looks, expected = TABLE[row]
    answers = HealthAnswers(5.0, 100.0)
    for number, seen in enumerate(looks):
        answers.note(seen, 101.5 + 1.5 * number)
    assert expected in answers.complaint
    assert bool(answers.complaint) == bool(expected)


def test_how_long_it_was_unresponsive_counts_from_the_first_complaint():
    answers = HealthAnswers(5.0, 100.0)
    for number, seen in enumerate([HANGS, SILENT, HANGS, HANGS]):
        answers.note(seen, 101.5 + 1.5 * number)
    assert answers.complaint_s == 4.5


def test_an_engine_that_does_nothing_or_hangs_gets_a_canary_at_every_second_look_and_a_busy_one_none():
    for seen, expected in ((IDLE, [False, True] * 3), (HANGS, [False, True] * 3), (LIVES, [False] * 6)):
        answers = HealthAnswers(5.0, 100.0)
        taken = []
        for number in range(6):
            answers.note(seen, 101.5 + 1.5 * number)
            taken.append(answers.takes_canary())
        assert taken == expected


def test_after_a_suspension_the_silence_begins_anew():
    answers = HealthAnswers(5.0, 100.0)
    answers.note(SILENT, 3_700.0)
    assert answers.complaint == ""
    answers.note(SILENT, 3_704.0)
    assert answers.complaint == ""
    answers.note(SILENT, 3_706.0)
    assert "unanswered for 6 s" in answers.complaint


async def test_an_adapter_that_failed_by_an_error_without_a_text_names_the_error(service, monkeypatch):
    def fail(*_, **__):
        raise TimeoutError

    monkeypatch.setattr("hpc_serve.job.engine.engine_watch.told", fail)
    scene = Scene(service)
    adapters = {"sql": Adapter(path="/adapters/sql", added_at=1.0)}
    change_wanted(service.store, "405b", lambda _: Wanted(least=1, most=1, count=1, adapters=adapters))
    await Adapters(scene.address, scene.keeper, has_room=True).bring()
    assert scene.keeper.record.adapters["sql"].fault == "the engine did not answer: TimeoutError"
