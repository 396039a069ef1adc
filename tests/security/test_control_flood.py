"""Strangers open connections to the control port without pause, from the nodes' own address: nodes join all the same.

Head, node and strangers are processes of their own, as they are in a job. The strangers go on until the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hpc_serve.job.machine.network import choose_port

STRANGER = Path(__file__).with_name("stranger.py")
TOKEN = "a-token-of-a-run"
JOINS = 5
HEAD = f"""
import asyncio, sys
from hpc_serve.job.links.control import ControlServer
from hpc_serve.job.machine.network import listen_on
from tests.support.nodes import make_node

async def main():
    node = make_node(token={TOKEN!r})
    server = ControlServer(node, listen_on(int(sys.argv[1])), lambda link: print(link.rank, flush=True))
    print("listens", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
NODE = f"""
import asyncio, sys
from dataclasses import replace
from hpc_serve.job.links.control import connect
from tests.support.nodes import make_worker

async def main():
    node = make_worker(token={TOKEN!r})
    node = replace(node, allocation=replace(node.allocation, node_rank=int(sys.argv[2])))
    link = await connect(node, int(sys.argv[1]))
    print(link.name)

asyncio.run(main())
"""


@contextmanager
def running(*argv: object):
    """A process that is ended at the end."""
    with subprocess.Popen([sys.executable, *map(str, argv)], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("said", "held"),
    [("", 500), ("", 15_000), ("{", 500), ("hpc-serve " + "0" * 99, 2_000), ("x" * 5_000, 200)],
    ids=["silent", "silent and many at once", "a bit of something", "nearly a ticket", "much"],
)
def test_nodes_join_while_strangers_connect_without_pause(said, held):
    port = choose_port()
    with ExitStack() as stack:
        head = stack.enter_context(running("-c", HEAD, port))
        assert head.stdout.readline() == "listens\n"
        strangers = [
            stack.enter_context(running(STRANGER, "flood_without_end", "127.0.0.1", port, said, held)) for _ in range(3)
        ]
        for stranger in strangers:
            assert json.loads(stranger.stdout.readline())["opened"] == 1_000
        for rank in range(JOINS):
            node = subprocess.run(
                [sys.executable, "-c", NODE, str(port), str(rank)], capture_output=True, text=True, timeout=400
            )
            assert node.stdout == "n1\n", node.stderr
            assert head.stdout.readline() == f"{rank}\n"
        assert [stranger.poll() for stranger in strangers] == [None] * 3
        assert len(os.listdir(f"/proc/{head.pid}/fd")) < 100
