"""Unknown is not over: files that cannot be read take nothing from a client whose replicas answer."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from hpc_serve.client import connect
from hpc_serve.client.connections import answer_wait
from hpc_serve.client.discovery import discovery, lost_replicas, reading
from hpc_serve.client.replicas import pool
from hpc_serve.errors import ServiceNotFoundError, StoreError, WaitTimeoutError
from tests.support.patience import connect_to_all
from tests.unit.client.conftest import MODEL, say


@pytest.fixture
def service(service, monkeypatch):
    monkeypatch.setattr(answer_wait, "ASK_S", 0.05)
    monkeypatch.setattr(lost_replicas, "LOOK_S", 0.05)
    monkeypatch.setattr(lost_replicas, "DOUBT_S", 0.05)
    monkeypatch.setattr(discovery, "REFRESH_S", 0.0)
    monkeypatch.setattr(pool, "LOST_FOR_S", 0.0)  # a replica that failed has its turn again at once
    return service


@contextmanager
def moved(path):
    away = path.with_name("away")
    path.rename(away)
    yield
    away.rename(path)


def home_away(service):
    return moved(service.store.home)


@contextmanager
def home_empty(service):
    with home_away(service):
        service.store.home.mkdir(mode=0o700)
        yield
        service.store.home.rmdir()


@contextmanager
def home_open_to_all(service):
    service.store.home.chmod(0o777)
    yield
    service.store.home.chmod(0o700)


@contextmanager
def records_torn(service):
    texts = {record: record.read_text() for record in service.store.service_dir("405b").glob("*.json")}
    for record, text in texts.items():
        record.write_text(text[: len(text) // 2])
    yield
    for record, text in texts.items():
        record.write_text(text)


@contextmanager
def records_foreign(service):
    records = list(service.store.service_dir("405b").glob("*.json"))
    for record in records:
        os.chown(record, 65534, 65534)
    yield
    for record in records:
        os.chown(record, os.geteuid(), os.getegid())


def key_away(service):
    return moved(service.key_file)


def one_record_away(service):
    """As when a launcher has made a missing home anew, and the others have not yet."""
    return moved(service.store.service_dir("405b") / "100-r0-0.json")


WAYS = [home_away, home_empty, home_open_to_all, records_torn, records_foreign, key_away, one_record_away]
ALL_HIDDEN = [home_away, home_empty, records_torn, records_foreign]


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def hidden(request):
    return root_only(request.param)


def root_only(way):
    if way is records_foreign and os.geteuid() != 0:
        pytest.skip("only root can make files of somebody else")
    return way


def test_a_client_goes_on_with_the_replicas_that_answer(service, hidden, asker):
    ports = {service.start().port, service.start().port}
    asking = asker(max_retries=0)
    watch = asking.client._watch
    watch.refresh()
    with hidden(service):
        for _ in range(3):
            assert len(watch.refresh().ready) == 2
        assert {asking.say() for _ in range(20)} == ports
        assert asking.client.model == MODEL
        for replica in (watch.pool.take(), watch.pool.take()):
            watch.mark_suspect(replica)
            watch.pool.give_back(replica)
        assert {asking.say() for _ in range(20)} == ports, "those that failed are asked again, and believed"
    watch.refresh()
    assert not watch.status.problems
    assert {asking.say() for _ in range(20)} == ports


def test_a_replica_that_dies_meanwhile_is_left(service, hidden):
    dead, alive = service.start(), service.start()
    client = connect("405b", max_retries=0)
    client._watch.refresh()
    with hidden(service):
        dead.kill()
        assert {say(client) for _ in range(10)} == {alive.port}
        alive.kill()
        with pytest.raises((ServiceNotFoundError, StoreError)):
            say(client)


@pytest.mark.parametrize("way", ALL_HIDDEN, ids=lambda way: way.__name__)
def test_what_became_true_meanwhile_is_taken_over_afterwards(service, way):
    ended, other = service.start(), service.start()
    client = connect("405b", max_retries=0)
    client._watch.refresh()
    with root_only(way)(service):
        assert len(client._watch.refresh().ready) == 2
    service.publish(ended, state="stopped", counter=2)
    client._watch.refresh()
    assert {say(client) for _ in range(10)} == {other.port}
    with root_only(way)(service):
        client._watch.refresh()
        assert {say(client) for _ in range(10)} == {other.port}, "what was known to be over is not taken up again"
    assert ended.process.poll() is None


@pytest.mark.parametrize("way", [*ALL_HIDDEN, home_open_to_all, key_away], ids=lambda way: way.__name__)
def test_a_new_client_is_told_what_cannot_be_read(service, way):
    service.start()
    says = {
        home_away: "No service '405b' in",
        home_empty: "No service '405b' in",
        home_open_to_all: "can be changed by everybody",
        records_torn: r"Problems:\n.* is not JSON",
        records_foreign: r"Problems:\n.* belongs to user",
        key_away: "no API key yet",
    }[way]
    with root_only(way)(service), pytest.raises((ServiceNotFoundError, StoreError), match=says):
        connect("405b")


@pytest.mark.parametrize("way", [*ALL_HIDDEN, key_away], ids=lambda way: way.__name__)
def test_a_new_client_that_waits_does_so_until_it_can_be_read(service, way):
    engine = service.start()
    done, hidden = threading.Event(), threading.Event()

    def hide():
        with root_only(way)(service):
            hidden.set()
            done.wait(60)

    thread = threading.Thread(target=hide)
    thread.start()
    assert hidden.wait(60)
    seen = threading.Timer(0.5, done.set)
    seen.start()
    assert say(connect("405b", wait=60)) == engine.port
    thread.join()


def test_a_filesystem_that_hangs_does_not_stop_a_client(service, freeze, monkeypatch):
    frozen, other = service.start("--stub-first-s", "600"), service.start(state="starting")
    client = connect_to_all(service, 1, max_retries=2)
    service.publish(other, counter=2)
    client._watch.refresh()
    hangs = threading.Event()
    monkeypatch.setattr(reading, "READ_S", 0.2)
    for name in ("read_all", "files", "read"):
        monkeypatch.setattr(client._watch._reader._live, name, lambda *_: hangs.wait(120))
    for name in ("read", "read_api_key"):
        monkeypatch.setattr(service.store, name, lambda *_: hangs.wait(120))
        monkeypatch.setattr(client._watch.store, name, lambda *_: hangs.wait(120))
    freeze(frozen)
    with ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(say, client) for _ in range(6)]
        assert {each.result(60) for each in asked} == {other.port}
    assert "has not answered for" in client._watch.refresh().problems[0]
    hangs.set()


def test_a_wait_does_not_hide_what_only_a_person_can_mend(service):
    service.start()
    with home_open_to_all(service), pytest.raises(StoreError, match="can be changed by everybody"):
        connect("405b", wait=3600)


def test_a_wait_ends_with_what_cannot_be_read(service):
    service.start()
    with key_away(service), pytest.raises((StoreError, WaitTimeoutError), match="no API key yet"):
        connect("405b", wait=0.3)
