"""`hpc-serve gateway --workers`: one address of several processes, whatever becomes of one of them; their counts."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from hpc_serve.client.replicas.sdk import http
from tests.cluster import wait_for
from tests.support.children import children_of
from tests.unit.gateway.conftest import ANSWER
from tests.unit.gateway.test_command import ask, socket_of

pytest.importorskip("prometheus_client", reason="the gateway needs prometheus_client")
from hpc_serve.gateway.metrics import Metrics

# More than the channel of a worker holds.
MANY = 600
FORKS = """
import os
fork, may = os.fork, {may}
def fork_if_it_may():
    if not may.pop(0):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = fork_if_it_may
"""


def workers_of(one) -> set[int]:
    return set(children_of(one.process.pid))


def answered(path) -> float:
    """The answers to completions that the gateway has counted."""
    with closing(http.Client(transport=http.HTTPTransport(uds=str(path)))) as client:
        text = client.get("http://localhost/metrics").text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if 'completions",service' in line)


def test_workers_answer_at_one_address_and_tell_one_count(service, engine, program):
    one = program("--workers", "3").started()
    path = socket_of(service)
    assert len(workers_of(one)) == 3
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(ask, [path] * 24)) == {ANSWER}
    wait_for(lambda: answered(path) == 24, 30, what="the counts of all workers")
    assert one.ended_by(signal.SIGINT) == 0
    assert not path.exists()
    assert one.said.count("Ctrl-C ends it") == 1
    assert "Traceback" not in one.said


def test_a_worker_that_ends_is_started_again_and_nothing_outlives_the_gateway(
    service, engine, program, tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "counts"))
    (tmp_path / "counts").mkdir()
    one = program("--workers", "2").started()
    killed = min(workers_of(one))
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: len(workers_of(one) - {killed}) == 2, 30, what="another worker")
    assert ask(socket_of(service)) == ANSWER
    workers = workers_of(one)
    one.process.kill()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 30, what="the end of the workers")
    assert list((tmp_path / "counts").iterdir()) == []


def connected(path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    # Linux: how long connect() may wait for room in the backlog. With settimeout() it would not wait at all.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 60, 0))
    connection.connect(str(path))
    return connection


def test_a_worker_that_takes_nothing_is_passed_over_and_killed_at_the_end(service, engine, program):
    first = "from hpc_serve.gateway import workers; workers._END_S = 0.5"
    one = program("--workers", "2", "--grace", "1h", first=first).started()
    stopped = min(workers_of(one))
    os.kill(stopped, signal.SIGSTOP)
    with ExitStack() as stack:
        for _ in range(MANY):
            stack.enter_context(connected(socket_of(service)))
        assert ask(socket_of(service)) == ANSWER
        one.process.send_signal(signal.SIGTERM)
        wait_for(lambda: len(workers_of(one)) == 1, 30, what="the end of the other worker")
        assert one.ended_by(signal.SIGTERM) == 0  # the second time: no more grace
    assert "does not end, and is killed" in one.said


def test_while_a_worker_is_not_yet_started_again_the_others_answer(service, engine, program):
    one = program("--workers", "2", first="from hpc_serve.gateway import workers; workers._AGAIN_S = 3600").started()
    os.kill(min(workers_of(one)), signal.SIGKILL)
    wait_for(lambda: "is started again" in one.said, 30, what="the end of the worker")
    assert [ask(socket_of(service)) for _ in range(4)] == [ANSWER] * 4


def test_a_worker_is_started_again_once_the_system_lets_it(service, engine, program):
    one = program("--workers", "2", first=FORKS.format(may=[1, 1, 0, 0, 1])).started()
    os.kill(min(workers_of(one)), signal.SIGKILL)
    wait_for(lambda: one.said.count("is not started again yet: Resource") == 2, 30, what="two attempts")
    wait_for(lambda: len(workers_of(one)) == 2, 30, what="another worker")
    assert ask(socket_of(service)) == ANSWER


@pytest.mark.parametrize(
    "first", [FORKS.format(may=[1, 0]), "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"]
)
def test_more_workers_than_the_system_lets_start_are_refused(service, program, first):
    one = program("--workers", "50", first=first)
    assert one.ended() == 1
    assert "50 workers cannot be started: " in one.said
    assert "Give fewer --workers." in one.said
    assert "Traceback" not in one.said


def test_once_the_first_process_is_killed_another_gateway_may_begin(service, engine, program):
    """A worker of the killed one has a request to finish."""
    one = program("--workers", "2").started()
    workers = workers_of(one)
    with connected(socket_of(service)) as begun:
        begun.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        assert ask(socket_of(service)) == ANSWER
        one.process.kill()
        one.process.wait()
        program("--workers", "2").started()
        assert any(Path(f"/proc/{pid}").exists() for pid in workers)
        assert ask(socket_of(service)) == ANSWER


def test_it_may_open_as_many_files_as_the_system_allows(service, engine, program):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))"
    one = program("--workers", "1", first=first).started()
    (line,) = (
        line
        for line in Path(f"/proc/{one.process.pid}/limits").read_text().splitlines()
        if line.startswith("Max open files")
    )
    assert int(line.split()[3]) == min(hard, 65_536)


# -- counts


def test_a_worker_goes_on_counting_where_the_one_before_it_ended(tmp_path):
    for _ in range(2):
        metrics = Metrics(tmp_path / "0.prom")
        metrics.under_way = lambda: {"405b": (5, 0)}
        metrics.count("405b", "/v1/completions", 200)
        metrics.of("405b").wait_seconds.observe(0.3)
        metrics.save()
    told = Metrics(tmp_path / "1.prom").text().decode()
    assert 'requests_total{route="/v1/completions",service="405b",status="200"} 2.0' in told
    assert 'wait_seconds_count{service="405b"} 2.0' in told
    assert 'in_flight{service="405b"} 5.0' in told


def test_counts_that_cannot_be_written_are_told_all_the_same(tmp_path, caplog):
    metrics = Metrics(tmp_path / "gone" / "0.prom")
    metrics.count("405b", "/v1/completions", 200)
    with caplog.at_level(logging.WARNING):
        metrics.save()
        metrics.save()
    assert 'status="200"} 1.0' in metrics.text().decode()
    assert len(caplog.messages) == 1
    assert "0.prom cannot be written: No such file or directory." in caplog.messages[0]
