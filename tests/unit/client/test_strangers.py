"""A stranger answers at an address of ours: none of the ways in gives it a byte of the key or of a prompt.

The strangers are real listeners: in the clear, with a certificate of their own, with one of the same authority, or
passing everything on to a living replica.
"""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import openai
import pytest

from hpc_serve.cli.main import run
from hpc_serve.client import connect, connect_async
from hpc_serve.client.connections.connections import LoopConnections, LoopPool, ThreadConnections
from hpc_serve.client.connections.message import Message
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.replicas.event_loops import run_blocking
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.probe import probe
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.requests import exchange
from hpc_serve.errors import HpcServeError
from hpc_serve.trust.connection import Identity
from tests.support.patience import connect_to_all
from tests.support.relay import Relay
from tests.support.stubs import StubService
from tests.support.tls_servers import RecordingServer, server_context
from tests.unit.client.conftest import one_engine

PROMPT = "the-secret-prompt"


def ask(client, **options):
    return client.chat.completions.create(model="405b", messages=[{"role": "user", "content": PROMPT}], **options)


async def ask_async():
    client = await connect_async("405b", max_retries=0)
    await ask(client)


WAYS_IN = {
    "sync": lambda: ask(connect("405b", max_retries=0)),
    "async": lambda: asyncio.run(ask_async()),
    "chat": lambda: run(["chat", "405b", PROMPT]),
    "status": lambda: run(["status", "405b"]),
    "env": lambda: run(["env", "405b"]),
}


def stranger_of(kind, service, port=0):
    """A listener of somebody else's, of one kind; `port` 0 is any."""
    if kind == "in the clear":
        return RecordingServer(port=port)
    other = StubService(service.store.home.with_name("stranger")) if kind == "own certificate" else service
    shown = other.certificate()
    return RecordingServer(server_context(shown.certificate_file, shown.key_file), port=port)


def check_heard_nothing(stranger, service):
    assert stranger.connections, "nobody came by: nothing was shown"
    for secret in (service.store.read_api_key("405b"), PROMPT, "Authorization", "authorization"):
        assert secret.encode() not in stranger.received
    stranger.close()


STRANGERS = ["in the clear", "own certificate", "certificate of the same authority"]


@pytest.mark.parametrize("way_in", sorted(WAYS_IN))
@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_at_the_recorded_address_gets_nothing(service, kind, way_in):
    engine = service.start()
    stranger = stranger_of(kind, service)
    service.publish(engine, port=stranger.port)
    with suppress(HpcServeError, openai.APIConnectionError):
        WAYS_IN[way_in]()
    check_heard_nothing(stranger, service)


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_that_takes_the_port_under_load_gets_nothing(service, monkeypatch, kind):
    monkeypatch.setattr(exchange, "LOST_WAIT_S", 0.2)
    engine, client = one_engine(service)
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(ask, [client] * 12))
        engine.kill()
        stranger = stranger_of(kind, service, port=engine.port)
        ends = [threads.submit(ask, client).exception for _ in range(18)]
        assert all(isinstance(end(), (HpcServeError, openai.APIConnectionError)) for end in ends)
    check_heard_nothing(stranger, service)


@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.anyio
async def test_a_stranger_that_takes_the_port_under_async_load_gets_nothing(service, monkeypatch, kind):
    monkeypatch.setattr(exchange, "LOST_WAIT_S", 0.2)
    monkeypatch.setattr(LoopPool, "trusts_idle_s", 0.0)  # so that requests go to the stranger, and not probes alone
    engine = service.start()
    client = await connect_async("405b", max_retries=0)
    await asyncio.gather(*(ask(client) for _ in range(12)))
    engine.kill()
    stranger = stranger_of(kind, service, port=engine.port)
    for _ in range(3):
        ends = await asyncio.gather(*(ask(client) for _ in range(6)), return_exceptions=True)
        assert all(isinstance(end, (HpcServeError, openai.APIConnectionError)) for end in ends)
    check_heard_nothing(stranger, service)


def test_the_next_replica_gets_the_request_that_a_stranger_did_not(service):
    gone, living = service.start(), service.start()
    client = connect_to_all(service, 2, max_retries=0)
    gone.kill()
    stranger = stranger_of("in the clear", service, port=gone.port)
    for _ in range(200):  # chance decides between two idle replicas
        assert ask(client).choices[0].message.content.startswith(f"stub-{living.port}")
        if stranger.connections:
            break
    check_heard_nothing(stranger, service)


def test_a_replica_that_comes_back_on_another_port_is_believed_again(service):
    engine = service.start()
    client = connect("405b", max_retries=0, wait=120)
    assert ask(client).choices
    engine.kill()
    stranger = stranger_of("own certificate", service, port=engine.port)
    service.start(job_id="100", restart=1)
    assert ask(client).choices[0].message.content.startswith(f"stub-{service.engines[1].port}")
    check_heard_nothing(stranger, service)


# Relays


def test_a_relay_to_another_replica_is_refused(service):
    dead, living = service.start(), service.start()
    dead.kill()
    relay = Relay(living.port)
    record = service.publish(dead, port=relay.port)
    key = service.store.read_api_key("405b")
    assert probe("127.0.0.1", relay.port, Identity.of(record, key)).status == "not ours"
    relay.close()
    assert key.encode() not in relay.heard


def test_a_relay_to_the_engine_carries_what_it_cannot_read(service):
    """As a tunnel does."""
    engine = service.start()
    relay = Relay(engine.port)
    service.publish(engine, port=relay.port)
    assert ask(connect("405b", max_retries=0)).choices
    relay.close()
    assert relay.heard
    for secret in (service.store.read_api_key("405b"), PROMPT):
        assert secret.encode() not in relay.heard


# Connections are kept apart


def address_of(engine, **changes):
    identity = Identity(**{"certificate": engine.certificate, "api_key": "k", **changes})
    return ReplicaAddress(name="100-r0-0.json", host="127.0.0.1", port=engine.port, identity=identity)


@pytest.fixture(params=[ThreadConnections, LoopConnections])
def ask_at(request, service):
    """A way to ask the engine at an address for its health, over connections that are kept."""
    connections = request.param(ServiceWatch(service.store, "405b").lost)
    loop = asyncio.new_event_loop()
    run_it = run_blocking if request.param is ThreadConnections else loop.run_until_complete

    async def ask(address, connect_s):
        extensions = {"timeout": {"connect": connect_s, "read": 60.0, "write": 60.0, "pool": 60.0}}
        asked = Message(method="GET", target=b"/health", headers=[], content=b"", extensions=extensions)
        response = await connections.send(asked, address, connect_s)
        await response.read_all()
        return response.status_code

    yield lambda address, *, connect_s=60.0: run_it(ask(address, connect_s))
    run_it(connections.close_all())
    loop.close()


def test_a_connection_is_not_used_for_another_identity(service, ask_at):
    """The same address, another certificate: what was verified for one record is not used for the other."""
    engine = service.start()
    assert ask_at(address_of(engine)) == 200
    with pytest.raises(http.ConnectError, match="does not show the certificate of the record"):
        ask_at(address_of(engine, certificate=service.certificate().certificate))
    assert ask_at(address_of(engine)) == 200


def test_a_listener_that_says_nothing_is_a_failed_connection(service, ask_at):
    """It takes the connection, and then nothing more: a request is not held for longer than a connection may take."""
    engine = service.start()
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(http.ConnectTimeout):
        ask_at(replace(address_of(engine), port=silent.getsockname()[1]), connect_s=0.2)


def test_a_certificate_that_cannot_be_read_is_a_failed_connection(service):
    engine = service.start()
    service.publish(engine, certificate="-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(HpcServeError, match="certificate cannot be read"):
        connect("405b")
