"""The engine of a run, on its head: started, followed until it is ready, and watched from then on.

Whether it still answers is decided in `canary`. What its end means for the run is decided by `Parts`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from hpc_serve.job.endpoint import Endpoint
from hpc_serve.job.engine_watch import EngineWatch
from hpc_serve.job.health import EngineAddress, NotReadyError, SmallRequest, check_ready, is_healthy
from hpc_serve.job.log_setup import print_line
from hpc_serve.job.node import Node
from hpc_serve.job.outcome import drain_s_after_signal, failure
from hpc_serve.job.parts import Parts, StopOrder
from hpc_serve.job.process import Child, read_bytes
from hpc_serve.job.record_keeper import RecordKeeper
from hpc_serve.vllm.command import head_args
from hpc_serve.vllm.log import read_figures, read_stage
from hpc_serve.vllm.start_progress import StartProgress

_log = logging.getLogger(__name__)
_FIRST_REQUEST_TIMEOUT_S = 600.0
_POLL_INTERVAL_S = 0.5
_GRACE_S = 10.0


class Engine:
    """The engine of one run. `workers_read_bytes` says what the run's processes on the other nodes have read so far."""

    def __init__(
        self,
        node: Node,
        keeper: RecordKeeper,
        endpoint: Endpoint,
        parts: Parts,
        *,
        workers_read_bytes: Callable[[], int],
    ) -> None:
        self._node, self._keeper, self._endpoint, self._parts = node, keeper, endpoint, parts
        self._workers_read_bytes = workers_read_bytes
        self._progress = StartProgress()
        self._watch: EngineWatch | None = None
        self.child: Child | None = None

    @property
    def address(self) -> EngineAddress:
        """Where it listens."""
        return self._endpoint.address

    async def serve(self, environ: Mapping[str, str]) -> None:
        """Start the engine, publish that it is ready, and watch it until cancelled. Raises PartFailedError."""
        self._keeper.set_stage("starting the engine")
        self.child = await self._start(environ)
        request = await self._wait_until_ready(self.child)
        self._keeper.update(state="ready", stage="ready", progress=None)
        _log.info("%s is ready at %s", self._node.options.service, self._endpoint.url)
        if self._node.command.scheduling_policy == "priority":
            request = request.after_all_others()
        self._watch = EngineWatch(
            address=self.address, request=request, limit_s=self._node.options.canary_limit_s, keeper=self._keeper
        )
        await self._watch.run()

    async def _start(self, environ: Mapping[str, str]) -> Child:
        node, command = self._node, self._node.command
        host = "127.0.0.1" if node.allocation.cluster == "local" else "0.0.0.0"
        added = head_args(
            command,
            host=host,
            port_file=str(self._endpoint.port_file),
            device=node.options.device,
            backend=node.backend,
            tls_files=self._endpoint.tls_files,
            shutdown_timeout_s=int(drain_s_after_signal(node.options.kill_wait_s)),
        )
        argv = [*command.argv, *added, *node.multi_node_args()]
        _log.info("engine command: %s", " ".join(argv))
        self._progress = StartProgress()
        return await self._parts.start(
            "engine",
            argv,
            {**environ, **self._endpoint.environ},
            order=StopOrder.ENGINE,
            grace_s=_GRACE_S,
            on_line=self._read_line,
            is_noise=lambda line: self._watch is not None and self._watch.is_noise(line),
        )

    async def _wait_until_ready(self, child: Child) -> SmallRequest:
        """Return once the engine is ready, with the request that it answered. Raises PartFailedError."""
        node = self._node
        model = node.command.served_model_names[0]
        while True:
            if await asyncio.to_thread(is_healthy, self.address):
                self._keeper.set_stage("answering a first request")
                try:
                    return await asyncio.to_thread(
                        check_ready, self.address, model, completion_timeout_s=_FIRST_REQUEST_TIMEOUT_S
                    )
                except NotReadyError as error:
                    self._keeper.set_stage(f"not ready: {error}")
            self._progress.note_read_bytes(await self._read_bytes())
            if (idle_s := self._progress.idle_s) > node.options.stall_s:
                raise failure(
                    "engine",
                    f"no progress for {idle_s:.0f} s while {self._keeper.record.stage}: the engine logs nothing new "
                    "and reads nothing (HPC_SERVE_STALL_S sets how long that may last)",
                    last_log_lines=tuple(child.last_log_lines),
                )
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def _read_bytes(self) -> int:
        """What the run's processes on all nodes have read so far; it grows while weights are loaded."""
        return await asyncio.to_thread(read_bytes, self._node.run_mark) + self._workers_read_bytes()

    def _read_line(self, line: str) -> None:
        print_line(line)
        self._progress.note_line(line)
        if (stage := read_stage(line)) and self._keeper.record.state == "starting":
            self._keeper.set_stage(stage.name, stage.done, stage.total)
        self._keeper.add_figures(read_figures(line))
