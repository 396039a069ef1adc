"""The launcher on a node other than the head: it starts its part when the head says so, and ends when the head does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_serve.errors import InvalidRequestError
from hpc_serve.job.cleanup.node_dir import read_control_port
from hpc_serve.job.links.control import connect
from hpc_serve.job.links.link import Link, LinkLostError, Message
from hpc_serve.job.machine.network import reachable_addresses
from hpc_serve.job.machine.process import run_processes
from hpc_serve.job.preflight.node_side import NodePreflight
from hpc_serve.job.progress import RunReading
from hpc_serve.job.ray.ray_cluster import HeldRay, ray_environ, worker_argv
from hpc_serve.job.run.node import Node
from hpc_serve.job.run.parts import Outcome, Parts, RunEnd, StopOrder, told_outcome
from hpc_serve.rendezvous.files import write_private
from hpc_serve.vllm.command import has_server, headless_argv

if TYPE_CHECKING:
    from hpc_serve.job.engine.engine import Engine

_log = logging.getLogger(__name__)
_REPORT_TIMEOUT_S = 30.0
_GRACE_S = 5.0
_POLL_INTERVAL_S = 0.2
_LEAST_LOOKS = 10
# As vLLM and Ray name the processes of ranks.
_RANKS = ("VLLM::", "ray::RayWorker", "ray::DPMoEEngineCoreActor", "ray::EngineCoreActor")


async def run_worker(node: Node) -> int:
    """Run this node's part until the head or a signal stops it, or it fails; returns the exit code.

    Raises LinkLostError or PortsInUseError if the head cannot be reached, InvalidRequestError if it has this address.
    """
    run_end = RunEnd(node.options.kill_wait_s)
    run_end.stop_on_signals()
    if node.head in reachable_addresses():
        raise InvalidRequestError(
            f"node {node.allocation.node_name} has the head's address {node.head} as well: each node needs its own "
            "address. Name the network that joins them in HPC_SERVE_INTERFACE."
        )
    link = await connect(node, await _control_port(node))
    return await Worker(node, link, run_end).run()


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


class Worker:
    """One run of one replica, as a node other than its head sees it."""

    def __init__(self, node: Node, link: Link, run_end: RunEnd) -> None:
        self._node, self._link, self._run_end = node, link, run_end
        self._parts = Parts(node.run_mark, run_end, node_name=node.allocation.node_name)
        self._ray = HeldRay("ray worker", self._parts, grace_s=_GRACE_S) if node.backend == "ray" else None
        self._server: Engine | None = None
        self._end_of_run: Outcome | None = None
        """How the head says that the run ends."""

    async def run(self) -> int:
        """Do as the head says until the end of the run is decided; returns the exit code."""
        node, parts = self._node, self._parts
        parts.run_in_background(parts.oom_watch.run())
        parts.run_in_background(self._link.send_heartbeats(RunReading(node.run_mark).look))
        try:
            if self._ray is not None:
                parts.run_or_fail(self._ray.hold(node))
            parts.run_in_background(self._follow_head())
            outcome = await self._run_end.wait()
            outcome.log()
            if self._server is not None:
                self._server.keeper.publish_end(self._end_of_run or outcome, node.environ)
            if outcome.is_failure:
                await self._report_failure(outcome)
        finally:
            await parts.take_down()
            if self._server is not None:
                await self._server.keeper.finish()
            await self._link.close()
        return outcome.exit_code

    async def _report_failure(self, outcome: Outcome) -> None:
        """Tell the head, and wait until it stops the run: srun may end the head's launcher when this one ends."""
        await self._link.send("failed", **asdict(outcome))
        await self._run_end.wait_for_stop(_REPORT_TIMEOUT_S)

    async def _follow_head(self) -> None:
        """Do as the head says: answer "preflight" and "peers", copy the model at "stage", start this node's part at
        "go", keep the engine's caches at "ready", and finish requests at "drain". Any other message, and the loss of
        the head, end the run here.
        """
        link, parts = self._link, self._parts
        preflight = NodePreflight(self._node)
        try:
            while (message := await link.receive())["kind"] in ("preflight", "peers", "stage"):
                parts.run_or_fail(self._answer(preflight, message))
            preflight.close()
            if message["kind"] == "go":
                if not message.get("keeps_cache"):
                    self._node = self._node.without_kept_cache("the head says so")
                parts.run_or_fail(self._start_part(message))
                message = await link.receive()
            while message["kind"] in ("ready", "drain"):
                if message["kind"] == "drain":
                    parts.run_in_background(self._drain(message))
                else:
                    await asyncio.to_thread(self._node.cache.note_ready)
                    parts.run_in_background(asyncio.to_thread(self._node.cache.write_archive))
                message = await link.receive()
            self._end_of_run = told_outcome(message)
            self._run_end.stop("the head ended the run")
        except LinkLostError as error:
            self._end_of_run = Outcome(failed_part="the head's node", reason=str(error), exit_code=1)
            self._run_end.stop(str(error))

    async def _answer(self, preflight: NodePreflight, question: Message) -> None:
        """Answer one question of the head; "stage" is answered once the copy is there."""
        told: Message = {}
        if question["kind"] != "stage":
            told = await preflight.answer(question)
        elif self._node.staging is not None:
            from hpc_serve.job.weights.staging import stage

            await stage(self._node.staging, lambda done, total: None)
        await self._link.answer(question, **told)

    async def _drain(self, question: Message) -> None:
        """Finish the requests under way, and answer the head."""
        if self._server is not None:
            await self._server.drain(told_outcome(question))
        await self._link.answer(question)

    async def _start_part(self, go: Message) -> None:
        """Start this node's share of Ray, or of the engine where there is no Ray, as the message `go` says."""
        node, parts = self._node, self._parts
        node.check_gpus()
        parts.run_in_background(self._watch_processes())
        if self._ray is not None:
            await self._ray.release(worker_argv(node, head=str(go.get("gcs"))), ray_environ(node))
            return
        environ = node.child_environ()
        write_private(node.settings_file, str(go.get("settings", "")))
        if has_server(node.command, node.allocation.node_rank):
            await self._serve(environ)
        else:
            engine = await parts.start_child("engine", [*headless_argv(node.command), *node.rank_args()], environ)
            parts.add_child(StopOrder.ENGINE, engine, grace_s=_GRACE_S)
            parts.end_with(engine)

    async def _serve(self, environ: Mapping[str, str]) -> None:
        """Have this node serve, where each node has a server (`--data-parallel-hybrid-lb`).

        It has its own record, so that clients choose among the servers. Its ranks share experts with those of the other
        nodes. So the head decides when it drains and how it ends, and its own end ends the run.
        """
        from hpc_serve.job.engine.engine import Engine
        from hpc_serve.job.engine.engine_process import make_endpoint  # most workers have no server
        from hpc_serve.rendezvous.store import ServiceStore, default_home

        endpoint, keeper = make_endpoint(self._node, ServiceStore(default_home(self._node.environ)))
        self._parts.run_in_background(keeper.renew())
        self._server = Engine(self._node, keeper, endpoint, self._parts)
        await self._server.serve(environ)

    async def _watch_processes(self) -> None:
        """Tell the head of each rank here that has ended, and of each process that is stopped for as long as a silent
        node may be silent.

        The ranks of the other nodes wait for it, and the head's gate sees the processes of its own node alone. Looks
        are counted, and not seconds: if Slurm suspends the job, this launcher stands still as well.
        """
        most_looks = max(_LEAST_LOOKS, round(self._node.options.silence_s))
        looks: dict[int, int] = {}
        ranks: dict[int, str] = {}
        while True:
            await asyncio.sleep(self._node.options.silence_s / most_looks)
            found = await asyncio.to_thread(run_processes, self._node.run_mark)
            for pid in ranks.keys() - found.keys():
                await self._link.send("ended", process=f"{ranks[pid]} ({pid})")
            ranks = {pid: name for pid, (name, _) in found.items() if name.startswith(_RANKS)}
            looks = {pid: looks.get(pid, 0) + 1 for pid, (_, is_stopped) in found.items() if is_stopped}
            for pid in [pid for pid, count in looks.items() if count == most_looks]:
                await self._link.send("stopped", process=f"{found[pid][0]} ({pid})")
