"""The engine's process: its command, and the imports that are done before it may start.

Over Ray the engine starts once all nodes have joined. Until then a child process imports vLLM's command line
(`engine_start`), which takes five seconds of a core. At the start the child is told the command, and becomes the
engine. It acts on no word of the command before. The command itself is started in three cases: `vllm` is not the script
of this Python; the device is a TPU, because an import may take its chips; the engine is started a second time or later.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Mapping

from hpc_serve.gate.engine_facts import LEAST_STEP_VARIABLE
from hpc_serve.job.engine import engine_start
from hpc_serve.job.engine.endpoint import EngineEndpoint
from hpc_serve.job.machine.own_script import is_own_script
from hpc_serve.job.machine.process import ENGINE_MARK, Child, mark_environ
from hpc_serve.job.run.node import Node
from hpc_serve.job.run.outcome import drain_s_after_signal
from hpc_serve.job.run.parts import Parts, StopOrder
from hpc_serve.rendezvous.gate_headers import LAUNCHER_VARIABLE
from hpc_serve.vllm.command import server_args

_log = logging.getLogger(__name__)
_NAME = "engine"
_GRACE_S = 1.0


class EngineProcess:
    """Starts the engine's process on the head. `on_line` gets its lines, without the lines that are noise."""

    def __init__(
        self, node: Node, parts: Parts, *, on_line: Callable[[str], None], is_noise: Callable[[str], bool]
    ) -> None:
        self._node, self._parts = node, parts
        self._on_line, self._is_noise = on_line, is_noise
        self._held: Child | None = None

    async def hold(self, endpoint: EngineEndpoint, environ: Mapping[str, str]) -> None:
        """Start the import of vLLM, if possible. `environ` lacks only RAY_ADDRESS of what `start` will have."""
        script = shutil.which(self._node.command.argv[0], path=environ.get("PATH"))
        if self._node.options.device == "TPU" or not is_own_script(script, engine_start.VLLM_MODULE):
            return
        assert script is not None
        argv = [sys.executable, "-m", engine_start.__name__, script, *self._argv(endpoint)[1:]]
        self._parts.add(StopOrder.ENGINE, self._end_held)
        with contextlib.suppress(OSError):  # the start says what is wrong
            self._held = await self._parts.start_child(
                _NAME,
                argv,
                self._environ(endpoint, environ),
                on_line=self._on_line,
                is_noise=self._is_noise,
                told=True,
            )

    async def start(self, endpoint: EngineEndpoint, environ: Mapping[str, str]) -> Child:
        """Start the engine with exactly `environ` and what its endpoint needs. Raises PartFailedError."""
        argv = self._argv(endpoint)
        _log.info("engine command: %s", " ".join(argv))
        held, self._held = self._held, None
        if held is not None and held.exit_code is None:
            held.tell(json.dumps({"RAY_ADDRESS": environ["RAY_ADDRESS"]}))
            return held
        return await self._parts.start_child(
            _NAME, argv, self._environ(endpoint, environ), on_line=self._on_line, is_noise=self._is_noise
        )

    async def _end_held(self) -> None:
        if self._held is not None:
            await self._held.stop(min(_GRACE_S, self._parts.run_end.grace_s))

    def _argv(self, endpoint: EngineEndpoint) -> list[str]:
        node, command = self._node, self._node.command
        added = server_args(
            command,
            tls_files=endpoint.tls_files,
            shutdown_timeout_s=int(drain_s_after_signal(node.options.kill_wait_s)),
        )
        return [*command.argv, *added, *node.rank_args()]

    def _environ(self, endpoint: EngineEndpoint, environ: Mapping[str, str]) -> dict[str, str]:
        least_step = {LEAST_STEP_VARIABLE: str(self._node.options.canary_s)}
        mark = mark_environ(self._node.run_mark, variable=ENGINE_MARK)
        adapters: dict[str, str] = {}
        if self._node.command.takes_adapters:
            adapters = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", LAUNCHER_VARIABLE: endpoint.address.token}
        return {**environ, **endpoint.socket.environ, **least_step, **adapters, **mark}
