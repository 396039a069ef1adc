"""The launcher of a node other than the head, over a real control connection; `ray` and `vllm` are small scripts."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from functools import partial

import pytest

from hpc_serve.job.cache.engine_cache import open_cache
from hpc_serve.job.links.link import Link, LinkLostError
from hpc_serve.job.machine.process import marked_pids
from hpc_serve.job.run import parts as outcome_module
from hpc_serve.job.run.node import LaunchOptions
from hpc_serve.job.worker import run_worker
from tests.support.nodes import ALLOCATION, listen_for_workers, make_worker, write_program

RUNS = "print('running', flush=True); time.sleep(600)"


@pytest.fixture
def over_a_connection(tmp_path, monkeypatch):
    """Runs a worker beside `scenario(head's link)`; `command` is the code of `ray` or `vllm` on its PATH."""
    monkeypatch.setattr(outcome_module, "_SETTLE_S", 0.01)

    async def run(scenario, code: str | None, *, backend: str = "ray", **changes):
        if code is not None:
            says = f"open({str(tmp_path / 'arguments')!r}, 'w').write(' '.join(sys.argv[1:]))"
            text = f"#!{sys.executable}\nimport os, sys, time\n{says}\n{code}\n"
            write_program(tmp_path / ("ray" if backend == "ray" else "vllm"), text)

        node = make_worker(
            tmp_path,
            backend=backend,
            words="vllm serve m -pp 2",
            run_mark=f"test-{os.getpid()}-worker",
            environ={"PATH": str(tmp_path), "HPC_SERVE_JOB_DIR": str(tmp_path)},
            **changes,
        )
        links: asyncio.Queue[Link] = asyncio.Queue()
        server = listen_for_workers(tmp_path, links.put_nowait)
        worker = asyncio.create_task(run_worker(node))
        try:
            link = await asyncio.wait_for(links.get(), 60)
            told = await asyncio.wait_for(scenario(link), 60)
            exit_code = await asyncio.wait_for(worker, 60)
        finally:
            server.close()
        assert not list(marked_pids(node.run_mark))
        return told, exit_code

    return run


async def first_message(link):
    """What the node says first once it may start its part."""
    await link.send("go")
    message = await link.receive()
    await link.send("stop")
    return message


async def arguments_of_part(link, *, path, **go):
    """The arguments of the part that the node starts when it is told to, and ends when it is told to."""
    assert not path.exists()  # it waits for the head's word
    await link.send("go", **go)
    while not path.exists() or not path.read_text():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await link.send("stop")
    with pytest.raises(LinkLostError):
        await link.receive()
    return path.read_text()


async def test_it_starts_ray_when_told_and_ends_when_told(over_a_connection, tmp_path):
    scenario = partial(arguments_of_part, path=tmp_path / "arguments", gcs="127.0.0.1:4321")
    arguments, code = await over_a_connection(scenario, RUNS)
    assert code == 0
    assert arguments.startswith("start --block")
    assert "--address=127.0.0.1:4321" in arguments


async def test_without_ray_it_starts_the_engine_without_a_server_and_tells_it_the_ports_in_a_private_file(
    over_a_connection, tmp_path
):
    scenario = partial(arguments_of_part, path=tmp_path / "arguments", settings="master-port: 20002\n")
    arguments, code = await over_a_connection(scenario, RUNS, backend="mp")
    assert code == 0
    assert (
        "serve m -pp 2 --distributed-executor-backend mp --nnodes 2 --node-rank 1 --master-addr 127.0.0.1" in arguments
    )
    assert arguments.endswith("--headless")
    settings = tmp_path / "engine.yaml"
    assert (settings.read_text(), settings.stat().st_mode & 0o777) == ("master-port: 20002\n", 0o600)
    assert "20002" not in arguments


STOPS = "import signal; os.kill(os.getpid(), signal.SIGSTOP)"
ENDS = f"import subprocess; subprocess.run(['VLLM::Worker_TP1', '2'], executable='/bin/sleep')\n{RUNS}"


@pytest.mark.parametrize(
    ("code", "backend", "silence_s", "told"),
    [
        (STOPS, "ray", 0.5, r"stopped: \S+ \(\d+\)"),
        (STOPS, "mp", 0.5, r"stopped: \S+ \(\d+\)"),
        (ENDS, "mp", 5, r"ended: VLLM::Worker_TP1 \(\d+\)"),
    ],
)
async def test_the_head_is_told_of_stopped_processes_and_ended_ranks(over_a_connection, code, backend, silence_s, told):
    options = LaunchOptions(service="8b", backend=backend, gpus_per_node=1, silence_s=silence_s)
    message, exit_code = await over_a_connection(first_message, code, backend=backend, options=options)
    assert exit_code == 0
    assert re.fullmatch(told, f"{message['kind']}: {message['process']}")


SAYS_WHERE = "print(os.environ['VLLM_CACHE_ROOT'], file=open(os.environ['VLLM_HOST_IP'] + '.said', 'w'), flush=True)"


@pytest.mark.parametrize("keeps_cache", [True, False])
async def test_caches_outlive_the_run_if_the_head_says_so_and_count_once_the_engine_is_ready(
    over_a_connection, tmp_path, monkeypatch, keeps_cache
):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o700)
    caches = {"HPC_SERVE_CACHE_DIR": str(tmp_path / "caches")}

    async def scenario(link):
        await link.send("go", keeps_cache=keeps_cache)
        said = tmp_path / "127.0.0.1.said"
        while not said.exists() or not said.read_text().endswith("\n"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        for _ in range(2):  # an engine that is started again in place becomes ready again
            await link.send("ready")
        await link.send("stop")
        with pytest.raises(LinkLostError):
            await link.receive()
        return link.cache, said.read_text().strip()

    with open_cache("0" * 16, tmp_path, caches, ALLOCATION) as cache:
        (told, used), code = await over_a_connection(scenario, f"{SAYS_WHERE}\n{RUNS}", backend="mp", cache=cache)
    assert (told, code) == (str(cache.path), 0)
    assert used == str((cache.path if keeps_cache else tmp_path / "cache") / "vllm")
    with open_cache("0" * 16, tmp_path, caches, ALLOCATION) as cache:
        assert cache.is_warm == keeps_cache


async def test_the_end_of_its_part_is_told_and_it_stays_until_the_head_stops(over_a_connection):
    message, code = await over_a_connection(first_message, "print('ValueError: no such network'); sys.exit(3)")
    assert code == 3
    assert (message["kind"], message["failed_part"], message["exit_code"]) == ("failed", "ray worker", 3)
    assert message["reason"] == "ray worker exited with 3: ValueError: no such network"
    assert message["last_log_lines"] == ["ValueError: no such network"]


async def test_a_node_without_the_command_says_so(over_a_connection):
    message, code = await over_a_connection(first_message, None)
    assert message["exit_code"] == code == 127
    assert "no command ray" in message["reason"]


@pytest.mark.parametrize("before", [[], ["go"]])
async def test_it_ends_with_the_head(over_a_connection, before):
    async def scenario(link):
        for kind in before:
            await link.send(kind)
        await link.close()

    assert (await over_a_connection(scenario, RUNS)) == (None, 0)
