"""The control connection between launchers: only holders of the token connect, and its end is noticed."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import pytest

from hpc_serve.job.links import control
from hpc_serve.job.links.control import ControlServer
from hpc_serve.job.links.link import LinkLostError, greeting
from hpc_serve.job.machine.network import PortsInUseError, choose_port, listen_on
from hpc_serve.job.progress import ReadSoFar
from tests.unit.job.conftest import in_a_loop
from tests.unit.job.control_links import connected, join, listening


@in_a_loop
async def test_messages_go_both_ways_and_name_the_node():
    async with connected() as (head, node):
        assert (head.rank, head.name, head.address, head.cache) == (1, "n2", "10.0.0.2", "")
        await head.send("go")
        await node.send("failed", part="ray worker", exit_code=9)
        assert (await node.receive())["kind"] == "go"
        assert await head.receive() == {"kind": "failed", "part": "ray worker", "exit_code": 9}


@in_a_loop
async def test_a_heartbeat_carries_what_was_read_and_is_not_a_message():
    read = ReadSoFar(by_read=4000, mapped=96)
    async with connected() as (head, node):
        heartbeats = asyncio.create_task(node.send_heartbeats(lambda: read))
        heard = asyncio.create_task(head.receive())
        while head.read == ReadSoFar():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not heard.done()
        heartbeats.cancel()
        heard.cancel()
        assert head.read == read


@in_a_loop
async def test_the_end_of_a_launcher_is_noticed():
    async with connected() as (head, node):
        await node.close()
        with pytest.raises(LinkLostError, match="launcher on node n2 ended"):
            await head.receive()


@in_a_loop
async def test_a_silent_node_is_lost_and_so_is_a_silent_head():
    async with connected(silence_s=0.05) as ends:
        heard = await asyncio.gather(*(end.receive() for end in ends), return_exceptions=True)
    assert [type(error) for error in heard] == [LinkLostError] * 2
    assert [str(error) for error in heard] == [f"node {name} has sent nothing for 0.05 s" for name in ("n2", "n1")]


@in_a_loop
async def test_a_job_that_was_suspended_as_a_whole_goes_on():
    async with connected(silence_s=0.2) as (head, node):
        heard = [asyncio.create_task(end.receive()) for end in (head, node)]
        await asyncio.wait(heard, timeout=0.01)
        time.sleep(0.3)  # noqa: ASYNC251  # both ends stand still, longer than either may be silent
        await asyncio.wait(heard, timeout=0.01)
        await head.send("go")
        await node.send("failed")
        assert [message["kind"] for message in await asyncio.gather(*heard)] == ["failed", "go"]


@in_a_loop
async def test_heartbeats_go_on_while_the_kernel_does_not_say_what_was_read():
    async with connected(silence_s=0.2) as (_, node):
        answer, told, sent = threading.Event(), asyncio.Event(), []

        async def send(kind, **fields):
            sent.append(fields["read"])
            if len(sent) == 3:
                answer.set()
            if any(fields["read"]):
                told.set()

        node.send = send
        look = lambda: ReadSoFar(from_disk=4096 if answer.wait(60) else 0)  # noqa: E731
        heartbeats = asyncio.create_task(node.send_heartbeats(look))
        await asyncio.wait_for(told.wait(), 60)
        heartbeats.cancel()
    assert sent[:3] == [(0, 0, 0)] * 3
    assert sent[-1] == (0, 4096, 0)


@pytest.fixture
def late_after_a_try(monkeypatch):
    """The deadline of `connect` is over once one try has ended, however long that takes, and not before."""
    usual, ended = control._try_to_connect, []

    async def try_to_connect(*args):
        try:
            return await usual(*args)
        finally:
            ended.append(1)

    monkeypatch.setattr(control, "_try_to_connect", try_to_connect)
    monkeypatch.setattr(control, "time", SimpleNamespace(monotonic=lambda: 1e6 if ended else 0.0))


@in_a_loop
async def test_without_the_token_nobody_connects(late_after_a_try):
    async with listening() as head:
        with pytest.raises(PortsInUseError, match="A program other than"):
            await join(head.port, "wrong")


@in_a_loop
async def test_the_token_itself_never_travels():
    told = []

    async def impostor(reader, writer):
        writer.write(json.dumps({"hpc_serve": 1, "nonce": "n"}).encode() + b"\n")
        told.append(await reader.readline())
        writer.write(json.dumps({"proof": "guessed", "name": "x"}).encode() + b"\n")

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(PortsInUseError):
        await asyncio.wait_for(join(port, "s3cret", 3600), 60)  # long before its deadline
    server.close()
    assert b"s3cret" not in told[0]


def test_a_head_that_never_listens_ends_the_wait_with_advice():
    port = choose_port()
    listener = listen_on(port)
    listener.close()
    with pytest.raises(LinkLostError, match="HPC_SERVE_INTERFACE"):
        asyncio.run(join(port, "t", 0.3))


@pytest.mark.parametrize("cut_after", ["accept", "greeting", "hello"])
@in_a_loop
async def test_a_handshake_that_is_cut_off_is_tried_again(monkeypatch, cut_after):
    usual, tries = ControlServer._handshake, []

    async def handshake(server, reader, writer, nonce):
        tries.append(writer)
        if len(tries) > 5:
            return await usual(server, reader, writer, nonce)
        if cut_after != "accept":
            writer.write(greeting("secret", "head", nonce, nonce="n"))
        if cut_after == "hello":
            await reader.readline()
        await writer.drain()
        writer.close() if len(tries) % 2 else writer.transport.abort()
        raise EOFError

    monkeypatch.setattr(ControlServer, "_handshake", handshake)

    async with connected() as (head, _):
        assert (head.name, len(tries)) == ("n2", 6)


@in_a_loop
async def test_what_cuts_off_every_handshake_until_the_deadline_is_another_program(late_after_a_try):
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(PortsInUseError):
        await join(port, "t", 60)
    server.close()


@in_a_loop
async def test_once_closed_it_takes_nobody_and_keeps_who_is_in():
    async with listening() as head:
        node = await join(head.port)
        link = await head.link()
        head.server.close()
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", head.port)
        await link.send("go")
        assert (await node.receive())["kind"] == "go"
        await node.close()
