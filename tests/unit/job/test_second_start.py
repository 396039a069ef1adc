"""A second start of a service on this machine: with what the first has compiled, or without it if that is damaged.

Real bash, launcher and files; the engine is the stub, which keeps one file for its compiled code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_serve.rendezvous.drain import DrainRequest, ask_to_drain, drain_file
from hpc_serve.rendezvous.record import EndpointRecord
from tests.support.local_run import Run


@pytest.fixture
def caches(tmp_path):
    return tmp_path / "caches"


@contextlib.contextmanager
def started(folder: Path, caches: Path, *flags: str) -> Iterator[Run]:
    folder.mkdir()
    variables = {"HPC_SERVE_CACHE_SIZE": "1GiB", "HPC_SERVE_CACHE_DIR": str(caches), "HPC_SERVE_CANARY_S": "0"}
    run = Run(folder, *flags, variables=variables)
    try:
        yield run
    finally:
        run.close()


def end(run: Run, record: EndpointRecord) -> None:
    """End it as `stop` does, so that its launcher has given back the lock."""
    ask_to_drain(drain_file(run.store, record.service, record.name), DrainRequest(by="a test", deadline_s=0.0))
    assert run.process.wait(180) == 0, run.node_log()


def ready(folder: Path, caches: Path, *flags: str) -> tuple[str, str]:
    """One start, until it is ready, and its end: what its record says of the caches, and its log."""
    with started(folder, caches, *flags) as run:
        record = run.wait_for_state("ready")
        end(run, record)
        return record.cache, run.node_log()


def test_the_second_start_finds_what_the_first_has_compiled(tmp_path, caches):
    first, log = ready(tmp_path / "1", caches)
    assert first.startswith(f"cold, kept in {caches}/")
    assert "Directly load" not in log
    second, log = ready(tmp_path / "2", caches)
    assert second.startswith(f"warm, from {caches}/")
    assert "Directly load" in log


def test_an_engine_that_damaged_caches_end_starts_without_them(tmp_path, caches):
    ready(tmp_path / "1", caches)
    words, log = ready(tmp_path / "2", caches, "--stub-fail-warm", "RuntimeError: unexpected end of graph")
    assert words.endswith("(the engine did not start with what had been there)")
    assert "starting the engine again, without the caches of earlier starts" in log
    assert ready(tmp_path / "3", caches)[0].startswith("warm")


NOT_BY_CACHES = {
    "a known cause": ("--stub-fail-warm", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    "before it has its weights": ("--stub-fail", "ValueError: no such file of weights"),
    "killed": ("--stub-fail-warm", "RuntimeError: unexpected end of graph", "--stub-exit-code", "137"),
}


@pytest.mark.parametrize("why", NOT_BY_CACHES)
def test_an_engine_that_fails_for_another_cause_is_not_started_twice(tmp_path, caches, why):
    ready(tmp_path / "1", caches)
    with started(tmp_path / "2", caches, *NOT_BY_CACHES[why]) as run:
        record = run.wait_for_state("failed")
        assert run.process.wait(180) == record.exit_code
    assert record.cache.startswith("warm")
    assert run.node_log().count("this is a stub engine") == 1
    assert ready(tmp_path / "3", caches)[0].startswith("warm"), "what is not to blame stays"
