"""The parts of a run that one launcher looks after: its children, and on the head the workers of the other nodes.

The end of any part ends the run (`RunEnd`). Which parts are started, and when, is decided by the launcher's role
(`head`, `worker`). The order in which they are stopped is the same for both roles and is decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from hpc_serve.job.machine.log_setup import print_line
from hpc_serve.job.machine.network import PortsInUseError
from hpc_serve.job.machine.oom_kills import OomWatch
from hpc_serve.job.machine.process import Child, end_marked, start_child
from hpc_serve.job.run.outcome import Outcome, RunEnd, failure

_PORT_CLASH = re.compile(r"[Aa]ddress already in use|port .* is already (?:in use|used)|EADDRINUSE")
_LEFTOVERS_GRACE_S = 1.0
_POLL_INTERVAL_S = 0.5
_SIGKILL_EXIT_CODE = 137
SIGKILL_RULES = frozenset({"killed", "engine-process-killed"})
SILENT_RULES = SIGKILL_RULES | {"engine-core-gone", "worker-died"}
"""Rules of `diagnose` for a process that ended without a word of its own: by SIGKILL for sure, or as if by it."""


class StopOrder(enum.IntEnum):
    """When a part is stopped: the engine needs the workers and Ray, a worker's Ray needs the head's."""

    ENGINE = 0
    WORKERS = 1
    RAY = 2


class Parts:
    """The parts of this launcher, and the tasks that run beside them.

    `run_mark` is in the environment of all the run's processes on this node. While `is_starting()` is true, a part
    that ends because a port was taken ends the run with exit code 75; then the batch script starts again.
    `node_name` is what people are told of this node.
    """

    def __init__(
        self,
        run_mark: str,
        run_end: RunEnd,
        *,
        is_starting: Callable[[], bool] = lambda: False,
        node_name: str = "this node",
    ) -> None:
        self._run_mark, self.run_end, self._is_starting = run_mark, run_end, is_starting
        self.oom_watch = OomWatch(node_name)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._stops: dict[StopOrder, list[Callable[[], Awaitable[None]]]] = {order: [] for order in StopOrder}

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it is done, or until the parts are taken down."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def run_or_fail(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background. The error that ends it, if any, ends the run."""
        self.run_in_background(self.run_end.fail_on_error(work))

    def add(self, order: StopOrder, stop: Callable[[], Awaitable[None]]) -> None:
        """Have `stop` called when the parts are taken down."""
        self._stops[order].append(stop)

    def add_child(self, order: StopOrder, child: Child, *, grace_s: float) -> None:
        """Have a child stopped when the parts are taken down. It has `grace_s` seconds to end after SIGTERM,
        and fewer where Slurm leaves fewer."""
        self.add(order, lambda: child.stop(min(grace_s, self.run_end.grace_s)))

    def end_with(self, child: Child) -> None:
        """Have the run end with a child's end."""
        self.run_in_background(self._fail_at_end(child))

    async def start_child(
        self,
        name: str,
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        on_line: Callable[[str], None] = print_line,
        is_noise: Callable[[str], bool] = lambda line: False,
        told: bool = False,
    ) -> Child:
        """Start a child; the caller looks after its end. Raises PartFailedError if there is no such command."""
        self.require_command(name, argv[0], environ)
        return await start_child(name, argv, environ, on_line, is_noise=is_noise, told=told)

    def require_command(self, name: str, command: str, environ: Mapping[str, str]) -> None:
        """Raises PartFailedError if the part of that name has no such command on its PATH."""
        if shutil.which(command, path=environ.get("PATH")) is None:
            raise failure(
                name,
                f"no command {command} in this environment: activate one that has it (HPC_SERVE_ENV)",
                exit_code=127,
            )

    def note_change(self) -> None:
        """Have `wait_until_complete` look again at once."""
        self._changed.set()

    async def wait_until_complete(self, missing: Callable[[], str | None], *, part: str, within_s: float) -> None:
        """Wait until `missing()` is None. The deadline starts again whenever its answer changes.

        Raises PartFailedError for `part`.
        """
        before, since = missing(), time.monotonic()
        while before is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _POLL_INTERVAL_S)
            self._changed.clear()
            now = missing()
            if now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > within_s:
                raise failure(part, f"{now} within {within_s:.0f} s")

    async def outcome_of(self, child: Child) -> Outcome:
        """Wait for a child's end, and decide what an end by itself means for the run."""
        code = await child.wait()
        lines = tuple(child.last_log_lines)
        reason = child.failure_reason
        if self._is_starting() and any(_PORT_CLASH.search(line) for line in lines):
            code, reason = PortsInUseError.exit_code, f"{reason}: a port was taken"
        elif words := self._words_of_kernel(child):
            reason = f"{reason}; {words}"
        return Outcome(failed_part=child.name, reason=reason, exit_code=code or 1, last_log_lines=lines)

    async def take_down(self) -> None:
        """Stop all parts in their order, then every process that they left on this node."""
        for task in self._tasks:
            task.cancel()
        for order in StopOrder:
            await asyncio.gather(*(stop() for stop in self._stops[order]))
        await end_marked(self._run_mark, grace_s=_LEFTOVERS_GRACE_S)

    async def _fail_at_end(self, child: Child) -> None:
        await self.run_end.fail(await self.outcome_of(child))

    def _words_of_kernel(self, child: Child) -> str:
        """Explain a child's end by the kernel's OOM counters."""
        rule = child.cause.name if child.cause is not None else ""
        was_killed = child.exit_code == _SIGKILL_EXIT_CODE
        return self.oom_watch.words_of_end(
            by_sigkill=was_killed or rule in SIGKILL_RULES, is_silent=was_killed or rule in SILENT_RULES
        )
