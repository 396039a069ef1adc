"""How often an engine is started again, and what a run does then.

Real bash, launcher and files; the engine is the stub.
"""

from __future__ import annotations

import os
import re
import signal

import pytest

import hpc_serve.client
from hpc_serve.job.cleanup.node_dir import list_segments, mapped_by
from hpc_serve.job.run.node import Restarts
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import DrainRequest, ask_to_drain, drain_file
from tests.cluster import wait_for
from tests.support.local_run import Run

# How many the kernel has killed for memory meanwhile, anywhere on this machine, is not the test's to say.
KILLED = re.compile(r"engine exited with 137; the kernel has killed (?:none|\d+ process(?:es)?) .*for memory .+")


def test_an_engine_that_was_never_ready_is_not_started_again():
    assert Restarts(3).after_end(None) is None


def test_three_starts_with_longer_waits_and_then_none():
    restarts = Restarts(3)
    ends = [(restarts.after_end(ready_s), restarts.words) for ready_s in (100.0, 1.0, None)]
    words = "starting the engine again ({} of 3)"
    assert ends == [(1.0, words.format(1)), (5.0, words.format(2)), (25.0, words.format(3))]
    assert restarts.after_end(599.0) is None
    assert restarts.total == 3


def test_ten_minutes_of_readiness_begin_the_count_anew():
    restarts = Restarts(1)
    assert [restarts.after_end(s) is not None for s in (10.0, 600.0, 700.0, 599.0)] == [True, True, True, False]
    assert restarts.total == 3


def kill_engine(run: Run, number: signal.Signals = signal.SIGKILL) -> None:
    (pid,) = run.engines()
    os.kill(pid, number)


def wait_for_start(run: Run, number: int) -> EndpointRecord:
    """The record of an engine that is ready after so many starts in place."""

    def look() -> EndpointRecord | None:
        record = run.record
        assert run.process.poll() is None, run.log.read_text()
        return record if record and (record.state, record.engine_restarts) == ("ready", number) else None

    return wait_for(look, 60, what=f"start {number} in place")


def test_an_engine_that_is_killed_is_started_again_and_found_on_its_new_port(start, tmp_path):
    hold_file = tmp_path / "hold"
    run = start("--stub-share-memory", "--stub-hold-file", str(hold_file))
    first = wait_for_start(run, 0)
    client = hpc_serve.client.connect("8b", home=run.store.home, wait=60)
    assert client.completions.create(model=client.model, prompt="1").choices[0].text.startswith("stub-")
    ours = mapped_by(run.engines(), list_segments())
    assert ours

    hold_file.touch()
    kill_engine(run)
    again = run.wait_for_state("starting")
    hold_file.unlink()
    assert again.stage.startswith("starting the engine again (1 of 3)")
    assert KILLED.fullmatch(str(again.reason)), again.reason
    assert again.measured == first.measured
    second = wait_for_start(run, 1)
    assert second.port != first.port
    assert (second.reason, second.last_log_lines, second.certificate) == (None, (), first.certificate)
    answer = client.completions.create(model=client.model, prompt="1")
    assert answer.choices[0].text.startswith(f"stub-{second.port}")
    assert not ours & list_segments()
    assert "starting the engine again (1 of 3), 1 s after this end: engine exited with 137" in run.node_log()


def test_what_an_engine_calls_its_weights_is_gone_with_it(start):
    run = start(variables={"VLLM_SERVER_DEV_MODE": "1"})
    wait_for_start(run, 0)
    hpc_serve.client.tell_all("8b", "/update_weight_version", {"new_version": "step-200"}, home=run.store.home)
    wait_for(lambda: run.record.weight_version == "step-200", 60, what="the name of its weights")
    kill_engine(run)
    assert run.wait_for_state("starting").weight_version == ""
    wait_for_start(run, 1)
    wait_for(lambda: run.record.weight_version == "default", 60, what="the name of the weights that it started with")


@pytest.mark.parametrize("when", ["waiting", "loading"])
def test_a_run_that_is_stopped_during_a_restart_ends_well(start, tmp_path, when):
    hold_file = tmp_path / "hold"
    run = start("--stub-hold-file", str(hold_file))
    wait_for_start(run, 0)
    hold_file.touch()
    kill_engine(run)
    if when == "loading":
        wait_for(lambda: run.record and "loading weights" in run.record.stage, 60, what="the next start")
        assert run.record.stage.startswith("starting the engine again (1 of 3): loading weights")
    else:
        run.wait_for_state("starting")
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(60) == 0, run.log.read_text()
    record = run.wait_for_state("stopped")
    assert str(record.reason).startswith("SIGTERM")
    assert not run.engines()


# -- A second start of a service on this machine: with what the first has compiled, or without it if that is damaged


@pytest.fixture
def begin(start, tmp_path):
    """Begins a start of the service, in a folder of its own; all have one folder of caches."""

    def begin(number: int, *flags: str) -> Run:
        (folder := tmp_path / str(number)).mkdir()
        kept = {"HPC_SERVE_CACHE_SIZE": "1GiB", "HPC_SERVE_CACHE_DIR": str(tmp_path / "caches")}
        return start(*flags, folder=folder, variables={**kept, "HPC_SERVE_CANARY_S": "0"})

    return begin


@pytest.fixture
def ready(begin):
    """One start, until it is ready, and its end: what its record says of the caches, and its log."""

    def ready(number: int, *flags: str) -> tuple[str, str]:
        run = begin(number, *flags)
        record = run.wait_for_state("ready")
        # As `stop` ends it, so that its launcher has given back the lock.
        ask_to_drain(drain_file(run.store, record.service, record.name), DrainRequest(by="a test", deadline_s=0.0))
        assert run.process.wait(180) == 0, run.node_log()
        return record.cache, run.node_log()

    return ready


def test_the_second_start_finds_what_the_first_has_compiled(ready, tmp_path):
    first, log = ready(1)
    assert first.startswith(f"cold, kept in {tmp_path}/caches/")
    assert "Directly load" not in log
    second, log = ready(2)
    assert second.startswith(f"warm, from {tmp_path}/caches/")
    assert "Directly load" in log


def test_an_engine_that_damaged_caches_end_starts_without_them(ready):
    ready(1)
    words, log = ready(2, "--stub-fail-warm", "RuntimeError: unexpected end of graph")
    assert words.endswith("(the engine did not start with what had been there)")
    assert "starting the engine again, without the caches of earlier starts" in log
    assert ready(3)[0].startswith("warm")


NOT_BY_CACHES = {
    "a known cause": ("--stub-fail-warm", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    "before it has its weights": ("--stub-fail", "ValueError: no such file of weights"),
    "killed": ("--stub-fail-warm", "RuntimeError: unexpected end of graph", "--stub-exit-code", "137"),
}


@pytest.mark.parametrize("why", NOT_BY_CACHES)
def test_an_engine_that_fails_for_another_cause_is_not_started_twice(begin, ready, why):
    ready(1)
    run = begin(2, *NOT_BY_CACHES[why])
    record = run.wait_for_state("failed")
    assert run.process.wait(180) == record.exit_code
    assert record.cache.startswith("warm")
    assert run.node_log().count("this is a stub engine") == 1
    assert ready(3)[0].startswith("warm"), "what is not to blame stays"
