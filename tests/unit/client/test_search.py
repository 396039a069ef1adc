"""connect() among replicas that do not answer: the first one that does is enough. Real sockets and processes."""

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpc_serve.client import connect, endpoint
from hpc_serve.client.discovery import discovery
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.discovery.reading import Search
from hpc_serve.client.replicas.status import ProbeResult
from hpc_serve.errors import ServiceNotFoundError
from tests.support.listener import Listener
from tests.support.patience import wait_until
from tests.support.stubs import make_record
from tests.unit.client.conftest import MODEL, say


class Silent(Listener):
    """Takes connections and says nothing, as a node whose engine is stuck."""

    def __init__(self):
        self.held = []
        super().__init__()

    def handle(self, connection: socket.socket) -> None:
        self.held.append(connection)


@pytest.fixture
def silent():
    listener = Silent()
    yield listener
    listener.close()
    for connection in listener.held:
        connection.close()


def test_one_that_does_not_answer_is_not_waited_for(service, silent, monkeypatch, asker):
    monkeypatch.setattr(discovery, "PROBE_S", 3600.0)
    engine = service.start()
    record = service.publish(engine)
    service.store.write(make_record(job_id="7", port=silent.port, certificate=record.certificate))
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(lambda: asker(max_retries=0).say()).result(60) == engine.port
        assert threads.submit(lambda: connect().service).result(60) == "405b", "nor without a name"
        assert threads.submit(endpoint, "405b").result(60).base_url == f"https://127.0.0.1:{engine.port}/v1"
    assert silent.held


def test_one_that_answers_later_is_used_from_then_on(service):
    first, second = service.start(), service.start()
    os.kill(second.process.pid, signal.SIGSTOP)
    client = connect("405b", max_retries=0)
    assert {say(client) for _ in range(5)} == {first.port}
    assert client.model == MODEL
    os.kill(second.process.pid, signal.SIGCONT)
    wait_until(lambda: say(client) == second.port)


def test_live_replicas_are_found_among_many_that_are_not(service):
    engines = [service.start() for _ in range(3)]
    for number in range(60):
        service.store.write(make_record(job_id=str(1000 + number), port=1, certificate=engines[0].certificate))
    for number in range(200):
        service.store.write(make_record(job_id=str(2000 + number), state="stopped"))
    client = connect("405b", max_retries=0)
    wait_until(lambda: len(client._watch.pool) == 3)
    ports = {engine.port for engine in engines}
    found = set()
    wait_until(lambda: found.add(say(client)) or found == ports)
    for engine in engines:
        engine.kill()
    with pytest.raises(ServiceNotFoundError, match="unresponsive"):
        say(client)


def test_those_that_do_not_renew_their_records_are_asked_after_those_that_do():
    """Also where their files are newer, as those of a home that was copied."""
    renewed = [make_record(job_id=str(number), updated_at=time.time()) for number in range(30)]
    stale = [make_record(job_id=str(500 + number), updated_at=float(number)) for number in range(200)]
    written = {record.name: record for record in (*stale, *renewed)}
    asked = []

    def ask(record):
        asked.append(record.job_id)
        is_ready = record is answering
        return ProbeResult(status="ready" if is_ready else "no answer")

    def search():
        asked.clear()
        found = Search(read=lambda files: [written[name] for name, _ in files], ask=ask)
        found.run([(name, (0, 0, 0)) for name in written])
        return found.is_ready

    answering = renewed[-1]
    assert search()
    assert {int(job_id) for job_id in asked} <= set(range(30))
    answering = stale[10]
    assert search()
    assert {int(job_id) for job_id in asked[:30]} == set(range(30))
    assert "699" in asked[30:]  # the one that was renewed last


@pytest.mark.parametrize("look", [ServiceWatch.find_one, lambda watch: watch.refresh().ready], ids=["find", "refresh"])
def test_threads_that_look_at_once_share_one_look(service, monkeypatch, look):
    service.start()
    asked, reads, read = set(), [], service.store.read_api_key

    def clock():  # the first thing that a look asks for
        asked.add(threading.get_ident())
        return time.monotonic()

    def slow_read(name):
        reads.append(name)
        wait_until(lambda: len(asked) >= 16)
        return read(name)

    monkeypatch.setattr(service.store, "read_api_key", slow_read)
    watch = ServiceWatch(service.store, "405b", clock=clock)
    together = threading.Barrier(16)

    def find(_):
        together.wait()
        return look(watch)

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(find, range(16)))
    assert 0 < len(reads) < 8
