"""What a client says of its replicas: which it knows, and which one answered."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hpc_serve.client import Replica, connect, connect_async
from hpc_serve.errors import ServiceFailedError, ServiceNotFoundError
from tests.support.stubs import make_record, make_submitted
from tests.unit.client.conftest import HELLO, port_of


def name_of(service, answer):
    """The name of the replica whose engine answered."""
    return f"{100 + [engine.port for engine in service.engines].index(port_of(answer))}-r0-0"


def test_the_replicas_are_those_that_are_known(service):
    first, second = service.start(started_at=1000.0), service.start(started_at=2000.0)
    service.store.write(make_record(job_id="7", state="starting", stage="loading weights", started_at=3000.0))
    service.store.write_submitted(make_submitted(job_id="8"))
    client = connect("405b", max_retries=0)
    client._watch.refresh()
    ready = (
        Replica(name="100-r0-0", state="ready", address=f"127.0.0.1:{first.port}"),
        Replica(name="101-r0-0", state="ready", address=f"127.0.0.1:{second.port}"),
    )
    assert client.replicas[:2] == ready
    starting, pending = client.replicas[2:]
    assert (starting.name, starting.state, starting.reason) == ("7-r0-0", "starting", "loading weights")
    assert (pending.name, pending.state, pending.address) == ("8", "pending", "")
    suspect = client._watch.pool.take()
    client._watch.mark_suspect(suspect)
    assert [replica.state for replica in client.replicas if f"{replica.name}.json" == suspect.name] == ["unknown"]
    client._watch.pool.give_back(suspect)
    service.publish(first, state="failed", reason="engine exited with -9", counter=2)
    client._watch.refresh()
    assert [replica.name for replica in client.replicas if replica.state == "ready"] == ["101-r0-0"]


@pytest.mark.parametrize("began", [7, None], ids=["the number is another's now", "it ended before it was looked at"])
def test_a_local_job_that_died_before_its_first_record_is_not_waited_for(service, began):
    job = make_submitted(job_id="local-1", cluster="local", host=socket.gethostname(), pid=1, pid_start_time=began)
    service.store.write_submitted(job)
    for wait in (None, 0.1):
        with pytest.raises((ServiceNotFoundError, ServiceFailedError), match="failed: its process has ended"):
            connect("405b", wait=wait)
    service.store.write_submitted(replace(job, host="another"))
    with pytest.raises(ServiceNotFoundError, match="pending"):
        connect("405b")


def test_a_local_job_that_was_killed_with_its_launcher_has_failed(service):
    engine = service.start(job_id="local-1", cluster="local")
    job = make_submitted(job_id="local-1", cluster="local", host=socket.gethostname(), pid=1, pid_start_time=7)
    service.store.write_submitted(job)
    assert connect("405b").replicas[0].state == "ready", "its engine answers"
    engine.kill()
    with pytest.raises(ServiceNotFoundError, match="failed: its process has ended"):
        connect("405b")


def test_the_last_replica_is_the_one_that_answered_in_this_thread(service):
    service.start()
    service.start()
    client = connect("405b")
    assert client.last_replica is None
    together = threading.Barrier(8)

    def is_told(_):
        together.wait(60)
        answer = client.chat.completions.create(model=client.model, messages=HELLO)
        return client.last_replica == name_of(service, answer)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(is_told, range(80)))
    assert client._watch.pool._under_way == {}
    assert client.last_replica in ("100-r0-0", "101-r0-0"), "it answered in another thread"
    stream = client.chat.completions.create(model=client.model, messages=HELLO, stream=True)
    first = client.last_replica
    assert {chunk.choices[0].delta.content for chunk in stream if chunk.choices} > {" word"}
    assert client.last_replica == first


@pytest.mark.anyio
async def test_the_last_replica_is_the_one_that_answered_in_this_task(service):
    service.start()
    service.start()

    async def ask(client):
        answer = await client.chat.completions.create(model=client.model, messages=HELLO)
        await asyncio.sleep(0)
        return client.last_replica == name_of(service, answer)

    client = await connect_async("405b")
    assert all(await asyncio.gather(*(ask(client) for _ in range(40))))


def test_clients_do_not_take_each_others_answers(service):
    service.start()
    one, other = connect("405b"), connect("405b")
    one.chat.completions.create(model="405b", messages=HELLO)
    assert (one.last_replica, other.last_replica) == ("100-r0-0", None)
    assert one.with_options(timeout=5).last_replica == "100-r0-0"
