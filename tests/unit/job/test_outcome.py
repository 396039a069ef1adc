"""The first cause counts; a stop from outside beats the failures it brings about."""

from __future__ import annotations

import asyncio

from hpc_serve.job.run import parts as outcome_module
from hpc_serve.job.run.parts import Outcome, RunEnd
from tests.unit.job.conftest import in_a_loop


def failed(part: str) -> Outcome:
    return Outcome(failed_part=part, reason="r", exit_code=3)


@in_a_loop
async def test_the_first_failure_counts(monkeypatch):
    monkeypatch.setattr(outcome_module, "_SETTLE_S", 0.01)

    run_end = RunEnd()
    await run_end.fail(failed("raylet"))
    await run_end.fail(failed("engine"))
    run_end.stop("SIGTERM")
    assert (await run_end.wait()).failed_part == "raylet"


@in_a_loop
async def test_a_childs_end_seen_before_our_own_signal_is_a_stop():
    run_end = RunEnd()
    failing = asyncio.create_task(run_end.fail(failed("engine")))
    await asyncio.sleep(0)
    run_end.stop("SIGTERM")
    await failing
    end = await run_end.wait()
    assert (end.is_failure, end.exit_code, end.reason) == (False, 0, "SIGTERM")
