"""The child that imports vLLM before the engine may start, as a program and as its launcher holds it; vLLM is a few
lines of Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_serve.job.engine.engine_process import EngineProcess, EngineSocket
from hpc_serve.job.engine.engine_start import VLLM_MODULE
from hpc_serve.job.machine.network import PortsInUseError
from hpc_serve.job.machine.process import is_own_script, marked_pids
from hpc_serve.job.run.node import Node
from hpc_serve.job.run.parts import Parts, RunEnd
from tests.support.nodes import ALLOCATION, make_node, write_program

WITHIN_S = 120
MARK = f"test-{os.getpid()}-engine-process"
OF_VLLM = f"""#!{sys.executable}
import sys
from {VLLM_MODULE} import main
if __name__ == '__main__':
    sys.exit(main())
"""
MAIN = """
import json, multiprocessing, os, sys
print("imported with", sys.argv[1:3], os.environ.get("RAY_ADDRESS"), sys.stdin.read(), flush=True)
os.environ["SET_BY_AN_IMPORT"] = "1"

def of_spawned(names):
    names.put(sys.modules["__main__"].__name__)

def main():
    names = multiprocessing.get_context("spawn").SimpleQueue()
    child = multiprocessing.get_context("spawn").Process(target=of_spawned, args=(names,))
    child.start()
    told = {name: os.environ.get(name) for name in ("RAY_ADDRESS", "FIRST", "SET_BY_AN_IMPORT")}
    stdin = os.readlink("/proc/self/fd/0")
    print(json.dumps({"argv": sys.argv, "told": told, "path": sys.path[0], "stdin": stdin, "spawned": names.get()}))
    child.join()
    return 7
"""


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A package of vLLM, and its script as an installer writes it."""
    package = tmp_path / "packages" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "main.py").write_text(MAIN)
    (package / "serve.py").write_text("")
    return write_program(tmp_path / "bin" / "vllm", OF_VLLM)


def environ_of(vllm: Path, **variables: str) -> dict[str, str]:
    covered = {name: value for name, value in os.environ.items() if name.startswith("COVER")}
    path = os.pathsep.join([str(vllm.parent.parent / "packages"), *(path for path in sys.path if path)])
    return {**covered, "PATH": str(vllm.parent), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables}


def engine(folder: Path, on_line: Callable[[str], None], **changes: Any) -> tuple[EngineProcess, Parts]:
    parts = Parts(MARK, RunEnd())
    node = make_node(folder, run_mark=MARK, **changes)
    return EngineProcess(node, parts, on_line=on_line, is_noise=lambda line: False), parts


FILES = SimpleNamespace(key_file="key", certificate_file="certificate")
ENDPOINT: Any = SimpleNamespace(certificate=FILES, socket=SimpleNamespace(environ={}))


async def test_it_imports_at_once_and_is_the_command_itself_once_it_is_told(vllm, tmp_path):
    lines: list[str] = []

    has_imported = asyncio.Event()

    def read(line: str) -> None:
        lines.append(line)
        has_imported.set()

    process, parts = engine(tmp_path, read)
    await process.hold(ENDPOINT, environ_of(vllm, FIRST="1"))
    await asyncio.wait_for(has_imported.wait(), WITHIN_S)
    assert lines == ["imported with ['serve', 'm'] None"]
    child = await process.start(ENDPOINT, environ_of(vllm, FIRST="1", RAY_ADDRESS="10.0.0.1:1"))
    code = await asyncio.wait_for(child.wait(), WITHIN_S)
    await parts.take_down()
    assert code == 7
    said = json.loads(next(line for line in lines if line.startswith("{")))
    assert said["argv"][:3] == [str(vllm), "serve", "m"]
    assert said["told"] == {"RAY_ADDRESS": "10.0.0.1:1", "FIRST": "1", "SET_BY_AN_IMPORT": "1"}
    assert (said["path"], said["stdin"], said["spawned"]) == (str(vllm.parent), os.devnull, "__mp_main__")


async def test_a_child_that_has_ended_is_replaced_by_the_command(vllm, tmp_path):
    lines: list[str] = []
    module = tmp_path / "packages" / "vllm" / "entrypoints" / "cli" / "serve.py"
    module.write_text("import os\nif os.environ.get('FIRST'): os._exit(9)\n")

    process, parts = engine(tmp_path, lines.append)
    await process.hold(ENDPOINT, environ_of(vllm, FIRST="1"))
    held = process._held
    assert await asyncio.wait_for(held.wait(), WITHIN_S) == 9
    child = await process.start(ENDPOINT, environ_of(vllm))
    code = await asyncio.wait_for(child.wait(), WITHIN_S)
    await parts.take_down()
    assert code == 7
    assert json.loads(next(line for line in lines if line.startswith("{")))["told"]["FIRST"] is None


async def test_one_that_is_never_told_ends_with_the_run(vllm, tmp_path):
    process, parts = engine(tmp_path, print)
    await process.hold(ENDPOINT, environ_of(vllm))
    assert process._held is not None
    await parts.take_down()
    assert not list(marked_pids(MARK))


@pytest.mark.parametrize("device", ["GPU", "TPU"])
async def test_what_is_not_this_pythons_vllm_is_not_held_nor_anything_for_tpus(vllm, tmp_path, device):
    if device == "GPU":
        vllm.write_text("#!/bin/sh\nexec true\n")

    node = make_node(tmp_path)
    process, parts = engine(tmp_path, print, options=replace(node.options, device=device))
    await process.hold(ENDPOINT, environ_of(vllm))
    assert process._held is None
    await parts.take_down()


def start(vllm: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hpc_serve.job.engine.engine_start", str(vllm), "serve", "m"],
        env=environ_of(vllm, **variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_vllm_that_cannot_be_imported_says_so_itself(vllm):
    """The command is run then, as if nothing had been tried."""
    module = vllm.parent.parent / "packages" / "vllm" / "entrypoints" / "cli" / "main.py"
    module.write_text("import sys\nsys.exit('no such library')\n")
    child = start(vllm)
    said, _ = child.communicate(json.dumps({"RAY_ADDRESS": "10.0.0.1:1"}) + "\n", timeout=WITHIN_S)
    assert (said, child.returncode) == ("no such library\n", 1)


def test_it_ends_with_a_launcher_that_says_nothing(vllm):
    child = start(vllm)
    said, _ = child.communicate(timeout=WITHIN_S)
    assert said == "imported with ['serve', 'm'] None \n"
    assert child.returncode == 0


def test_vllm_still_has_what_is_imported():
    """Else nothing is gained, and nobody says so."""
    pytest.importorskip("vllm")
    from importlib.util import find_spec

    from hpc_serve.job.engine.engine_start import _MODULES

    assert all(find_spec(module) for module in _MODULES)


@pytest.mark.parametrize(
    ("text", "is_it"),
    [
        (OF_VLLM, True),
        (OF_VLLM.replace(sys.executable, "/elsewhere/bin/python"), False),
        (f"#!{sys.executable}\nprint('a stand-in')\n", False),
        ("#!/bin/bash\nexec /elsewhere/vllm.entrypoints.cli.main\n", False),
        ("", False),
    ],
)
def test_only_the_script_of_this_pythons_package_is_run_in_process(tmp_path, text, is_it):
    (tmp_path / "vllm").write_text(text)
    assert is_own_script(str(tmp_path / "vllm"), VLLM_MODULE) == is_it
    assert not is_own_script(None, VLLM_MODULE)
    assert not is_own_script(str(tmp_path / "absent"), VLLM_MODULE)


# -- The socket that a uvicorn server takes over from its launcher, as the engine's does


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
async def test_each_server_of_an_engine_serves_on_the_launchers_port_until_it_ends(node, servers):
    pytest.importorskip("uvicorn")
    engine_socket = EngineSocket(node(f"--api-server-count {servers}"))
    assert not engine_socket.is_taken.is_set()
    processes = [start_server(engine_socket) for _ in range(servers)]
    try:
        await asyncio.wait_for(engine_socket.hand_over(), WITHIN_S)
        assert engine_socket.is_taken.is_set()
        assert await asyncio.to_thread(ask, engine_socket.port) in [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", engine_socket.port))


async def test_before_the_engine_is_up_nobody_shares_its_port(node):
    engine_socket = EngineSocket(node())
    with contextlib.closing(engine_socket), socket.socket() as beside:
        beside.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        beside.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with pytest.raises(OSError, match="in use"):
            beside.bind(("127.0.0.1", engine_socket.port))


async def test_before_the_engine_is_up_one_connection_waits_and_strangers_fill_no_memory(node):
    engine_socket = EngineSocket(node())
    with contextlib.closing(engine_socket), contextlib.ExitStack() as opened:
        connections = [opened.enter_context(socket.socket()) for _ in range(20)]
        for connection in connections:
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", engine_socket.port))
        await asyncio.sleep(0.1)
        assert len(select.select([], connections, [], 0)[1]) <= 2  # those that are connected


async def test_a_port_of_a_persons_own_that_is_taken_is_said_at_once(node):
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(PortsInUseError, match="leave --port out"):
        EngineSocket(node(f"--port {other.getsockname()[1]}"))
