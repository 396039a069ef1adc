"""A service that is asleep, as its clients see it. `hpc-serve wake` runs as a child process; Slurm is a stand-in."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_serve.client import connect
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.discovery.wait import ABSENT_GRACE_S, WaitPolicy, wait_for_replica
from hpc_serve.client.replicas.event_loops import InThread, run_blocking
from hpc_serve.errors import ServiceAsleepError, ServiceNotFoundError, WaitTimeoutError
from hpc_serve.rendezvous.claims import change_wanted, read_wanted
from hpc_serve.rendezvous.wanted import SUBMITTING_S, Decision, Wanted
from tests.cluster import wait_for
from tests.support.fake_slurm import FakeSlurm
from tests.support.stubs import StubService, make_record, make_submitted
from tests.unit.client.conftest import say

SERVICE = "405b"
WHY = "no request for 30 min"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    return fake


@pytest.fixture
def asleep(service: StubService, slurm: FakeSlurm, tmp_path: Path) -> StubService:
    """The service of job 100, which has ended."""
    script = service.store.service_dir(SERVICE) / "scripts" / "first.sh"
    script.parent.mkdir(mode=0o700)
    script.write_text("#!/bin/bash\n")
    script.chmod(0o600)
    log = tmp_path / "logs" / "100.log"
    record = make_record(job_id="100", state="stopped", reason="hpc-serve elastic: no request")
    service.store.write(record)
    service.store.write_submitted(
        make_submitted(job_id="100", model=record.model, script=str(script), log_path=str(log))
    )
    slurm.job("100", "COMPLETED")
    fall_asleep(service)
    return service


def fall_asleep(service: StubService) -> None:
    told = Decision(action="drain", cause="idle", why=WHY)
    asleep = Wanted(least=1, most=4, count=0, state="asleep").with_decisions(time.time(), told)
    change_wanted(service.store, SERVICE, lambda found: asleep)


def when_submitted(slurm: FakeSlurm, count: int, do: Callable[[], object]) -> threading.Thread:
    """Do something once sbatch has taken so many scripts, as Slurm would start the job."""

    def wait() -> None:
        wait_for(lambda: len(slurm.scripts) >= count, 180, what="a submission")
        do()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_without_wake_the_error_says_how(asleep, slurm):
    for wait in (None, 600):
        with pytest.raises(ServiceAsleepError) as caught:
            connect(SERVICE, wait=wait)
        assert str(caught.value) == (
            "405b is asleep: no request for 30 min. Wake it: connect('405b', wait=600, wake=True), "
            "or `hpc-serve wake 405b`."
        )
        assert isinstance(caught.value, ServiceNotFoundError)
    assert slurm.scripts == []


def test_several_programs_wake_it_once(asleep, slurm):
    when_submitted(slurm, 1, lambda: asleep.start(job_id="101_0"))

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: say(connect(SERVICE, wait=180, wake=True)), range(4)))
    assert answers == 4 * [asleep.engines[0].port]
    assert len(slurm.scripts) == 1
    assert read_wanted(asleep.store, SERVICE).state == "awake"


def test_a_request_of_a_connected_client_wakes_it(asleep, slurm, asker):
    when_submitted(slurm, 1, lambda: asleep.start(job_id="101_0"))
    asking = asker(wake=True, max_retries=0)
    asleep.engines[0].kill()
    asleep.publish(asleep.engines[0], job_id="101_0", state="stopped", reason="hpc-serve elastic: no request")
    slurm.job("101_0", "COMPLETED")
    slurm.queue()
    fall_asleep(asleep)
    when_submitted(slurm, 2, lambda: asleep.start(job_id="102_0"))
    asking.say()
    assert asking.client.last_replica.startswith("102_0-r0-0")
    assert len(slurm.scripts) == 2


def test_a_program_that_died_while_it_woke_the_service(asleep, slurm):
    at = time.time() - SUBMITTING_S - 1
    change_wanted(
        asleep.store, SERVICE, lambda found: replace(found, state="awake", count=1, submitting=1, submitting_at=at)
    )
    with pytest.raises(ServiceAsleepError, match="the program that woke it submitted nothing"):
        connect(SERVICE)
    when_submitted(slurm, 1, lambda: asleep.start(job_id="101_0"))
    connect(SERVICE, wait=180, wake=True)
    assert len(slurm.scripts) == 1


def test_a_wait_that_is_over_once_the_service_is_woken_tells_of_the_new_job(asleep, slurm):
    with pytest.raises(WaitTimeoutError, match=r"not ready after .* s: pending.*\(job 101"):
        connect(SERVICE, wait=0.01, wake=True)
    assert len(slurm.scripts) == 1


def test_what_sbatch_says_when_it_refuses(asleep, slurm):
    slurm.refuse("sbatch: error: Batch job submission failed: Access/permission denied")
    with pytest.raises(ServiceAsleepError, match=r"is asleep, and was not woken: sbatch refused the job: .*denied"):
        connect(SERVICE, wait=180, wake=True)
    assert read_wanted(asleep.store, SERVICE).state == "asleep"


def test_a_service_that_a_person_stopped_is_not_woken(asleep, slurm):
    change_wanted(asleep.store, SERVICE, lambda found: Wanted(least=1, most=4, count=0, state="stopped"))
    with pytest.raises(ServiceNotFoundError, match="No replica of 405b takes requests") as caught:
        connect(SERVICE, wait=0.2, wake=True)
    assert not isinstance(caught.value, ServiceAsleepError)
    assert slurm.scripts == []


def test_clients_wait_for_a_wake_whose_sbatch_takes_longer_than_a_missing_service_is_waited_for(asleep, slurm):
    slurm.hold()
    times_as_fast = 20.0

    def fast_clock() -> float:
        return times_as_fast * time.monotonic()

    held_s = 2.5 * ABSENT_GRACE_S / times_as_fast
    all_wait = threading.Barrier(5)

    def ask(_: int) -> str:
        watch = ServiceWatch(asleep.store, SERVICE, may_wake=True)
        all_wait.wait()
        run_blocking(wait_for_replica(watch, WaitPolicy(40 * ABSENT_GRACE_S, clock=fast_clock), InThread()))
        return watch.status.ready[0].name

    def go_on() -> None:
        all_wait.wait()
        wait_for(lambda: "sbatch" in slurm.asked, 60, what="a submission")
        time.sleep(held_s)
        slurm.hold(False)

    when_submitted(slurm, 1, lambda: asleep.start(job_id="101_0"))
    with ThreadPoolExecutor(5) as pool:
        released = pool.submit(go_on)
        found = list(pool.map(ask, range(4)))
        released.result()
    assert found == ["101_0"] * 4
    assert slurm.asked["sbatch"] == 1
