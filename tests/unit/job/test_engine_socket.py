"""The socket that a uvicorn server takes over from its launcher, as the engine's does."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import sys
import urllib.request
from dataclasses import replace

import pytest

from hpc_serve.job.engine.engine_process import EngineSocket
from hpc_serve.job.machine.network import PortsInUseError
from hpc_serve.job.run.node import Node
from tests.support.nodes import ALLOCATION, make_node

WITHIN_S = 60
SERVER = """
import asyncio, os, socket, uvicorn
from hpc_serve.gate.launchers_socket import serve_on_launchers_socket

async def app(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(os.getpid()).encode()})

serve_on_launchers_socket()
own = socket.create_server(("127.0.0.1", 0))
asyncio.run(uvicorn.Server(uvicorn.Config(app, log_level="error")).serve(sockets=[own]))
"""


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory):
    """A node of a local run; `options` are of its engine."""
    folder = tmp_path_factory.mktemp("s")  # a short name: the kernel allows a Unix socket 107 characters

    def node(*options: str) -> Node:
        allocation = replace(ALLOCATION, cluster="local", num_nodes=1)
        return make_node(folder, words=" ".join(["vllm serve m", *options]), allocation=allocation)

    return node


def start_server(engine_socket: EngineSocket) -> subprocess.Popen[bytes]:
    environ = {**os.environ, **engine_socket.environ}
    return subprocess.Popen([sys.executable, "-c", SERVER], env=environ)


def ask(port: int) -> int:
    """The pid of the server that answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=WITHIN_S) as answer:
        return int(answer.read())


@pytest.mark.parametrize("servers", [1, 2])
def test_each_server_of_an_engine_serves_on_the_launchers_port_until_it_ends(node, servers):
    pytest.importorskip("uvicorn")

    async def run() -> int:
        engine_socket = EngineSocket(node(f"--api-server-count {servers}"))
        assert not engine_socket.is_taken.is_set()
        processes = [start_server(engine_socket) for _ in range(servers)]
        try:
            await asyncio.wait_for(engine_socket.hand_over(), WITHIN_S)
            assert engine_socket.is_taken.is_set()
            answered = {await asyncio.to_thread(ask, engine_socket.port)}
            assert answered <= {process.pid for process in processes}
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return engine_socket.port

    port = asyncio.run(run())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_before_the_engine_is_up_one_connection_waits_and_strangers_fill_no_memory(node):
    async def run() -> int:
        engine_socket = EngineSocket(node())
        connections = [socket.socket() for _ in range(20)]
        try:
            for connection in connections:
                connection.setblocking(False)
                connection.connect_ex(("127.0.0.1", engine_socket.port))
            await asyncio.sleep(0.1)
            return len(select.select([], connections, [], 0)[1])  # those that are connected
        finally:
            engine_socket.close()
            for connection in connections:
                connection.close()

    assert asyncio.run(run()) <= 2


def test_a_port_of_a_persons_own_that_is_taken_is_said_at_once(node):
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(PortsInUseError, match="leave --port out"):
        EngineSocket(node(f"--port {other.getsockname()[1]}"))
