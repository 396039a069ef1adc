"""A launcher on a node other than the head: waits for the head's word, runs its part, ends when the head says so."""

from __future__ import annotations

import asyncio
import signal

from hpc_serve.errors import HpcServeError
from hpc_serve.job.control import Link, LinkLostError, Message, connect
from hpc_serve.job.network import node_address
from hpc_serve.job.node import Node
from hpc_serve.job.process import Child, end_marked, read_bytes, start_child
from hpc_serve.job.ray_cluster import ray_environ, worker_argv
from hpc_serve.vllm.command import multi_node_args

_GOODBYE_S = 30.0
_GRACE_S = 5.0


async def run_worker(node: Node) -> int:
    """Be this node's launcher until the end; returns the exit code."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    address = ""

    def own_address() -> str:
        nonlocal address
        address = node_address(interface=node.environ.get("HPC_SERVE_INTERFACE"), towards=node.head)
        return address

    link = await connect(
        (node.head, node.head_ports.control),
        node.token,
        rank=node.allocation.node_rank,
        name=node.allocation.node_name,
        own_address=own_address,
        deadline_s=node.options.join_s,
    )
    beats = asyncio.create_task(link.send_heartbeats(lambda: read_bytes(node.mark)))
    try:
        return await _serve_part(node, link, address, stopped)
    finally:
        beats.cancel()
        await end_marked(node.mark, grace_s=2)
        await link.close()


async def _serve_part(node: Node, link: Link, address: str, stopped: asyncio.Event) -> int:
    heard = asyncio.create_task(link.receive())
    stop = asyncio.create_task(stopped.wait())
    child: Child | None = None
    try:
        await asyncio.wait({heard, stop}, return_when=asyncio.FIRST_COMPLETED)
        if stop.done() or not _is(heard, "go"):
            return 0
        heard = asyncio.create_task(link.receive())
        node.check_gpus()
        environ = node.child_environ(address=address)
        if node.backend == "ray":
            name = "ray worker"
            options = node.ray_options(address=address)
            argv, environ = worker_argv(options, head=node.gcs), ray_environ(environ)
        else:
            name = "engine"
            allocation = node.allocation
            argv = [
                *node.command.argv,
                *("--distributed-executor-backend", "mp"),
                *multi_node_args(
                    num_nodes=allocation.num_nodes,
                    node_rank=allocation.node_rank,
                    master=(node.head, node.head_ports.torch_master),
                ),
            ]
        child = await start_child(name, argv, environ, lambda line: print(line, flush=True))
        ended = asyncio.create_task(child.wait())
        await asyncio.wait({heard, stop, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done() and not heard.done():
            return await _say_failed(
                link, heard, stop, name, ended.result(), child.epitaph, tuple(child.last_log_lines)
            )
        return 0
    except (HpcServeError, OSError) as error:
        code = error.exit_code if isinstance(error, HpcServeError) else 1
        return await _say_failed(link, heard, stop, "launcher", code, str(error), ())
    finally:
        for task in (heard, stop):
            task.cancel()
        if child is not None:
            await child.stop(_GRACE_S)


async def _say_failed(
    link: Link,
    heard: asyncio.Task[Message],
    stop: asyncio.Task[bool],
    part: str,
    code: int,
    reason: str,
    last_log_lines: tuple[str, ...],
) -> int:
    """Tell the head, and stay until it has heard: a task that ends at once may take the head's with it."""
    print(f"hpc-serve: {part} on this node failed (exit code {code}): {reason}", flush=True)
    await link.send("failed", part=part, exit_code=code, reason=reason, last_log_lines=last_log_lines)
    await asyncio.wait({heard, stop}, timeout=_GOODBYE_S, return_when=asyncio.FIRST_COMPLETED)
    return code or 1


def _is(heard: asyncio.Task[Message], kind: str) -> bool:
    try:
        return bool(heard.result()["kind"] == kind)
    except LinkLostError as error:
        print(f"hpc-serve: {error}", flush=True)
        return False
