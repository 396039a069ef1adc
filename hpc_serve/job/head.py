"""The head's launcher: gathers the nodes, starts Ray and the engine, says when the service is ready, and how it ended.

The order is a straight line (`_bring_up`); what may go wrong at any moment (a child ends, a node is lost) and the way
down are of `Parts`.
"""

from __future__ import annotations

import asyncio
import signal
import socket

from hpc_serve.job.control import ControlServer
from hpc_serve.job.health import EngineAddress, NotReadyError, check_ready, is_healthy
from hpc_serve.job.network import choose_ports
from hpc_serve.job.node import Node
from hpc_serve.job.outcome import Ending, Outcome, failure
from hpc_serve.job.parts import Parts
from hpc_serve.job.process import Child, start_child
from hpc_serve.job.ray_cluster import RayNodes, head_argv, parse_nodes, ray_environ, watch_nodes_argv
from hpc_serve.job.record_keeper import RecordKeeper
from hpc_serve.vllm.command import check_layout, head_args, multi_node_args
from hpc_serve.vllm.log import read_figures, read_stage
from hpc_serve.vllm.start_progress import StartProgress

_FIRST_REQUEST_S = 600.0
_POLL_S = 0.5
_HEALTH_S = 10.0


class Head:
    """One run of one replica, seen from its head node."""

    def __init__(self, node: Node, keeper: RecordKeeper, api_key: str) -> None:
        self._node = node
        self._keeper = keeper
        self._ending = Ending()
        self._parts = Parts(node, keeper, self._ending)
        self._ray_nodes = RayNodes({})
        self._progress = StartProgress()
        self._engine = EngineAddress(host=node.head, port=keeper.record.port, api_key=api_key)

    async def run(self, listener: socket.socket) -> int:
        """From the first node to the last process; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.stop, f"{number.name} (cancelled, preempted, or out of time)")
        control = ControlServer(
            self._node.token, self._node.allocation.node_name, self._parts.welcome, silence_s=self._node.silence_s
        )
        await control.start(listener)
        self._parts.spawn(self._keeper.keep())
        self._parts.spawn(self._parts.guarded(self._bring_up()))
        outcome = await self._ending.wait()
        self._announce(outcome)
        await self._parts.take_down()
        control.close()
        if not outcome.is_failure:
            self._keeper.update(state="stopped", stage="stopped", progress=None, reason=outcome.reason, exit_code=0)
        return outcome.exit_code

    # -- the way up

    async def _bring_up(self) -> None:
        node = self._node
        node.check_gpus()
        check_layout(
            node.command,
            num_nodes=node.allocation.num_nodes,
            device=node.options.device,
            per_node=node.options.gpus_per_node,
            backend=node.backend,
        )
        await self._gather()
        environ = node.child_environ(address=node.head)
        uses_ray = node.backend == "ray"
        if uses_ray:
            environ = ray_environ(environ)
            await self._start_ray(environ)
        for link in self._parts.links.values():
            await link.send("go")
        if uses_ray:
            await self._wait_for_ray_nodes(environ)
        self._keeper.stage("starting the engine")
        engine = await self._start_engine(environ)
        await self._wait_until_ready(engine)
        self._keeper.update(state="ready", stage="ready", progress=None)
        print(f"hpc-serve: {node.options.service} is ready at {node.head}:{self._engine.port}", flush=True)
        await self._watch_health()

    async def _gather(self) -> None:
        total = self._node.allocation.num_nodes
        if total == 1:
            return

        def missing() -> str | None:
            here = len(self._parts.links) + 1
            self._keeper.stage("waiting for the nodes' launchers", here, total)
            if here == total:
                return None
            absent = sorted(set(range(1, total)) - set(self._parts.links))
            ranks = ", ".join(map(str, absent))
            return f"{here} of {total} nodes came; no launcher from node rank {ranks} of the job's node list"

        await self._parts.until(missing, part="nodes", within_s=self._node.options.join_s)

    async def _start_ray(self, environ: dict[str, str]) -> None:
        node = self._node
        self._keeper.stage("starting Ray's head")
        options = node.ray_options(address=node.head)
        (client_port,) = choose_ports(1)
        argv = head_argv(options, gcs_port=node.head_ports.gcs, client_port=client_port)
        await self._parts.start("ray head", argv, environ)

        def missing() -> str | None:
            with socket.socket() as probe:
                probe.settimeout(1)
                return "Ray's GCS does not listen" if probe.connect_ex((node.head, node.head_ports.gcs)) else None

        await self._parts.until(missing, part="ray head", within_s=node.options.join_s)

    async def _wait_for_ray_nodes(self, environ: dict[str, str]) -> None:
        node = self._node
        expected = {node.head: node.allocation.node_name}
        expected |= {link.address: link.name for link in self._parts.links.values()}

        def on_line(line: str) -> None:
            if (nodes := parse_nodes(line)) is not None:
                self._ray_nodes = nodes
                self._parts.news.set()

        watcher = await start_child("ray nodes", watch_nodes_argv(node.options.device), environ, on_line)

        def missing() -> str | None:
            sentences = self._ray_nodes.missing(expected, node.options.device, node.options.gpus_per_node)
            joined = set(expected) & set(self._ray_nodes.devices)
            self._keeper.stage("waiting for Ray nodes", len(joined), len(expected))
            if watcher.exit_code is not None:
                return "; ".join(["Ray cannot be asked for its nodes", *list(watcher.last_log_lines)[-3:]])
            return "; ".join(sentences) or None

        try:
            await self._parts.until(missing, part="ray nodes", within_s=node.options.join_s)
        finally:
            await watcher.stop(grace_s=2)

    async def _start_engine(self, environ: dict[str, str]) -> Child:
        node, command = self._node, self._node.command
        host = "127.0.0.1" if node.allocation.cluster == "local" else "0.0.0.0"
        device, port = node.options.device, self._engine.port
        argv = [*command.argv, *head_args(command, host=host, port=port, device=device, backend=node.backend)]
        if node.backend == "mp" and node.allocation.num_nodes > 1:
            master = (node.head, node.head_ports.torch_master)
            argv += multi_node_args(num_nodes=node.allocation.num_nodes, node_rank=0, master=master)
        print(f"hpc-serve: engine command: {' '.join(argv)}", flush=True)
        self._progress = StartProgress()
        return await self._parts.start("engine", argv, environ, self._read_engine_line)

    async def _wait_until_ready(self, engine: Child) -> None:
        node = self._node
        model = node.command.served_model_names[0]
        while True:
            if await asyncio.to_thread(is_healthy, self._engine):
                self._keeper.stage("answering a first request")
                try:
                    await asyncio.to_thread(check_ready, self._engine, model, completion_timeout_s=_FIRST_REQUEST_S)
                    return
                except NotReadyError as error:
                    self._keeper.stage(f"not ready: {error}")
            self._progress.note_read_bytes(await self._parts.read_bytes())
            if (idle_s := self._progress.idle_s) > node.options.stall_s:
                raise failure(
                    "engine",
                    f"no progress for {idle_s:.0f} s while {self._keeper.record.stage}: "
                    "it says nothing new and reads nothing (HPC_SERVE_STALL_S sets how long that may last)",
                    last_log_lines=tuple(engine.last_log_lines),
                )
            await asyncio.sleep(_POLL_S)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_S)
            healthy = await asyncio.to_thread(is_healthy, self._engine)
            self._keeper.stage("ready" if healthy else "the engine does not answer /health")

    def _read_engine_line(self, line: str) -> None:
        print(line, flush=True)
        self._progress.note_line(line)
        if (stage := read_stage(line)) and self._keeper.record.state == "starting":
            self._keeper.stage(stage.name, stage.done, stage.total)
        self._keeper.measure(read_figures(line))

    # -- the way down

    def _announce(self, outcome: Outcome) -> None:
        print(f"hpc-serve: the end: {outcome.failed_part or 'stopped'}: {outcome.reason}", flush=True)
        if outcome.is_failure:
            self._keeper.update(
                state="failed",
                progress=None,
                reason=outcome.reason,
                failed_part=outcome.failed_part,
                exit_code=outcome.exit_code,
                last_log_lines=outcome.last_log_lines,
            )
        else:
            self._keeper.update(state="draining", stage="stopping", progress=None, reason=outcome.reason)
