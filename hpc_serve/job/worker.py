"""The launcher on a node other than the head: it starts its part when the head says so, and ends when the head does."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_serve.errors import InvalidRequestError
from hpc_serve.job.cleanup.run_dir import read_control_port
from hpc_serve.job.links.control import connect
from hpc_serve.job.links.link import Link, LinkLostError, Message
from hpc_serve.job.machine.network import node_address, reachable_addresses
from hpc_serve.job.machine.process import run_processes
from hpc_serve.job.preflight.node_side import NodePreflight
from hpc_serve.job.progress.reading import RunReading
from hpc_serve.job.ray.held_ray import HeldRay
from hpc_serve.job.run.node import Node
from hpc_serve.job.run.outcome import Outcome, RunEnd
from hpc_serve.job.run.parts import Parts, StopOrder
from hpc_serve.job.run.ray_cluster import ray_environ, worker_argv
from hpc_serve.vllm.command import headless_argv

if TYPE_CHECKING:
    from hpc_serve.job.engine.engine import Engine

_log = logging.getLogger(__name__)
_REPORT_TIMEOUT_S = 30.0
_GRACE_S = 5.0
_POLL_INTERVAL_S = 0.2
_LEAST_LOOKS = 10
# As vLLM and Ray name the processes of ranks.
_RANKS = ("VLLM::", "ray::RayWorker", "ray::DPMoEEngineCoreActor", "ray::EngineCoreActor")


@dataclass(kw_only=True)
class _Here:
    """This launcher's part of the run, with its Ray or its server. `end_of_run` is how the head says the run ends."""

    node: Node
    link: Link
    parts: Parts
    ray: asyncio.Future[HeldRay] | None = None
    server: Engine | None = None
    end_of_run: Outcome | None = None


async def run_worker(node: Node) -> int:
    """Run this node's part until the head or a signal stops it, or it fails; returns the exit code.

    Raises LinkLostError or PortsInUseError if the head cannot be reached, InvalidRequestError if it has this address.
    """
    run_end = RunEnd()
    run_end.stop_on_signals()
    if node.head in reachable_addresses():
        raise InvalidRequestError(
            f"node {node.allocation.node_name} has the head's address {node.head} as well: each node needs its own "
            "address. Name the network that joins them in HPC_SERVE_INTERFACE."
        )
    link = await connect(
        (node.head, await _control_port(node)),
        node.token,
        rank=node.allocation.node_rank,
        name=node.allocation.node_name,
        own_address=lambda: _own_address(node),
        deadline_s=node.options.join_s,
        cache=str(node.cache.path) if node.cache.lock is not None else "",
    )
    parts = Parts(node.run_mark, run_end, node_name=node.allocation.node_name)
    parts.run_in_background(parts.oom_watch.run())
    parts.run_in_background(link.send_heartbeats(RunReading(node.run_mark).look))
    here = _Here(node=node, link=link, parts=parts)
    try:
        if node.backend == "ray":
            here.ray = asyncio.get_running_loop().create_future()
            parts.run_in_background(run_end.fail_on_error(_hold_ray(node, parts, here.ray)))
        parts.run_in_background(_follow_head(here))
        outcome = await run_end.wait()
        if here.server is not None:
            here.server.keeper.publish_end(here.end_of_run or outcome, node.environ)
        if outcome.is_failure:
            await _report_failure(link, run_end, outcome)
        else:
            _log.info("stopping: %s", outcome.reason)
    finally:
        await parts.take_down()
        if here.server is not None:
            await here.server.keeper.finish()
        await link.close()
    return outcome.exit_code


async def _control_port(node: Node) -> int:
    """Wait until the head's launcher has written down where it listens. Raises LinkLostError."""
    run_dir, deadline = Path(node.environ["HPC_SERVE_JOB_DIR"]), time.monotonic() + node.options.join_s
    while (port := read_control_port(run_dir)) is None:
        if time.monotonic() > deadline:
            raise LinkLostError(
                f"node {node.allocation.node_name} cannot read in {run_dir} where the head's launcher listens, after "
                f"{node.options.join_s:.0f} s: it has not started, or this node does not see what the head has written"
            )
        await asyncio.sleep(_POLL_INTERVAL_S)
    return port


async def _hold_ray(node: Node, parts: Parts, ready: asyncio.Future[HeldRay]) -> None:
    address = _own_address(node)
    held = HeldRay("ray worker", parts, grace_s=_GRACE_S)
    await held.begin(ray_environ(node, address=address))
    await asyncio.to_thread(node.make_peer_files, address=address)
    ready.set_result(held)


async def _follow_head(here: _Here) -> None:
    """Do as the head says: answer "preflight" and "peers", copy the model at "stage", start this node's part at
    "go", keep the engine's caches at "ready", and finish requests at "drain". Any other message, and the loss of the
    head, end the run here.
    """
    node, link, parts, run_end = here.node, here.link, here.parts, here.parts.run_end
    preflight = NodePreflight(node)
    try:
        while (message := await link.receive())["kind"] in ("preflight", "peers", "stage"):
            parts.run_in_background(run_end.fail_on_error(_answer(here, preflight, message)))
        preflight.close()
        if message["kind"] == "go":
            if not message.get("keeps_cache"):
                here.node = node = node.without_kept_cache("the head says so")
            parts.run_in_background(run_end.fail_on_error(_start_part(here, message)))
            message = await link.receive()
        while message["kind"] in ("ready", "drain"):
            if message["kind"] == "drain":
                parts.run_in_background(_drain(here, message))
            else:
                await asyncio.to_thread(node.cache.note_ready)
                parts.run_in_background(asyncio.to_thread(node.cache.write_archive))
            message = await link.receive()
        here.end_of_run = Outcome(
            reason=str(message.get("reason")),
            failed_part=message.get("failed_part"),
            exit_code=int(message.get("exit_code") or 0),
        )
        run_end.stop("the head ended the run")
    except LinkLostError as error:
        here.end_of_run = Outcome(failed_part="the head's node", reason=str(error), exit_code=1)
        run_end.stop(str(error))


async def _answer(here: _Here, preflight: NodePreflight, question: Message) -> None:
    """Answer one question of the head; "stage" is answered once the copy is there."""
    told: Message = {}
    if question["kind"] != "stage":
        told = await preflight.answer(question)
    elif here.node.staging is not None:
        from hpc_serve.job.weights.staging import stage

        await stage(here.node.staging, lambda done, total: None)
    await here.link.answer(question, **told)


async def _drain(here: _Here, question: Message) -> None:
    """Finish the requests under way, and answer the head."""
    if here.server is not None:
        cause, drain_s = question["cause"], float(question["drain_s"])
        stop = Outcome(reason=str(question["reason"]), exit_code=0, drain_s=drain_s, drain_cause=cause)
        await here.server.drain(stop)
    await here.link.answer(question)


async def _start_part(here: _Here, go: Message) -> None:
    """Start this node's share of Ray, or of the engine where there is no Ray, as the message `go` says."""
    node, parts = here.node, here.parts
    node.check_gpus()
    parts.run_in_background(_watch_processes(here))
    address = _own_address(node)
    if here.ray is not None:
        held = await here.ray
        argv = worker_argv(node, address=address, head=str(go.get("gcs")))
        await held.release(argv, ray_environ(node, address=address))
        return
    environ = node.child_environ(address=address)
    node.write_settings(str(go.get("settings", "")))
    if node.has_server:
        from hpc_serve.job.worker_server import make_server

        here.server = make_server(node, address, parts)
        await here.server.serve(environ)
    else:
        engine = await parts.start_child("engine", [*headless_argv(node.command), *node.rank_args()], environ)
        parts.add_child(StopOrder.ENGINE, engine, grace_s=_GRACE_S)
        parts.end_with(engine)


async def _watch_processes(here: _Here) -> None:
    """Tell the head of each rank here that has ended, and of each process that is stopped for as long as a silent node
    may be silent.

    The ranks of the other nodes wait for it, and the head's gate sees the processes of its own node alone. Looks are
    counted, and not seconds: if Slurm suspends the job, this launcher stands still as well.
    """
    most_looks = max(_LEAST_LOOKS, round(here.node.silence_s))
    looks: dict[int, int] = {}
    ranks: dict[int, str] = {}
    while True:
        await asyncio.sleep(here.node.silence_s / most_looks)
        found = await asyncio.to_thread(run_processes, here.node.run_mark)
        for pid in ranks.keys() - found.keys():
            await here.link.send("ended", process=f"{ranks[pid]} ({pid})")
        ranks = {pid: name for pid, (name, _) in found.items() if name.startswith(_RANKS)}
        looks = {pid: looks.get(pid, 0) + 1 for pid, (_, is_stopped) in found.items() if is_stopped}
        for pid in [pid for pid, count in looks.items() if count == most_looks]:
            await here.link.send("stopped", process=f"{found[pid][0]} ({pid})")


def _own_address(node: Node) -> str:
    return node_address(interface=node.environ.get("HPC_SERVE_INTERFACE"), towards=node.head)


async def _report_failure(link: Link, run_end: RunEnd, outcome: Outcome) -> None:
    """Tell the head, and wait until it stops the run: srun may end the head's launcher when this one ends."""
    _log.error("%s failed (exit code %d): %s", outcome.failed_part, outcome.exit_code, outcome.reason)
    await link.send(
        "failed",
        part=outcome.failed_part,
        exit_code=outcome.exit_code,
        reason=outcome.reason,
        last_log_lines=outcome.last_log_lines,
    )
    await run_end.wait_for_stop(_REPORT_TIMEOUT_S)
