"""The parts of a launcher: the end of one ends the run, they are stopped in order, and nothing of them stays."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import cast

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.job.links.control import WorkerLinks
from hpc_serve.job.links.link import Link
from hpc_serve.job.machine.process import mark_environ, marked_pids
from hpc_serve.job.progress import ReadSoFar
from hpc_serve.job.run.parts import Outcome, PartFailedError, Parts, RunEnd, StopOrder
from tests.cluster import wait_for

MARK = f"test-{os.getpid()}-parts"
ENVIRON = {**os.environ, **mark_environ(MARK), "PYTHONUNBUFFERED": "1"}


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture(autouse=True)
def _no_settling(monkeypatch):
    monkeypatch.setattr("hpc_serve.job.run.parts._SETTLE_S", 0.01)


async def outcome_of(code: str, *, is_starting: bool):
    run_end = RunEnd()
    parts = Parts(MARK, run_end, is_starting=lambda: is_starting)
    child = await parts.start_child("engine", python(code), ENVIRON)
    parts.add_child(StopOrder.ENGINE, child, grace_s=1)
    parts.end_with(child)
    outcome = await asyncio.wait_for(run_end.wait(), 60)
    await parts.take_down()
    return outcome


async def test_the_end_of_a_child_is_the_end_of_the_run():
    outcome = await outcome_of("print('ValueError: no such model'); raise SystemExit(3)", is_starting=True)
    assert (outcome.failed_part, outcome.exit_code) == ("engine", 3)
    assert outcome.reason == "engine exited with 3: ValueError: no such model"
    assert outcome.last_log_lines == ("ValueError: no such model",)


@pytest.mark.parametrize(("is_starting", "exit_code"), [(True, 75), (False, 1)])
async def test_a_port_that_was_taken_is_tried_again_until_the_service_was_ready(is_starting, exit_code):
    code = "print('OSError: [Errno 98] Address already in use'); raise SystemExit(1)"
    assert (await outcome_of(code, is_starting=is_starting)).exit_code == exit_code


async def test_a_command_that_is_not_there_is_named_with_advice():
    parts = Parts(MARK, RunEnd())
    with pytest.raises(PartFailedError, match=r"no command no-such-ray .*HPC_SERVE_ENV") as caught:
        await parts.start_child("ray head", ["no-such-ray"], ENVIRON)
    assert caught.value.outcome.exit_code == 127


async def test_the_engine_is_stopped_before_the_workers_and_they_before_ray():
    stopped = []

    parts = Parts(MARK, RunEnd())
    for order in (StopOrder.RAY, StopOrder.ENGINE, StopOrder.WORKERS):

        async def stop(order=order):
            await asyncio.sleep(0)
            stopped.append(order)

        parts.add(order, stop)
    await parts.take_down()
    assert stopped == [StopOrder.ENGINE, StopOrder.WORKERS, StopOrder.RAY]


async def test_a_taken_down_run_leaves_no_process():
    code = (
        "import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True); print(1); time.sleep(600)"
    )

    started = asyncio.Event()
    parts = Parts(MARK, RunEnd())
    child = await parts.start_child("engine", python(code), ENVIRON, on_line=lambda line: started.set())
    parts.add_child(StopOrder.ENGINE, child, grace_s=1)
    await asyncio.wait_for(started.wait(), 60)
    # While a program replaces another, /proc shows no environment for a moment.
    await asyncio.to_thread(wait_for, lambda: len(list(marked_pids(MARK))) == 2, 60, what="both processes")
    await parts.take_down()
    assert not list(marked_pids(MARK))


@pytest.mark.parametrize(
    ("error", "exit_code", "reason"),
    [(InvalidRequestError("bad words"), 2, "bad words"), (KeyError("x"), 1, "KeyError: 'x'")],
)
async def test_an_error_of_the_launcher_is_the_end_of_the_run(error, exit_code, reason):
    async def fail():
        raise error

    run_end = RunEnd()
    await run_end.fail_on_error(fail())
    outcome = await run_end.wait()
    assert (outcome.failed_part, outcome.exit_code, outcome.reason) == ("launcher", exit_code, reason)


class FakeLink:
    """A worker's connection: says nothing, and knows whether it was closed."""

    def __init__(self, rank: int) -> None:
        self.rank, self.name, self.address = rank, f"n{rank}", f"10.0.0.{rank}"
        self.read = ReadSoFar(by_read=3, mapped=2)
        self.cache = f"/caches/{min(rank, 2)}"
        self.is_closed = False

    async def receive(self):
        await asyncio.Event().wait()

    async def send_heartbeats(self, look):
        await asyncio.Event().wait()

    async def close(self):
        self.is_closed = True


async def test_a_rank_that_is_unknown_or_taken_is_refused():
    joined: list[Link] = []
    parts = Parts(MARK, RunEnd())
    workers = WorkerLinks(3, parts, joined.append)
    links = [FakeLink(rank) for rank in (1, 1, 0, 3)]
    for link in links:
        workers.add_worker(cast(Link, link))
    await asyncio.sleep(0.01)
    assert (len(workers), workers.absent_ranks, workers.read.total) == (1, [2], 5)
    assert workers.names == {"10.0.0.1": "n1"}
    assert [workers.have_cache(path) for path in ("/caches/1", "/caches/2", "")] == [True, False, False]
    assert list(map(id, joined)) == [id(links[0])]
    assert [link.is_closed for link in links] == [False, True, True, True]


# -- The first cause counts; a stop from outside beats the failures it brings about


def failed(part: str) -> Outcome:
    return Outcome(failed_part=part, reason="r", exit_code=3)


async def test_the_first_failure_counts():
    run_end = RunEnd()
    await run_end.fail(failed("raylet"))
    await run_end.fail(failed("engine"))
    run_end.stop("SIGTERM")
    assert (await run_end.wait()).failed_part == "raylet"


async def test_a_childs_end_seen_before_our_own_signal_is_a_stop():
    run_end = RunEnd()
    failing = asyncio.create_task(run_end.fail(failed("engine")))
    await asyncio.sleep(0)
    run_end.stop("SIGTERM")
    await failing
    end = await run_end.wait()
    assert (end.is_failure, end.exit_code, end.reason) == (False, 0, "SIGTERM")
