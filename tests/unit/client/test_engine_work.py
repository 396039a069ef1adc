"""What engines do, by two looks at their metrics."""

from __future__ import annotations

import threading

import pytest

from hpc_serve.client import connect, engine_work
from hpc_serve.client.engine_work import ReplicaWork, WorkWatch, look_for
from hpc_serve.client.replicas.status import ProbeResult, ReplicaStatus, assess_replica, assess_submitted
from hpc_serve.vllm.metrics import EngineWork
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.stubs import StubEngine, StubService, make_submitted
from tests.support.tls_servers import RecordingServer


def status_of(service: StubService, place: int = 0) -> ReplicaStatus:
    record = service.store.read(service.service).records[place]
    return assess_replica(record, probe=ProbeResult(status="ready", host="127.0.0.1"))


def complete(service: StubService, words: int) -> None:
    with connect(service.service, home=service.store.home) as client:
        client.completions.create(model=client.model, prompt="a", max_tokens=words)


@pytest.fixture
def ticks():
    """A clock that goes two seconds on with each look."""
    times = iter(range(0, 1000, 2))
    return lambda: float(next(times))


def watch_of(service: StubService, ticks=None) -> WorkWatch:
    clock = {} if ticks is None else {"clock": ticks}
    return WorkWatch(service.store.read_api_key, timeout_s=PATIENCE_S, **clock)


def test_the_rate_is_the_difference_of_two_looks(service, ticks):
    service.start("--stub-words", "6")
    watch = watch_of(service, ticks)
    (first,) = watch.look([status_of(service)])
    assert (first.now.running, first.now.waiting, first.now.requests) == (0, 0, 0)
    assert (first.over_s, first.generation_tokens_per_s) == (None, None)
    complete(service, 6)
    (second,) = watch.look([status_of(service)])
    assert second.now.generation_tokens - first.now.generation_tokens == 6
    assert (second.over_s, second.generation_tokens_per_s) == (2.0, 3.0)
    assert second.prompt_tokens_per_s is None  # the stub engine does not count them


def test_an_engine_that_was_started_again_has_no_rate_yet(service, ticks):
    service.start("--stub-words", "6")
    watch, before = watch_of(service, ticks), status_of(service)
    complete(service, 6)
    watch.look([before])
    engine = StubEngine(key_file=service.key_file, certificate=service.certificate())
    service.engines.append(engine)
    service.publish(engine, job_id="100")
    (after,) = watch.look([status_of(service)])
    assert (after.now.generation_tokens, after.over_s) == (0.0, None)


def test_replicas_come_and_go_between_looks(service, ticks):
    service.start()
    watch = watch_of(service, ticks)
    assert [work.over_s for work in watch.look([status_of(service)])] == [None]
    service.start()
    one, two = watch.look([status_of(service, 0), status_of(service, 1)])
    assert (one.over_s is None, two.over_s) == (False, None)
    (two,) = watch.look([status_of(service, 1)])
    assert two.over_s is not None
    (one,) = watch.look([status_of(service, 0)])
    assert one.over_s is None  # it was not there at the last look


def test_what_is_under_way_is_looked_at_twice(service, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_work, "LOOK_S", 0.01)
    hold = tmp_path / "hold"
    hold.touch()
    service.start("--stub-hang-file", str(hold))
    asking = threading.Thread(target=complete, args=(service, 4))
    asking.start()
    watch = watch_of(service)
    wait_until(lambda: watch.look([status_of(service)])[0].now.running)
    (work,) = look_for([status_of(service)], service.store.read_api_key)
    assert (work.now.running, work.now.waiting) == (1, 0)
    assert work.over_s is not None
    assert work.generation_tokens_per_s == 0.0
    hold.unlink()
    asking.join(PATIENCE_S)
    wait_until(
        lambda: not watch.look([status_of(service)])[0].now.requests
    )  # an engine counts its end after the answer
    (idle,) = look_for([status_of(service)], service.store.read_api_key)
    assert (idle.now.requests, idle.over_s) == (0, None)


def test_who_is_not_ready_is_not_asked_and_a_stranger_gets_no_key(service):
    pending = assess_submitted(make_submitted(service=service.service, job_id="9"))
    engine = service.start()
    found = status_of(service)
    engine.kill()
    stranger = RecordingServer(port=engine.port)
    not_asked, refused = watch_of(service).look([pending, found])
    assert not_asked == ReplicaWork(problem="it is pending")
    assert refused.now == EngineWork()
    assert "/metrics did not answer" in refused.problem
    assert service.store.read_api_key(service.service).encode() not in stranger.received
    stranger.close()


def test_without_a_key_nothing_is_asked(service):
    service.start()
    service.key_file.unlink()
    (work,) = watch_of(service).look([status_of(service)])
    assert "has no API key" in work.problem


def test_what_answers_without_figures_says_so(service):
    service.start()
    other = WorkWatch(lambda name: "x" * 40, timeout_s=PATIENCE_S)
    (work,) = other.look([status_of(service)])
    assert work.problem == "its engine answers /metrics with 401"
