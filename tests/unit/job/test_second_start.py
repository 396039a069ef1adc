"""A second start of a service on this machine: with what the first has compiled, or without it if that is damaged.

Real bash, launcher and files; the engine is the stub, which keeps one file for its compiled code.
"""

from __future__ import annotations

import pytest

from hpc_serve.rendezvous.store import DrainRequest, ask_to_drain, drain_file
from tests.support.local_run import Run


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
