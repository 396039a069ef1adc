"""The head's launcher: it waits for the workers, starts Ray and the engine, and publishes when the service is ready.

`_start` has the steps in their order. A part that ends ends the run at any step (`Parts`, `WorkerLinks`); how the run
ended is decided by `RunEnd`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from dataclasses import asdict, replace
from pathlib import Path

from hpc_serve.errors import StoreError
from hpc_serve.exit_codes import PREFLIGHT_EXIT_CODE
from hpc_serve.job.cleanup.node_dir import write_control_port
from hpc_serve.job.engine.drain import follow_drain_requests
from hpc_serve.job.engine.engine import Engine
from hpc_serve.job.engine.engine_process import EngineEndpoint, make_endpoint
from hpc_serve.job.links.control import ControlServer, WorkerLinks
from hpc_serve.job.links.link import Link, Message
from hpc_serve.job.machine.network import choose_port, listen_on
from hpc_serve.job.preflight.head_side import HeadPreflight, log_report, write_report
from hpc_serve.job.ray.ray_cluster import HeadRay
from hpc_serve.job.run.node import Node
from hpc_serve.job.run.parts import Outcome, Parts, RunEnd, StopOrder, failure
from hpc_serve.job.run.record_keeper import RecordKeeper, take_over
from hpc_serve.rendezvous.claims import claim
from hpc_serve.rendezvous.files import remove_file, write_private
from hpc_serve.rendezvous.record import NodeRecord
from hpc_serve.rendezvous.store import ServiceStore, default_home, drain_file
from hpc_serve.vllm.command import check_layout, settings_text

_log = logging.getLogger(__name__)
_ENDS_ITSELF_S = 4.0  # for an engine whose rank has ended: its own words are better than ours


async def run_head(node: Node) -> int:
    """Run the service from this node until it ends; returns the exit code.

    Raises PortsInUseError if a port is taken, ServiceConflictError if another model has the service's name.
    """
    listener = listen_on()
    write_control_port(Path(node.environ["HPC_SERVE_JOB_DIR"]), listener.getsockname()[1])
    store = ServiceStore(default_home(node.environ))
    service = node.options.service
    claim(store, service, node.command.model)
    endpoint, keeper = make_endpoint(node, store)
    return await Head(node, keeper, endpoint).run(listener)


class Head:
    """One run of one replica, as its head node sees it."""

    def __init__(self, node: Node, keeper: RecordKeeper, endpoint: EngineEndpoint) -> None:
        self._node, self._keeper = node, keeper
        self._run_end = RunEnd(node.options.kill_wait_s)
        self._parts = Parts(
            node.run_mark,
            self._run_end,
            is_starting=lambda: keeper.record.state == "starting",
            node_name=node.allocation.node_name,
        )
        self._preflight: HeadPreflight | None = None
        self._workers = WorkerLinks(
            node.allocation.num_nodes,
            self._parts,
            self._publish_worker,
            self._take_fault,
            # A server that loses the ranks of another node has failed: all are told at once.
            stop_order=StopOrder.ENGINE if node.command.serves_on_each_node else StopOrder.WORKERS,
        )
        self._engine = Engine(
            node, keeper, endpoint, self._parts, read_by_workers=lambda: self._workers.read, on_ready=self._keep_cache
        )

    async def run(self, listener: socket.socket) -> int:
        """Start the service, and take it down when its end is decided; returns the exit code."""
        node = self._node
        self._run_end.stop_on_signals()
        if node.options.preflight != "off":
            self._preflight = HeadPreflight(node)
        control = ControlServer(node, listener, self._workers.add_worker)
        self._parts.run_in_background(self._keeper.renew())
        self._parts.run_in_background(self._parts.oom_watch.run())
        self._parts.run_or_fail(self._start(control))
        drain_requests = self._drain_requests()
        for path in drain_requests:
            self._parts.run_in_background(follow_drain_requests(path, self._run_end))
        self._parts.run_in_background(take_over(self._keeper.store, self._keeper))
        outcome = await self._run_end.wait()
        if not outcome.is_failure and outcome.drain_s > 0:
            outcome = await self._drain(outcome)
        outcome.log()
        self._keeper.publish_end(outcome, node.environ)
        await self._parts.take_down()
        control.close()
        with contextlib.suppress(StoreError):
            for path in drain_requests:
                remove_file(path)
        await self._keeper.finish()
        return outcome.exit_code

    def _drain_requests(self) -> list[Path]:
        """Return the files that ask this run to drain: its own, and that of each other node's server."""
        own, record = Path(self._node.environ["HPC_SERVE_DRAIN_REQUEST"]), self._keeper.record
        others = range(1, record.num_nodes) if self._node.command.serves_on_each_node else ()
        return [
            own,
            *(drain_file(self._keeper.store, record.service, replace(record, replica=rank).name) for rank in others),
        ]

    async def _drain(self, stop: Outcome) -> Outcome:
        """Finish the requests under way at all servers of this run; returns how it ended."""
        others: asyncio.Task[None] | None = None
        if self._node.command.serves_on_each_node:
            others = asyncio.create_task(self._workers.ask_all("drain", **asdict(stop)))
        began = time.monotonic()
        outcome = await self._engine.drain(stop)
        if others is not None and not outcome.is_failure:
            left_s = max(0.0, stop.drain_s - (time.monotonic() - began))
            await self._run_end.wait_for_interruption(others, within_s=left_s)
        return outcome

    # -- the start

    async def _start(self, control: ControlServer) -> None:
        node = self._node
        node.check_gpus()
        check_layout(
            node.command,
            num_nodes=node.allocation.num_nodes,
            device=node.options.device,
            per_node=node.options.gpus_per_node,
            backend=node.backend,
        )
        uses_ray = node.backend == "ray" and node.options.preflight != "only"
        ray = HeadRay(node, self._parts, self._keeper) if uses_ray else None
        if ray is not None:
            await ray.hold(node)
        await self._wait_for_workers()
        control.close()  # all are in, and nobody else has business there
        keeps_cache = self._agree_on_cache()
        node = self._node
        if ray is not None:  # Ray's head reads no weights, so it need not wait for the preflight
            await ray.start_head(node)
        if not await self._are_nodes_fit():
            return
        if ray is not None:
            await self._engine.hold(ray.environ)
        await self._stage_model()
        if ray is not None:
            environ = await ray.engine_environ()
            await self._workers.tell_all("go", keeps_cache=keeps_cache, gcs=environ["RAY_ADDRESS"])
            await ray.wait_for_nodes(self._workers.names)
        else:
            environ = node.child_environ()
            settings = settings_text(node.command, choose_port)
            write_private(node.settings_file, settings)
            await self._workers.tell_all("go", keeps_cache=keeps_cache, settings=settings)
        await self._engine.serve(environ)

    async def _stage_model(self) -> None:
        """Copy the model to every node, all at once, if that is wanted. A copy may take as long as it likes."""
        if self._node.staging is not None:
            from hpc_serve.job.weights.staging import stage

            self._keeper.set_phrase("staging the model")
            others = self._workers.ask_all("stage")
            await asyncio.gather(others, stage(self._node.staging, self._keeper.stages.note_copied))

    def _agree_on_cache(self) -> bool:
        """Return whether the engine's caches outlive the run. vLLM gives its workers over Ray the head's path of them,
        so all nodes must have that folder, and its lock; without Ray each node has its own."""
        cache = self._node.cache
        if cache.lock is None:
            return False
        if self._node.backend == "ray" and not self._workers.have_cache(str(cache.path)):
            self._node = self._node.without_kept_cache(f"not every node has {cache.path} for this run")
            self._keeper.update(cache=self._node.cache.words)
            return False
        return True

    async def _keep_cache(self) -> None:
        """Note that the engine is ready: the next start may use its compiled code."""
        await asyncio.to_thread(self._node.cache.note_ready)
        await self._workers.tell_all("ready")
        self._parts.run_in_background(asyncio.to_thread(self._node.cache.write_archive))

    async def _wait_for_workers(self) -> None:
        total = self._node.allocation.num_nodes
        if total == 1:
            return

        def missing() -> str | None:
            here = len(self._workers) + 1
            self._keeper.set_phrase("waiting for the nodes' launchers", here, total)
            if here == total:
                return None
            ranks = ", ".join(map(str, self._workers.absent_ranks))
            return f"{here} of {total} nodes have joined; no launcher from node rank {ranks} of the job's node list"

        await self._parts.wait_until_complete(missing, part="nodes", within_s=self._node.options.join_s)

    async def _are_nodes_fit(self) -> bool:
        """Return whether the preflight lets the engine start. Raises PartFailedError where it could not start."""
        node, preflight = self._node, self._preflight
        if preflight is None:
            return True
        self._keeper.set_phrase("looking at the nodes")
        report = await preflight.report()
        log_report(report)
        await asyncio.to_thread(write_report, node, self._keeper.store, report)
        found = [verdict.sentence for verdict in report.of_level("failed")]
        if found and node.options.preflight != "warn":
            raise failure("preflight", found[0], exit_code=PREFLIGHT_EXIT_CODE, last_log_lines=tuple(found))
        if node.options.preflight == "only":
            self._run_end.stop(report.summary)
        return node.options.preflight != "only"

    # -- what is published

    def _publish_worker(self, link: Link) -> None:
        node = NodeRecord(name=link.name, address=link.address)
        self._keeper.update(nodes=(*self._keeper.record.nodes, node))
        if self._preflight is not None:
            self._preflight.ask(link)
        self._parts.note_change()

    def _take_fault(self, link: Link, message: Message) -> None:
        """Take what a worker has found of the engine's processes on its node."""
        if message.get("kind") == "ended":
            told = f"its process {message['process']} on {link.name} had ended"
            self._engine.ended_elsewhere = self._engine.ended_elsewhere or told
            self._parts.run_in_background(self._give_up_without(told))
        elif message.get("kind") == "stopped":
            silence_s = self._node.options.silence_s
            reason = f"its process {message['process']} on {link.name} was stopped for {silence_s:g} s"
            if self._engine.watch is not None:
                self._engine.watch.fault = reason
            else:  # it never was ready
                outcome = Outcome(failed_part=f"engine on {link.name}", reason=reason, exit_code=1)
                self._parts.run_in_background(self._run_end.fail(outcome))

    async def _give_up_without(self, told: str) -> None:
        """Give an engine up that goes on without one of its ranks: over Ray, an idle one does not notice its end."""
        watch = self._engine.watch
        await asyncio.sleep(_ENDS_ITSELF_S)
        if watch is not None and watch is self._engine.watch:
            watch.fault, self._engine.ended_elsewhere = told, ""
