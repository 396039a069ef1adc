"""The engine of a run, on its head: started, followed until it is ready, watched, and started again in place.

`engine_watch` asks whether it still works, `Restarts` decides how often it is started. An end after which it is not
started again ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_serve.job.cleanup import node_dir
from hpc_serve.job.cleanup.node_dir import Segment
from hpc_serve.job.engine.drain import Drain
from hpc_serve.job.engine.engine_process import EngineEndpoint, EngineProcess, move_endpoint
from hpc_serve.job.engine.engine_watch import Adapters, EngineWatch
from hpc_serve.job.engine.health import NotReadyError, SmallRequest, check_ready, is_healthy
from hpc_serve.job.machine.allocation import print_line
from hpc_serve.job.machine.network import PortsInUseError, choose_port
from hpc_serve.job.machine.process import ENGINE_MARK, Child, end_marked, marked_pids
from hpc_serve.job.progress import ReadSoFar, RunReading, weight_sizes
from hpc_serve.job.run.node import Node, Restarts
from hpc_serve.job.run.parts import Outcome, PartFailedError, Parts, StopOrder, failure
from hpc_serve.job.run.record_keeper import RecordKeeper
from hpc_serve.trust.connection import NotOurEngineError
from hpc_serve.vllm.log import WEIGHTS_LOADED, StallWatch, is_health_answer, read_figures, read_phrase

_log = logging.getLogger(__name__)
_FIRST_REQUEST_TIMEOUT_S = 600.0
_POLL_INTERVAL_S = 0.5
_CACHE_RULE = "compile-cache"
_ENDED_BY_OTHERS = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM))
_GRACE_S = 10.0
_HUNG_GRACE_S = 5.0
_LEFTOVERS_GRACE_S = 1.0
_SETTLE_S = 1.0


class Engine:
    """The engine of one run. `read_by_workers` says what the run's processes on the other nodes have read so far.

    `on_ready` is called each time it has become ready.
    """

    def __init__(
        self,
        node: Node,
        keeper: RecordKeeper,
        endpoint: EngineEndpoint,
        parts: Parts,
        *,
        read_by_workers: Callable[[], ReadSoFar] = ReadSoFar,
        on_ready: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._node, self.keeper, self._endpoint = node, keeper, endpoint
        self._parts, self._run_end = parts, parts.run_end
        self._read_by_workers, self._on_ready = read_by_workers, on_ready
        self._reading = RunReading(node.run_mark)
        self._stall = StallWatch()
        self.watch: EngineWatch | None = None
        self._has_old_cache = node.cache.is_warm
        self._has_loaded_weights = False
        self._process = EngineProcess(node, parts, on_line=self._read_line, is_noise=self._is_noise)
        self.child: Child | None = None
        self.ended_elsewhere = ""
        """What has ended of the engine on another node, for the reason of the engine's own end."""

    async def hold(self, environ: Mapping[str, str]) -> None:
        """Import the engine's program before `serve` is due; `environ` has the known variables of `serve`."""
        await self._process.hold(self._endpoint, environ)

    async def serve(self, environ: Mapping[str, str]) -> None:
        """Have the engine serve until cancelled. Raises PartFailedError for an end after which it is not started."""
        # The parts of an engine that spans nodes without Ray find each other at their start alone.
        spans_nodes_without_ray = self._node.backend == "mp" and self._node.allocation.num_nodes > 1
        restarts = Restarts(0 if spans_nodes_without_ray else self._node.options.engine_restarts)
        self.keeper.set_phrase("starting the engine")
        self._parts.add(StopOrder.ENGINE, self._stop)
        command = self._node.command
        sizes = await asyncio.to_thread(weight_sizes, Path(command.weights))
        self.keeper.add_figures({"checkpoint_bytes": sum(sizes)} if sizes else {})
        while True:
            self.keeper.stages.note_sizes(sizes)
            outcome, ready_s = await self._run_once(environ)
            may_be_cache = self._may_be_cache(outcome, ready_s)
            wait_s = 0.0 if may_be_cache else restarts.after_end(ready_s)
            if wait_s is None:
                raise PartFailedError(_after_restarts(outcome, restarts.total))
            await self._run_end.wait_for_stop(_SETTLE_S)  # Slurm signals every process of a step at once
            if self._run_end.outcome is not None:
                raise PartFailedError(outcome)
            if not may_be_cache:
                self.keeper.phrase_prefix = f"{restarts.words}: "
                _log.warning("%s, %.0f s after this end: %s", restarts.words, wait_s, outcome.reason)
                self.keeper.start_again(
                    state="starting",
                    stage=restarts.words,
                    progress=None,
                    reason=outcome.reason,
                    last_log_lines=outcome.last_log_lines,
                    engine_restarts=restarts.total,
                    weight_version="",
                )
            await self._clear_up()
            if may_be_cache:
                self._discard_cache(outcome)
            await asyncio.sleep(wait_s)
            self._endpoint = move_endpoint(self._node, self._endpoint)
            self.keeper.update(port=self._endpoint.address.port)
            environ = {**environ, "VLLM_PORT": str(choose_port())}

    async def drain(self, stop: Outcome) -> Outcome:
        """Finish the requests under way, if the engine has begun to serve and answers; returns how the run ended."""
        if self.child is None or self.keeper.record.state != "ready":
            return stop
        return await Drain(
            engine=self.child,
            address=self._endpoint.address,
            gate_file=Path(self._node.environ["HPC_SERVE_DRAIN_FILE"]),
            keeper=self.keeper,
            run_end=self._run_end,
        ).run(stop)

    async def _run_once(self, environ: Mapping[str, str]) -> tuple[Outcome, float | None]:
        """Run the engine until its end, or until it is given up; how that was, and how long it had been ready."""
        self.ended_elsewhere = ""
        self._stall = StallWatch()
        self._has_loaded_weights = False
        self.child = child = await self._process.start(self._endpoint, environ)
        ended = asyncio.create_task(child.wait())
        handing_over = asyncio.create_task(self._endpoint.socket.hand_over())
        serving = asyncio.create_task(self._serve_once(child))
        ready_at_s: float | None = None
        try:
            await asyncio.wait({ended, serving}, return_when=asyncio.FIRST_COMPLETED)
            ready_at_s = self.watch.began_at_s if self.watch is not None else None
            outcome = await self._parts.outcome_of(child) if ended.done() else serving.result()
        except PartFailedError as error:
            outcome = error.outcome
        finally:
            self.watch = None
            await _cancel(ended, serving, handing_over)
            self._endpoint.socket.close()
        words = filter(None, (outcome.reason, self.ended_elsewhere))
        outcome = replace(outcome, reason="; ".join(words))
        return outcome, None if ready_at_s is None else time.monotonic() - ready_at_s

    async def _serve_once(self, child: Child) -> Outcome:
        """Follow a start until the engine is ready, publish that, and watch it; returns if it is to be given up."""
        request = await self._wait_until_ready(child)
        if self._node.command.scheduling_policy == "priority":
            request = request.after_all_others()
        options = self._node.options
        self.watch = EngineWatch(
            address=self._endpoint.address,
            request=request,
            limit_s=options.canary_s,
            give_up_s=options.hang_s,
            keeper=self.keeper,
        )
        adapters = Adapters(self._endpoint.address, self.keeper, has_room=self._node.command.takes_adapters)
        await adapters.bring()
        self.keeper.phrase_prefix, self._has_old_cache = "", False
        mapped = await asyncio.to_thread(self._mapped_segments)  # after a kill nothing shows who owned it
        await asyncio.to_thread(node_dir.write_segments, self._node.node_dir, mapped, seen_by="launcher")
        if self._on_ready is not None:
            await self._on_ready()
        self.keeper.update(state="ready", stage="ready", progress=None, reason=None, last_log_lines=())
        at = self._endpoint.address
        _log.info("%s is ready at https://%s:%d", options.service, at.host, at.port)
        following = [asyncio.create_task(it) for it in (adapters.follow(), self.watch.follow_weights())]
        try:
            reason = await self.watch.run()
        finally:
            await _cancel(*following)
        return Outcome(
            failed_part="engine", reason=f"engine {reason}", exit_code=1, last_log_lines=tuple(child.last_log_lines)
        )

    def _is_noise(self, line: str) -> bool:
        return is_health_answer(line) or (self.watch is not None and self.watch.is_noise(line))

    async def _stop(self) -> None:
        if self.child is not None:
            await self.child.stop(min(_GRACE_S, self._run_end.grace_s))

    async def _clear_up(self) -> None:
        """End what is left of the engine on this node, and remove its shared memory: the next one needs the devices."""
        assert self.child is not None
        unlisted = await asyncio.to_thread(self._mapped_segments)
        await self.child.stop(_HUNG_GRACE_S)
        await end_marked(self._node.run_mark, grace_s=_LEFTOVERS_GRACE_S, variable=ENGINE_MARK)
        await asyncio.to_thread(node_dir.remove_segments, unlisted | node_dir.read_segments(self._node.node_dir))

    def _mapped_segments(self) -> set[Segment]:
        """Return the shared memory of the engine's processes on this node, as far as they live."""
        pids = marked_pids(self._node.run_mark, variable=ENGINE_MARK)
        return node_dir.mapped_by(pids, node_dir.list_segments())

    def _may_be_cache(self, outcome: Outcome, ready_s: float | None) -> bool:
        """Whether the engine may have failed by damaged caches: it was never ready with them, and no cause is known.

        It reads them once it has its weights. An engine on several nodes has caches on all; it is not started again.
        """
        if not (self._has_old_cache and self._has_loaded_weights) or ready_s is not None:
            return False
        if outcome.exit_code in (PortsInUseError.exit_code, *_ENDED_BY_OTHERS):
            return False
        cause = self.child.cause if self.child is not None else None
        is_other = cause is not None and cause.is_known and cause.name != _CACHE_RULE
        return not is_other and self._node.allocation.num_nodes == 1

    def _discard_cache(self, outcome: Outcome) -> None:
        """Remove the caches of earlier starts. Raises PartFailedError if that is not possible."""
        self._has_old_cache = False
        cache = self._node.cache
        stage = "starting the engine again, without the caches of earlier starts"
        _log.warning("%s in %s, since it may have failed by them: %s", stage, cache.path, outcome.reason)
        try:
            cache.discard()
        except OSError as error:
            raise PartFailedError(replace(outcome, reason=f"{outcome.reason} ({cache.path}: {error})")) from error
        words = f"cold, kept in {cache.path} (the engine did not start with what had been there)"
        self.keeper.start_again(stage=stage, progress=None, cache=words)

    async def _wait_until_ready(self, child: Child) -> SmallRequest:
        """Return once the engine is ready, with the request that it answered. Raises PartFailedError."""
        node = self._node
        model = node.command.served_model_names[0]
        is_up = self._endpoint.socket.is_taken  # a connection before that would only wait
        while True:
            try:
                if is_up.is_set() and await asyncio.to_thread(is_healthy, self._endpoint.address):
                    self.keeper.set_phrase("answering a first request")
                    return await asyncio.to_thread(
                        check_ready, self._endpoint.address, model, completion_timeout_s=_FIRST_REQUEST_TIMEOUT_S
                    )
            except NotReadyError as error:
                self.keeper.set_phrase(f"not ready: {error}")
            except NotOurEngineError as error:
                where = f"{self._endpoint.address.host}:{self._endpoint.address.port}"
                raise failure(
                    "engine",
                    f"the server is up, but another program answers at {where}: {error}",
                    exit_code=PortsInUseError.exit_code,
                    last_log_lines=tuple(child.last_log_lines),
                ) from error
            read = await asyncio.to_thread(self._reading.look) + self._read_by_workers()
            self._stall.note_read_bytes(read.total)
            self.keeper.stages.note_read(read)
            if (idle_s := self._stall.idle_s) > node.options.stall_s:
                record = self.keeper.record
                how_far = f"; {record.progress.done} of {record.progress.total} were done" if record.progress else ""
                raise failure(
                    "engine",
                    f"no progress for {idle_s:.0f} s while {record.stage}: the engine logs nothing new and reads "
                    f"nothing{how_far} (HPC_SERVE_STALL_S sets how long that may last)",
                    last_log_lines=tuple(child.last_log_lines),
                )
            if is_up.is_set():
                await asyncio.sleep(_POLL_INTERVAL_S)
            else:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(is_up.wait(), _POLL_INTERVAL_S)

    def _read_line(self, line: str) -> None:
        print_line(line)
        self._stall.note_line(line)
        phrase = read_phrase(line)
        self._has_loaded_weights |= phrase is not None and phrase.text == WEIGHTS_LOADED
        if phrase is not None and self.keeper.record.state == "starting":
            self.keeper.set_phrase(phrase.text, phrase.done, phrase.total)
        self.keeper.add_figures(read_figures(line))


def _after_restarts(outcome: Outcome, total: int) -> Outcome:
    if not total:
        return outcome
    times = "once" if total == 1 else f"{total} times"
    return replace(outcome, reason=f"{outcome.reason} (it had been started again {times})")


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
