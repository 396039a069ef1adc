"""A drain, with a stub engine as a real process: what is under way is finished, or counted when time is up."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from hpc_serve.job.engine import drain as drain_module
from hpc_serve.job.engine.drain import Drain, follow_drain_requests
from hpc_serve.job.engine.health import EngineAddress, requests_under_way
from hpc_serve.job.run import parts as outcome_module
from hpc_serve.job.run.parts import Outcome, Parts, RunEnd, drain_s_after_signal
from hpc_serve.job.run.record_keeper import RecordKeeper
from hpc_serve.rendezvous.store import DrainRequest, ServiceStore, ask_to_drain, drain_file, read_drain_request
from hpc_serve.trust.certificates import make_run_certificate
from hpc_serve.trust.connection import Identity, VerifiedConnection
from tests.cluster import wait_for
from tests.support.stubs import SCRIPT, make_record


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(drain_module, "_LOOK_INTERVAL_S", 0.05)
    monkeypatch.setattr(drain_module, "_REQUEST_INTERVAL_S", 0.02)


@dataclasses.dataclass
class Scene:
    """A replica that serves, and what a test does to it."""

    drain: Drain
    store: ServiceStore
    hang_file: Path  # while it exists no stream goes on

    @property
    def record(self):
        (record,) = self.store.read("405b").records
        return record

    async def go_on(self) -> None:
        """Let the streams go on, once the drain has counted them."""
        await until(lambda: self.drain.keeper.record.stage.startswith("finishing ") and self.drain._most)
        self.hang_file.unlink()

    def complete(self) -> tuple[int, int]:
        """One streamed completion; returns the status and how many words came."""
        address = self.drain.address
        headers = {"Authorization": f"Bearer {address.identity.api_key}", "Content-Type": "application/json"}
        body = json.dumps({"model": "m", "prompt": "1", "stream": True})
        connection = VerifiedConnection(address.host, address.port, address.identity, timeout_s=60)
        with contextlib.closing(connection):
            connection.connect()
            connection.request("POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            return response.status, response.read().count(b'"text"')

    async def begin(self, number: int) -> list[asyncio.Task[tuple[int, int]]]:
        tasks = [asyncio.create_task(asyncio.to_thread(self.complete)) for _ in range(number)]
        await until(lambda: requests_under_way(self.drain.address) == number)
        return tasks


async def until(is_so) -> None:
    await asyncio.to_thread(wait_for, is_so, 60)


@contextlib.asynccontextmanager
async def serving(tmp_path: Path, *flags: str) -> AsyncIterator[Scene]:
    """A replica with an engine that is up."""
    store = ServiceStore(tmp_path / "home")
    key_file = store.ensure_api_key("405b")
    made = make_run_certificate(store.home, tmp_path, run="123-r0", addresses=["127.0.0.1"])
    record = make_record(state="ready", certificate=made.certificate)
    gate_file = tmp_path / "drain"
    environ = {**os.environ, "HPC_SERVE_API_KEY_FILE": str(key_file), "HPC_SERVE_DRAIN_FILE": str(gate_file)}
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_line(line: str) -> None:
        if (found := re.search(r"server on https://\S+:(\d+)", line)) and not port.done():
            port.set_result(int(found[1]))

    hang_file = tmp_path / "hang"
    hang_file.touch()
    flags_of_all = ("--host", "127.0.0.1", "--port", "0", "--stub-hang-file", str(hang_file))
    tls = ("--ssl-keyfile", str(made.key_file), "--ssl-certfile", str(made.certificate_file))
    argv = [sys.executable, str(SCRIPT), "serve", "m", *flags_of_all, *tls, *flags]
    run_end = RunEnd()
    engine = await Parts("none", run_end).start_child("engine", argv, environ, on_line=on_line)
    try:
        identity = Identity.of(record, store.read_api_key("405b"))
        address = EngineAddress(host="127.0.0.1", port=await asyncio.wait_for(port, 60), identity=identity)
        keeper = RecordKeeper(store, record)
        drain = Drain(engine=engine, address=address, gate_file=gate_file, keeper=keeper, run_end=run_end)
        yield Scene(drain, store, hang_file)
    finally:
        await engine.stop(0)


def stop(drain_s: float = 60.0) -> Outcome:
    return Outcome(reason="hpc-serve stop", exit_code=0, drain_s=drain_s)


STREAM = ("--stub-words", "10")


async def test_what_is_under_way_is_finished_and_nothing_else_begins(tmp_path):
    async with serving(tmp_path, *STREAM) as scene:
        streams = await scene.begin(3)
        draining = asyncio.create_task(scene.drain.run(stop()))
        await until(scene.drain.gate_file.exists)
        assert scene.record.state == "draining"
        assert (await asyncio.to_thread(scene.complete))[0] == 503
        await scene.go_on()
        outcome = await draining
        assert [await stream for stream in streams] == [(200, 10)] * 3
        assert scene.drain.engine.exit_code is None, "it is ended by whoever takes the run down"
    assert (outcome.is_failure, outcome.exit_code) == (False, 0)
    assert outcome.reason == "hpc-serve stop; 3 requests under way finished"


async def test_a_node_without_room_for_a_file_drains_all_the_same(tmp_path, caplog):
    """A link that leads to itself stands for a /tmp whose inodes a stranger has used up: no file can be made there."""
    async with serving(tmp_path, *STREAM) as scene:
        scene.drain.gate_file.symlink_to(scene.drain.gate_file)
        streams = await scene.begin(2)
        draining = asyncio.create_task(scene.drain.run(stop()))
        await scene.go_on()
        assert [await stream for stream in streams] == [(200, 10)] * 2
        assert (await draining).reason == "hpc-serve stop; 2 requests under way finished"
    assert "the engine goes on taking requests while it drains" in caplog.text


async def test_what_does_not_finish_in_time_is_counted(tmp_path):
    async with serving(tmp_path) as scene:
        await scene.begin(2)
        for drain_s in (1.0, 30.0):  # a busy machine may not ask the engine once within a second
            outcome = await dataclasses.replace(scene.drain).run(stop(drain_s=drain_s))
            if "did not say" not in outcome.reason:
                break
    assert outcome.exit_code == 0
    assert outcome.reason == "hpc-serve stop; of 2 requests under way 2 did not finish in time"


@pytest.mark.parametrize("how", ["signal", "stop --now"])
async def test_a_drain_ends_at_once_when_that_is_asked_for(tmp_path, how):
    async with serving(tmp_path) as scene:
        await scene.begin(1)
        run_end = scene.drain.run_end
        run_end.stop_on_signals()
        run_end.stop("hpc-serve stop", drain_s=600)
        draining = asyncio.create_task(scene.drain.run(await run_end.wait()))
        await until(lambda: scene.drain.keeper.record.stage == "finishing 1 request")
        if how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            run_end.stop("hpc-serve stop --now")
        outcome = await draining
    assert outcome.reason == "hpc-serve stop; of 1 request under way 1 did not finish in time"


async def test_an_engine_that_dies_while_it_drains_has_failed(tmp_path):
    async with serving(tmp_path) as scene:
        streams = await scene.begin(2)
        run_end = scene.drain.run_end
        run_end.stop("hpc-serve stop", drain_s=60)
        draining = asyncio.create_task(scene.drain.run(await run_end.wait()))
        await until(lambda: scene.drain.keeper.record.stage == "finishing 2 requests")
        os.kill(scene.drain.engine.pid, signal.SIGKILL)
        await scene.drain.engine.wait()
        await run_end.fail(Outcome(failed_part="engine", reason="engine exited with 137", exit_code=137))
        await asyncio.gather(*streams, return_exceptions=True)
        outcome = await draining
    assert (outcome.failed_part, outcome.exit_code) == ("engine", 137)
    assert outcome.reason == (
        "engine exited with 137, while it drained (hpc-serve stop); of 2 requests under way 2 did not finish in time"
    )


async def test_an_engine_without_figures_finishes_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(drain_module, "requests_under_way", lambda address: None)
    async with serving(tmp_path, *STREAM, "--shutdown-timeout", "60") as scene:
        streams = await scene.begin(1)
        draining = asyncio.create_task(scene.drain.run(stop()))
        await until(lambda: scene.record.state == "draining")
        scene.hang_file.unlink()
        outcome = await draining
        assert [await stream for stream in streams] == [(200, 10)]
    assert outcome.reason == "hpc-serve stop; the engine did not say how many requests were under way"


@pytest.mark.parametrize(
    ("error", "drain_s", "said"),
    [
        (None, 60, "no request was under way"),  # at once
        (OSError("no route"), 0.5, "the engine did not say how many requests were under way"),
    ],
)
async def test_an_engine_is_idle_if_it_says_so(tmp_path, monkeypatch, error, drain_s, said):
    if error is not None:
        monkeypatch.setattr(drain_module, "requests_under_way", Mock(side_effect=error))
    async with serving(tmp_path) as scene:
        outcome = await scene.drain.run(stop(drain_s=drain_s))
    assert outcome.reason == f"hpc-serve stop; {said}"


class TestSignals:
    async def test_the_same_signal_again_changes_nothing_and_a_later_one_ends_the_drain(self, monkeypatch):
        monkeypatch.setattr(outcome_module, "_SAME_SIGNAL_S", 3600)
        run_end = RunEnd(kill_wait_s=30)
        run_end.stop_on_signals()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
        assert (await run_end.wait()).drain_s == drain_s_after_signal(30) == 22
        interrupted = asyncio.create_task(run_end.wait_for_interruption())
        await asyncio.sleep(0.01)
        assert not interrupted.done()
        monkeypatch.setattr(outcome_module, "_SAME_SIGNAL_S", 0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(interrupted, 60) is None
        assert 3 <= run_end.grace_s <= 26

    def test_a_kill_wait_too_short_for_a_drain_gives_none(self):
        assert drain_s_after_signal(5) == 0


class TestRequests:
    @pytest.fixture
    def path(self, tmp_path):
        store = ServiceStore(tmp_path / "home")
        store.ensure_service("405b")
        return drain_file(store, "405b", "7-r0-0.json")

    async def followed(self, path: Path, ask) -> tuple[Outcome, bool]:
        """What comes of `ask(run_end)`: the outcome, and whether a drain is interrupted."""
        run_end = RunEnd()
        following = asyncio.create_task(follow_drain_requests(path, run_end))
        await ask(run_end)
        outcome = await asyncio.wait_for(run_end.wait(), 60)
        interrupted = asyncio.create_task(run_end.wait_for_interruption())
        await asyncio.wait({interrupted}, timeout=0.2)
        following.cancel()
        return outcome, interrupted.done()

    async def test_it_is_followed_once(self, path):
        async def ask(run_end):
            ask_to_drain(path, DrainRequest(by="hpc-serve stop", deadline_s=120, requested_at=1.0))

        outcome, is_interrupted = await self.followed(path, ask)
        assert (outcome.reason, outcome.drain_s, is_interrupted) == ("hpc-serve stop", 120, False)

    async def test_one_without_time_ends_a_drain(self, path):
        async def ask(run_end):
            ask_to_drain(path, DrainRequest(by="hpc-serve stop", deadline_s=120))
            await run_end.wait()
            ask_to_drain(path, DrainRequest(by="hpc-serve stop --now", deadline_s=0))
            await asyncio.wait_for(run_end.wait_for_interruption(), 60)

        outcome, is_interrupted = await self.followed(path, ask)
        assert (outcome.reason, is_interrupted) == ("hpc-serve stop", True)

    async def test_half_a_file_is_read_again(self, path, monkeypatch):
        def read_while_it_is_written(path):
            request = read_drain_request(path)
            path.write_text('{"by": "Slurm", "deadline_s": 90}\n')
            return request

        async def ask(run_end):
            path.write_text('{"by": "Sl')
            monkeypatch.setattr(drain_module, "read_drain_request", read_while_it_is_written)

        outcome = (await self.followed(path, ask))[0]
        assert (outcome.reason, outcome.drain_s) == ("Slurm", 90)

    async def test_half_a_file_that_stays_half_is_followed(self, path):
        async def ask(run_end):
            path.write_text('{"by": "Sl')

        outcome = (await self.followed(path, ask))[0]
        assert (outcome.drain_cause, outcome.drain_s) == ("unknown", 100)

    async def test_one_that_others_may_have_written_is_not_followed(self, path):
        async def ask(run_end):
            theirs = path.with_suffix(".theirs")
            theirs.write_text('{"by": "mallory", "deadline_s": 0}')
            theirs.chmod(0o666)
            theirs.rename(path)  # at no moment is it there and nobody else's
            await asyncio.sleep(0.1)
            run_end.stop("nobody")

        assert (await self.followed(path, ask))[0].reason == "nobody"
