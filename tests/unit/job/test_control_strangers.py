"""Strangers at the head's control port: they are told nothing, take no place, and are not waited for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets

import pytest

from hpc_serve.job.links import control
from hpc_serve.job.links.link import make_ticket, proof
from tests.unit.job.conftest import in_a_loop
from tests.unit.job.control_links import join, listening

NONCE = "0" * 32
TICKET = make_ticket("secret", NONCE)


HELLO = {"rank": 1, "name": "n2", "address": "10.0.0.2"}
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
@in_a_loop
async def test_whatever_a_stranger_says_he_is_told_nothing_and_nothing_breaks(with_ticket):
    async with listening() as head:
        said = NO_HELLOS if with_ticket else [*NO_HELLOS, *NO_TICKETS]
        answers = [await send_and_hear(head.port, one, with_ticket=with_ticket) for one in said]
        assert set(answers) == {b""}
        assert head.has_nobody()


@in_a_loop
async def test_what_follows_a_right_proof_is_checked_too():
    async with listening() as head:
        for wrong in ({"rank": "1"}, {"rank": 1e999}, {"name": None}, {"address": "\x1b[2J"}):
            reader, writer, nonce = await open_with_ticket(head.port)
            writer.write(json.dumps({**HELLO, "proof": proof("secret", "node", nonce), **wrong}).encode() + b"\n")
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
        assert head.has_nobody()


@pytest.mark.parametrize("ticket", [None, TICKET], ids=["no ticket", "one ticket, seen and repeated"])
@in_a_loop
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
@in_a_loop
async def test_who_says_no_more_is_not_waited_for(monkeypatch, said):
    monkeypatch.setattr(control, "_HANDSHAKE_TIMEOUT_S", 0.2)
    async with listening() as head:
        reader, writer = await asyncio.open_connection("127.0.0.1", head.port)
        writer.write(said)
        with contextlib.suppress(ConnectionError):
            assert b"silence_s" not in await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert head.has_nobody()
