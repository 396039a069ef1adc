"""The head's launcher: gathers the nodes, starts Ray and the engine, says when the service is ready, and ends it all.

The order is a straight line (`_bring_up`); what may go wrong at any moment (a child ends, a node is lost, a signal
comes) is decided once by `Ending`, and the way down is the same from everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from hpc_serve.errors import HpcServeError
from hpc_serve.job.command import check_layout, head_args, multi_node_args
from hpc_serve.job.control import ControlServer, Link, LinkLostError
from hpc_serve.job.health import EngineAddress, NotReadyError, check_ready, is_healthy
from hpc_serve.job.node import Node
from hpc_serve.job.outcome import Ending, Outcome, PartFailedError, failure
from hpc_serve.job.process import Child, end_marked, read_bytes, start_child
from hpc_serve.job.progress import stage_of
from hpc_serve.job.ray_cluster import RayNodes, head_argv, parse_nodes, ray_environ, watch_nodes_argv
from hpc_serve.job.service import RecordKeeper
from hpc_serve.plan.measured import parse_measured

_PORT_CLASH = re.compile(r"[Aa]ddress already in use|port .* is already (?:in use|used)|EADDRINUSE")
_FIRST_REQUEST_S = 600.0
_ENGINE_GRACE_S = 10.0
_NODES_GRACE_S = 10.0
_RAY_GRACE_S = 4.0
_POLL_S = 0.5
_HEALTH_S = 10.0


class Head:
    """One run of one replica, seen from its head node."""

    def __init__(self, node: Node, keeper: RecordKeeper, api_key: str) -> None:
        self._node = node
        self._keeper = keeper
        self._ending = Ending()
        self._links: dict[int, Link] = {}
        self._children: list[Child] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._ray_nodes = RayNodes({})
        port = node.command.port or node.head_ports.engine
        self._engine = EngineAddress(host=node.head, port=port, api_key=api_key)

    async def run(self, listener: socket.socket) -> int:
        """From the first node to the last process; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.stop, f"{number.name} (cancelled, preempted, or out of time)")
        control = ControlServer(
            self._node.token, self._node.allocation.node_name, self._welcome, silence_s=self._node.silence_s
        )
        await control.start(listener)
        self._spawn(self._keeper.keep())
        self._spawn(self._guarded(self._bring_up()))
        outcome = await self._ending.wait()
        self._announce(outcome)
        await self._take_down()
        control.close()
        if not outcome.is_failure:
            self._keeper.update(state="stopped", stage="stopped", progress=None, reason=outcome.reason, exit_code=0)
        return outcome.exit_code

    # -- the way up

    async def _bring_up(self) -> None:
        node = self._node
        node.check_gpus()
        check_layout(node.command, num_nodes=node.allocation.num_nodes, gpus_per_node=node.options.gpus_per_node)
        await self._gather()
        environ = node.child_environ(address=node.head, ports=node.head_ports)
        uses_ray = node.backend == "ray"
        if uses_ray:
            environ = ray_environ(environ)
            await self._start_ray(environ)
        for link in self._links.values():
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
            here = len(self._links) + 1
            self._keeper.stage("waiting for the nodes' launchers", here, total)
            if here == total:
                return None
            absent = sorted(set(range(1, total)) - set(self._links))
            ranks = ", ".join(map(str, absent))
            return f"{here} of {total} nodes came; no launcher from node rank {ranks} of the job's node list"

        await self._until(missing, part="nodes", within_s=self._node.options.join_s)

    async def _start_ray(self, environ: dict[str, str]) -> None:
        node = self._node
        self._keeper.stage("starting Ray's head")
        share = node.ray_share(address=node.head, ports=node.head_ports)
        await self._start("ray head", head_argv(share), environ)

        def missing() -> str | None:
            with socket.socket() as probe:
                probe.settimeout(1)
                return "Ray's GCS does not listen" if probe.connect_ex((node.head, node.head_ports.gcs)) else None

        await self._until(missing, part="ray head", within_s=node.options.join_s)

    async def _wait_for_ray_nodes(self, environ: dict[str, str]) -> None:
        node = self._node
        expected = {node.head: node.allocation.node_name}
        expected |= {link.address: link.name for link in self._links.values()}

        def on_line(line: str) -> None:
            if (nodes := parse_nodes(line)) is not None:
                self._ray_nodes = nodes
                self._news.set()

        watcher = await start_child("ray nodes", watch_nodes_argv(), environ, on_line)

        def missing() -> str | None:
            sentences = self._ray_nodes.missing(expected, node.options.gpus_per_node)
            self._keeper.stage("waiting for Ray nodes", len(set(expected) & set(self._ray_nodes.gpus)), len(expected))
            if watcher.exit_code is not None:
                return "; ".join(["Ray cannot be asked for its nodes", *list(watcher.last_words)[-3:]])
            return "; ".join(sentences) or None

        try:
            await self._until(missing, part="ray nodes", within_s=node.options.join_s)
        finally:
            await watcher.stop(grace_s=2)

    async def _start_engine(self, environ: dict[str, str]) -> Child:
        node, command = self._node, self._node.command
        host = "127.0.0.1" if node.allocation.cluster == "local" else "0.0.0.0"
        argv = [*command.argv, *head_args(command, host=host, port=self._engine.port, backend=node.backend)]
        if node.backend == "mp" and node.allocation.num_nodes > 1:
            master = (node.head, node.head_ports.torch_master)
            argv += multi_node_args(num_nodes=node.allocation.num_nodes, node_rank=0, master=master)
        print(f"hpc-serve: engine command: {' '.join(argv)}", flush=True)
        return await self._start("engine", argv, environ, self._read_engine_line)

    async def _wait_until_ready(self, engine: Child) -> None:
        node = self._node
        model = node.command.served_model_names[0]
        seen, progress_s = -1, time.monotonic()
        while True:
            if await asyncio.to_thread(is_healthy, self._engine):
                self._keeper.stage("answering a first request")
                try:
                    await asyncio.to_thread(check_ready, self._engine, model, completion_timeout_s=_FIRST_REQUEST_S)
                    return
                except NotReadyError as error:
                    self._keeper.stage(f"not ready: {error}")
            moved = await asyncio.to_thread(read_bytes, node.mark) + sum(
                link.read_bytes for link in self._links.values()
            )
            if moved != seen:
                seen, progress_s = moved, time.monotonic()
            idle_s = time.monotonic() - max(progress_s, engine.last_output_s)
            if idle_s > node.options.stall_s:
                raise failure(
                    "engine",
                    f"no progress for {idle_s / 60:.0f} minutes while {self._keeper.record.stage}: "
                    "no output, nothing read (HPC_SERVE_STALL_S sets how long that may last)",
                    last_words=tuple(engine.last_words),
                )
            await asyncio.sleep(_POLL_S)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_S)
            healthy = await asyncio.to_thread(is_healthy, self._engine)
            self._keeper.stage("ready" if healthy else "the engine does not answer /health")

    # -- what may happen at any moment

    def _welcome(self, link: Link) -> None:
        if not 0 < link.rank < self._node.allocation.num_nodes or link.rank in self._links:
            self._spawn(link.close())
            return
        print(f"hpc-serve: node {link.name} ({link.address}) is here", flush=True)
        self._links[link.rank] = link
        nodes = self._keeper.record.nodes
        self._keeper.update(nodes=(*nodes, type(nodes[0])(name=link.name, address=link.address)))
        self._news.set()
        self._spawn(link.beat(lambda: 0))
        self._spawn(self._listen(link))

    async def _listen(self, link: Link) -> None:
        try:
            message = await link.receive()
            outcome = Outcome(
                failed_part=f"{message['part']} on {link.name}",
                reason=str(message["reason"]),
                exit_code=int(message["exit_code"]) or 1,
                last_words=tuple(message["last_words"]),
            )
        except LinkLostError as error:
            outcome = Outcome(failed_part=f"node {link.name}", reason=str(error), exit_code=1)
        await self._ending.fail(outcome)

    async def _watch(self, child: Child) -> None:
        code = await child.wait()
        words = tuple(child.last_words)
        reason = child.epitaph
        if self._keeper.record.state == "starting" and any(_PORT_CLASH.search(line) for line in words):
            code, reason = 75, f"{reason}: a port was taken"
        await self._ending.fail(Outcome(failed_part=child.name, reason=reason, exit_code=code or 1, last_words=words))

    def _read_engine_line(self, line: str) -> None:
        print(line, flush=True)
        if (stage := stage_of(line)) and self._keeper.record.state == "starting":
            self._keeper.stage(stage.name, stage.done, stage.total)
        self._keeper.measure(parse_measured(line))

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
                last_words=outcome.last_words,
            )
        else:
            self._keeper.update(state="draining", stage="stopping", progress=None, reason=outcome.reason)

    async def _take_down(self) -> None:
        for task in self._tasks:
            task.cancel()
        engines = [child for child in self._children if child.name == "engine"]
        others = [child for child in self._children if child.name != "engine"]
        await asyncio.gather(*(child.stop(_ENGINE_GRACE_S) for child in engines))
        await asyncio.gather(*(self._dismiss(link) for link in self._links.values()))
        await asyncio.gather(*(child.stop(_RAY_GRACE_S) for child in others))
        await end_marked(self._node.mark, grace_s=1)

    async def _dismiss(self, link: Link) -> None:
        """Send a worker home and wait until it has ended its part: a raylet that outlives its head lingers."""
        await link.send("stop")
        with contextlib.suppress(LinkLostError, asyncio.TimeoutError):
            await asyncio.wait_for(link.receive(), _NODES_GRACE_S)
        await link.close()

    # -- helpers

    async def _start(
        self, name: str, argv: list[str], environ: dict[str, str], on_line: Callable[[str], None] | None = None
    ) -> Child:
        try:
            child = await start_child(name, argv, environ, on_line or (lambda line: print(line, flush=True)))
        except FileNotFoundError as error:
            raise failure(
                name, f"no command {error} in this environment: activate one that has it (HPC_SERVE_ENV)", exit_code=127
            ) from error
        self._children.append(child)
        self._spawn(self._watch(child))
        return child

    async def _until(self, missing: Callable[[], str | None], *, part: str, within_s: float) -> None:
        """Wait until nothing is missing; every change of what is missing starts the deadline anew."""
        before, since = missing(), time.monotonic()
        while before is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), _POLL_S)
            self._news.clear()
            now = missing()
            if now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > within_s:
                raise failure(part, f"{now} within {within_s:.0f} s")

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except PartFailedError as error:
            await self._ending.fail(error.outcome)
        except HpcServeError as error:
            await self._ending.fail(Outcome(failed_part="launcher", reason=str(error), exit_code=error.exit_code))
        except Exception as error:
            traceback.print_exc()
            await self._ending.fail(
                Outcome(failed_part="launcher", reason=f"{type(error).__name__}: {error}", exit_code=1)
            )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
