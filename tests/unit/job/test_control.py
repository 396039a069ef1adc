"""The control connection between launchers: only holders of the token connect, and its end is noticed."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

from hpc_serve.job.control import ControlServer, Link, LinkLostError, connect
from hpc_serve.job.network import PortsInUseError, choose_ports, listen_on


def over_a_connection(scenario, *, server_token="secret", client_token="secret", silence_s=60.0):
    """Run `scenario(head's link, node's link)` over a real connection."""

    async def run():
        (port,) = choose_ports(1)
        listener = listen_on(port)
        links: asyncio.Queue[Link] = asyncio.Queue()
        server = ControlServer(server_token, "n1", links.put_nowait, silence_s=silence_s)
        await server.start(listener)
        try:
            node = await connect(
                ("127.0.0.1", port),
                client_token,
                rank=1,
                name="n2",
                own_address=lambda: "10.0.0.2",
                deadline_s=5,
            )
            return await scenario(await asyncio.wait_for(links.get(), 5), node)
        finally:
            server.close()

    return asyncio.run(run())


def test_messages_go_both_ways_and_name_the_node():
    async def scenario(head, node):
        assert (head.rank, head.name, head.address) == (1, "n2", "10.0.0.2")
        await head.send("go")
        await node.send("failed", part="ray worker", exit_code=9)
        return await node.receive(), await head.receive()

    go, failed = over_a_connection(scenario)
    assert go["kind"] == "go"
    assert failed == {"kind": "failed", "part": "ray worker", "exit_code": 9}


def test_a_heartbeat_carries_what_was_read_and_is_not_a_message():
    async def scenario(head, node):
        heartbeats = asyncio.create_task(node.send_heartbeats(lambda: 4096))
        heard = asyncio.create_task(head.receive())
        while head.read_bytes == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not heard.done()
        heartbeats.cancel()
        heard.cancel()
        return head.read_bytes

    assert over_a_connection(scenario) == 4096


def test_the_end_of_a_launcher_is_noticed():
    async def scenario(head, node):
        await node.close()
        await head.receive()

    with pytest.raises(LinkLostError, match="launcher on node n2 ended"):
        over_a_connection(scenario)


def test_a_silent_node_is_lost_and_so_is_a_silent_head():
    async def scenario(head, node):
        heard = await asyncio.gather(head.receive(), node.receive(), return_exceptions=True)
        return [str(error) for error in heard if isinstance(error, LinkLostError)]

    assert over_a_connection(scenario, silence_s=0.05) == [
        "node n2 has sent nothing for 0.05 s",
        "node n1 has sent nothing for 0.05 s",
    ]


def test_a_job_that_was_suspended_as_a_whole_goes_on():
    async def scenario(head, node):
        heard = [asyncio.create_task(end.receive()) for end in (head, node)]
        await asyncio.wait(heard, timeout=0.01)
        time.sleep(0.3)  # noqa: ASYNC251  # both ends stand still, longer than either may be silent
        await asyncio.wait(heard, timeout=0.01)
        await head.send("go")
        await node.send("failed")
        return [message["kind"] for message in await asyncio.gather(*heard)]

    assert over_a_connection(scenario, silence_s=0.2) == ["failed", "go"]


def test_heartbeats_go_on_while_the_kernel_does_not_say_what_was_read():
    async def scenario(head, node):
        answer, told, sent = threading.Event(), asyncio.Event(), []

        async def send(kind, **fields):
            sent.append(fields["read_bytes"])
            if len(sent) == 3:
                answer.set()
            if fields["read_bytes"]:
                told.set()

        node.send = send
        heartbeats = asyncio.create_task(node.send_heartbeats(lambda: 4096 if answer.wait(5) else 0))
        await asyncio.wait_for(told.wait(), 5)
        heartbeats.cancel()
        return sent

    sent = over_a_connection(scenario, silence_s=0.2)
    assert sent[:3] == [0, 0, 0]
    assert sent[-1] == 4096


def test_without_the_token_nobody_connects():
    with pytest.raises(PortsInUseError, match="A program other than"):
        over_a_connection(lambda head, node: None, client_token="wrong")


def test_the_token_itself_never_travels():
    async def run():
        told = []

        async def impostor(reader, writer):
            writer.write(json.dumps({"hpc_serve": 1, "nonce": "n"}).encode() + b"\n")
            told.append(await reader.readline())
            writer.write(json.dumps({"proof": "guessed", "name": "x"}).encode() + b"\n")

        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(PortsInUseError):
            await connect(("127.0.0.1", port), "s3cret", rank=1, name="n2", own_address=lambda: "a", deadline_s=1)
        server.close()
        return told[0]

    assert b"s3cret" not in asyncio.run(run())


def test_a_head_that_never_listens_ends_the_wait_with_advice():
    (port,) = choose_ports(1)
    listener = listen_on(port)
    listener.close()
    with pytest.raises(LinkLostError, match="HPC_SERVE_INTERFACE"):
        asyncio.run(connect(("127.0.0.1", port), "t", rank=1, name="n2", own_address=lambda: "a", deadline_s=0.3))
