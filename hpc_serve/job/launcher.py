"""One launcher a node: reads the scene, makes the private folder, and plays its role until the end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpc_serve.errors import InvalidRequestError
from hpc_serve.job.allocation import Allocation
from hpc_serve.job.head import Head
from hpc_serve.job.network import HeadPorts, choose_ports, listen_on, reachable_addresses
from hpc_serve.job.node import LaunchOptions, Node, read_token
from hpc_serve.job.node_dir import Owner
from hpc_serve.job.record_keeper import LEASE_S, RecordKeeper, user_name
from hpc_serve.job.run_dir import remove_job_dir
from hpc_serve.job.sweep import private_folder
from hpc_serve.job.worker import run_worker
from hpc_serve.rendezvous.claims import claim
from hpc_serve.rendezvous.record import EndpointRecord, NodeRecord
from hpc_serve.rendezvous.store import ServiceStore, default_home
from hpc_serve.stand_in import find_stand_in
from hpc_serve.vllm.command import choose_backend, read_command

_FROM_PREPARE = ("HPC_SERVE_JOB_DIR", "HPC_SERVE_NODE_TMP", "HPC_SERVE_HEAD_ADDRESS", "HPC_SERVE_HEAD_PORTS")
_LEAST_SILENCE_S, _MOST_SILENCE_S = 5, 3_600


def launch(options: LaunchOptions, words: Sequence[str], allocation: Allocation, environ: Mapping[str, str]) -> int:
    """Run this node's part of the service until it ends; returns the exit code. Raises HpcServeError."""
    if absent := [name for name in _FROM_PREPARE if name not in environ]:
        raise InvalidRequestError(
            f"{', '.join(absent)} not set: run `python -m hpc_serve.job.prepare` first, as the script does."
        )
    temp_dir = Path(environ["HPC_SERVE_NODE_TMP"])
    job_dir = environ["HPC_SERVE_JOB_DIR"] if allocation.is_head else None
    owner = Owner(mark=f"{temp_dir.name}-{allocation.node_rank}", job_dir=job_dir)
    with _run_folder(owner), private_folder(temp_dir, owner):
        command = read_command(words, stand_in=find_stand_in(environ))
        node = Node(
            options=options,
            allocation=allocation,
            command=command,
            backend=choose_backend(options.backend, command, allocation.num_nodes),
            head=environ["HPC_SERVE_HEAD_ADDRESS"],
            head_ports=HeadPorts.from_text(environ["HPC_SERVE_HEAD_PORTS"]),
            silence_s=_silence_s(environ),
            temp_dir=temp_dir,
            mark=owner.mark,
            token=read_token(environ),
            environ=environ,
        )
        return asyncio.run(_run_head(node) if allocation.is_head else run_worker(node))


@contextlib.contextmanager
def _run_folder(owner: Owner) -> Iterator[None]:
    """The head removes the run's private folder when it is the last to need it."""
    try:
        yield
    finally:
        if owner.job_dir is not None:
            remove_job_dir(Path(owner.job_dir))


def _silence_s(environ: Mapping[str, str]) -> float:
    """How long nodes may not hear of each other. Raises InvalidRequestError."""
    text = environ.get("HPC_SERVE_SILENCE_S") or "60"
    try:
        silence_s = float(text)
    except ValueError:
        silence_s = math.nan
    if not _LEAST_SILENCE_S <= silence_s <= _MOST_SILENCE_S:
        raise InvalidRequestError(
            f"HPC_SERVE_SILENCE_S={text}: a node that is not heard of for so many seconds is lost; it must be "
            f"{_LEAST_SILENCE_S} to {_MOST_SILENCE_S}."
        )
    return silence_s


async def _run_head(node: Node) -> int:
    listener = listen_on(node.head_ports.control)
    store = ServiceStore(default_home(node.environ))
    service = node.options.service
    claim(store, service, node.command.model)
    keeper = RecordKeeper(store, _first_record(node))
    return await Head(node, keeper, store.read_api_key(service)).run(listener)


def _first_record(node: Node) -> EndpointRecord:
    allocation, command = node.allocation, node.command
    now = time.time()
    return EndpointRecord(
        service=node.options.service,
        model=command.model,
        stand_in=command.stand_in,
        served_model_names=command.served_model_names,
        cluster=allocation.cluster,
        job_id=allocation.job_id,
        restart=allocation.restart,
        replica=0,
        user=user_name(),
        state="starting",
        stage="starting",
        hosts=_hosts(allocation, node.head),
        port=command.port or choose_ports(1)[0],
        nodes=(NodeRecord(name=allocation.node_name, address=node.head),),
        tensor_parallel_size=command.tensor_parallel_size,
        pipeline_parallel_size=command.pipeline_parallel_size,
        num_nodes=allocation.num_nodes,
        gpus_per_node=node.options.gpus_per_node,
        counter=0,
        lease_s=LEASE_S,
        started_at=now,
        updated_at=now,
        log_dir=node.environ.get("HPC_SERVE_LOG_DIR"),
    )


def _hosts(allocation: Allocation, head: str) -> tuple[str, ...]:
    if allocation.cluster == "local":
        return ("127.0.0.1",)
    return tuple(dict.fromkeys((head, *reachable_addresses())))
