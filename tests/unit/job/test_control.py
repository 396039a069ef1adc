"""The control connection between launchers: only holders of the token connect, and its end is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
import time
from types import SimpleNamespace

import pytest

from hpc_serve.job.links import control
from hpc_serve.job.links.control import ControlServer, connect
from hpc_serve.job.links.link import Link, LinkLostError, greeting, make_ticket, proof
from hpc_serve.job.machine.network import PortsInUseError, choose_port, listen_on
from hpc_serve.job.progress import ReadSoFar
from hpc_serve.job.run.node import LaunchOptions
from tests.support.nodes import make_node, make_worker


class Head:
    """A head's end that listens. `errors` are what the event loop was told of."""

    def __init__(self, token: str, silence_s: float) -> None:
        self.links, self.errors = asyncio.Queue[Link](), list[dict]()
        listener = listen_on()
        self.port = listener.getsockname()[1]
        options = LaunchOptions(service="8b", backend="ray", gpus_per_node=1, silence_s=silence_s)
        node = make_node(token=token, options=options)
        self.server = ControlServer(node, listener, self.links.put_nowait)

    async def link(self) -> Link:
        """The next link of a node that has come in."""
        return await asyncio.wait_for(self.links.get(), 60)

    def has_nobody(self) -> bool:
        return self.links.empty() and not self.errors and not self.server._handshakes


@contextlib.asynccontextmanager
async def listening(token: str = "secret", silence_s: float = 60.0):
    head = Head(token, silence_s)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: head.errors.append(context))
    try:
        yield head
    finally:
        head.server.close()


async def join(port: int, token: str = "secret", deadline_s: float = 60) -> Link:
    """The link of node n2."""
    options = LaunchOptions(service="8b", backend="ray", gpus_per_node=1, join_s=deadline_s)
    return await connect(make_worker(token=token, options=options), port)


@contextlib.asynccontextmanager
async def connected(**options):
    """The head's link and the node's, over a real connection."""
    async with listening(**options) as head:
        node = await join(head.port)
        yield await head.link(), node


async def test_messages_go_both_ways_and_name_the_node():
    async with connected() as (head, node):
        assert (head.rank, head.name, head.address, head.cache) == (1, "n2", "127.0.0.1", "")
        await head.send("go")
        await node.send("failed", part="ray worker", exit_code=9)
        assert (await node.receive())["kind"] == "go"
        assert await head.receive() == {"kind": "failed", "part": "ray worker", "exit_code": 9}


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


async def test_a_silent_node_is_lost_and_so_is_a_silent_head():
    async with connected(silence_s=0.05) as ends:
        heard = await asyncio.gather(*(end.receive() for end in ends), return_exceptions=True)
    assert [type(error) for error in heard] == [LinkLostError] * 2
    assert [str(error) for error in heard] == [f"node {name} has sent nothing for 0.05 s" for name in ("n2", "n1")]


async def test_a_job_that_was_suspended_as_a_whole_goes_on():
    async with connected(silence_s=0.2) as (head, node):
        heard = [asyncio.create_task(end.receive()) for end in (head, node)]
        await asyncio.wait(heard, timeout=0.01)
        time.sleep(0.3)  # noqa: ASYNC251  # both ends stand still, longer than either may be silent
        await asyncio.wait(heard, timeout=0.01)
        await head.send("go")
        await node.send("failed")
        assert [message["kind"] for message in await asyncio.gather(*heard)] == ["failed", "go"]


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


async def test_without_the_token_nobody_connects(late_after_a_try):
    async with listening() as head:
        with pytest.raises(PortsInUseError, match="A program other than"):
            await join(head.port, "wrong")


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


async def test_a_head_that_never_listens_ends_the_wait_with_advice():
    port = choose_port()
    listener = listen_on(port)
    listener.close()
    with pytest.raises(LinkLostError, match="HPC_SERVE_INTERFACE"):
        await join(port, "t", 0.3)


@pytest.mark.parametrize("cut_after", ["accept", "greeting", "hello"])
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


async def test_what_cuts_off_every_handshake_until_the_deadline_is_another_program(late_after_a_try):
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(PortsInUseError):
        await join(port, "t", 60)
    server.close()


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


# -- strangers at the head's control port


NONCE = "0" * 32
TICKET = make_ticket("secret", NONCE)


HELLO = {"rank": 1, "name": "n2", "address": "10.0.0.2", "cache": ""}
NOT_TEXT: tuple[object, ...] = (
    *(None, [], {}, "", "\ud800", "\u00e9" * 64, "a" * 10_000, 1e999, -1e999, 10**40, True, "\x1b[2J"),
)
NO_HELLOS = [
    *(b"", b"\n", b"null\n", b"[]\n", b"{}\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b'{"a":' * 50_000 + b"\n"),
    *(b"1" * 5_000 + b"\n", b"x" * (300 * 1024) + b"\n"),
    *(
        json.dumps({**HELLO, "proof": "0" * 64, name: value}).encode() + b"\n"
        for name in ("proof", "rank", "name", "address")
        for value in NOT_TEXT
    ),
]


async def open_with_ticket(port: int):
    """A connection after the head's greeting; the greeting's nonce."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(make_ticket("secret", secrets.token_hex(16)))
    return reader, writer, json.loads(await reader.readline())["nonce"]


async def send_and_hear(port: int, said: bytes, *, with_ticket: bool) -> bytes:
    """What a head answers, after its greeting if there is one, until it closes."""
    if with_ticket:
        reader, writer, _ = await open_with_ticket(port)
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(said)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 60)
    except OSError:
        pass
    writer.close()
    return answer


NO_TICKETS = [
    make_ticket("another token", NONCE),
    TICKET[:-1],
    TICKET[:-1] + b" ",
    TICKET.upper(),
    b"hpc-serve " + b"0" * 32 + b" " + b"0" * 64 + b"\n",
    json.dumps({**HELLO, "proof": proof("secret", "node", NONCE)}).encode() + b"\n",
]


@pytest.mark.parametrize("with_ticket", [True, False])
async def test_whatever_a_stranger_says_he_is_told_nothing_and_nothing_breaks(with_ticket):
    async with listening() as head:
        said = NO_HELLOS if with_ticket else [*NO_HELLOS, *NO_TICKETS]
        answers = [await send_and_hear(head.port, one, with_ticket=with_ticket) for one in said]
        assert set(answers) == {b""}
        assert head.has_nobody()


async def test_what_follows_a_right_proof_is_checked_too():
    async with listening() as head:
        for wrong in ({"rank": "1"}, {"rank": 1e999}, {"name": None}, {"address": "\x1b[2J"}, {"cache": 1}):
            reader, writer, nonce = await open_with_ticket(head.port)
            writer.write(json.dumps({**HELLO, "proof": proof("secret", "node", nonce), **wrong}).encode() + b"\n")
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
        assert head.has_nobody()


@pytest.mark.parametrize("ticket", [None, TICKET], ids=["no ticket", "one ticket, seen and repeated"])
async def test_many_connections_take_no_place_and_a_node_still_comes_in(ticket):
    async with listening() as head:
        strangers = [await asyncio.open_connection("127.0.0.1", head.port) for _ in range(400)]
        for _, writer in strangers if ticket else ():
            writer.write(ticket)
        link = await join(head.port)
        assert (await head.link()).name == "n2"
        assert len(head.server._handshakes) <= 2  # the node's, and that of the ticket's first use
        assert not head.errors
        for _, writer in strangers:
            writer.close()
        await link.close()


@pytest.mark.parametrize("said", [TICKET, TICKET[:40]], ids=["ticket", "half of one"])
async def test_who_says_no_more_is_not_waited_for(monkeypatch, said):
    monkeypatch.setattr(control, "_HANDSHAKE_TIMEOUT_S", 0.2)
    async with listening() as head:
        reader, writer = await asyncio.open_connection("127.0.0.1", head.port)
        writer.write(said)
        with contextlib.suppress(ConnectionError):
            assert b"silence_s" not in await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert head.has_nobody()
