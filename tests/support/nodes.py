"""Values of a launcher for tests: a node's allocation and its share of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_serve.job.cache.engine_cache import private_cache
from hpc_serve.job.cleanup.node_dir import write_control_port
from hpc_serve.job.links.control import ControlServer
from hpc_serve.job.links.link import Link
from hpc_serve.job.machine.allocation import Allocation
from hpc_serve.job.machine.network import listen_on
from hpc_serve.job.run.node import LaunchOptions, Node
from hpc_serve.units import GIB
from hpc_serve.vllm.command import read_command

ALLOCATION = Allocation(
    cluster="slurm",
    job_id="1",
    restart=0,
    node_rank=0,
    num_nodes=2,
    node_name="n1",
    num_cpus=16,
    num_gpus=8,
    memory_bytes=64 * GIB,
)
NOWHERE = Path("/nowhere")
ALONE = replace(ALLOCATION, num_nodes=1)


def write_program(path: Path, text: str) -> Path:
    """Write a program that anybody may run, with its folder; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def listen_for_workers(run_dir: Path, on_link: Callable[[Link], None]) -> ControlServer:
    """Listen as the head of a run does, and write down in its folder where."""
    listener = listen_on()
    (run_dir / "control_port").touch(mode=0o600)
    write_control_port(run_dir, listener.getsockname()[1])
    return ControlServer(make_node(run_dir), listener, on_link)


def make_node(node_dir: Path = NOWHERE, *, backend: str = "ray", words: str = "vllm serve m", **changes: Any) -> Node:
    """A node of a run whose files are in `node_dir`, with the given fields replaced."""
    node = Node(
        options=LaunchOptions(service="8b", backend=backend, gpus_per_node=1),
        allocation=ALLOCATION,
        command=read_command(words.split()),
        backend=backend,
        head="127.0.0.1",
        node_dir=node_dir,
        cache=private_cache(node_dir, "a test"),
        run_mark="m",
        token="secret",
        environ={},
    )
    return replace(node, **changes)


def make_worker(node_dir: Path = NOWHERE, **changes: Any) -> Node:
    """The second node of a run, n2."""
    return make_node(node_dir, allocation=replace(ALLOCATION, node_rank=1, node_name="n2"), **changes)
