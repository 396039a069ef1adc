"""The end of a run, the parts that one launcher looks after, and the order in which they are stopped.

Parts are the launcher's children, and on the head the workers of the other nodes. The end of any part ends the run. The
end is decided once (`RunEnd`): the first cause counts, and its consequences do not. The launcher's role (`head`,
`worker`) decides which parts are started, and when.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import re
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hpc_serve.errors import HpcServeError
from hpc_serve.job.machine.allocation import print_line
from hpc_serve.job.machine.network import PortsInUseError
from hpc_serve.job.machine.node_memory import OomWatch
from hpc_serve.job.machine.process import Child, end_marked
from hpc_serve.rendezvous.store import DrainCause

_log = logging.getLogger(__name__)

# -- the end of a run

# Slurm signals every process of a step at once, so a child's end may be seen before our own signal.
_SETTLE_S = 1.0
# scancel and the end of the time limit may send SIGTERM more than once, and the script passes its own on.
_SAME_SIGNAL_S = 3.0
# Seconds from the end of a drain to the end of the run: engine, workers, Ray, last record.
_WAY_DOWN_S = 8.0
_LEAST_GRACE_S = 3.0
KILL_WAIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a replica ended: stopped on purpose (`failed_part` is None), or the part that failed and its last lines.

    `drain_cause` says why it drains, `drain_s` is how long the requests under way may take before a stop.
    """

    reason: str
    exit_code: int
    failed_part: str | None = None
    last_log_lines: tuple[str, ...] = ()
    drain_s: float = 0.0
    drain_cause: DrainCause = "slurm"

    @property
    def is_failure(self) -> bool:
        return self.failed_part is not None

    def log(self) -> None:
        """Log how the run ends."""
        if self.is_failure:
            _log.error("%s failed (exit code %d): %s", self.failed_part, self.exit_code, self.reason)
        else:
            _log.info("stopping: %s", self.reason)


def told_outcome(message: Mapping[str, Any]) -> Outcome:
    """Return the outcome that another launcher has sent (`dataclasses.asdict`), or a part of one."""
    told = {one.name: message[one.name] for one in fields(Outcome) if one.name in message}
    told["last_log_lines"] = tuple(told.get("last_log_lines", ()))
    return Outcome(**{"reason": "", "exit_code": 0, **told})


class PartFailedError(Exception):
    """A part of the replica failed. The error carries the outcome to report."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


def outcome_of(error: Exception) -> Outcome:
    """Return how a run ends that this error of its launcher ends."""
    if isinstance(error, PartFailedError):
        return error.outcome
    if isinstance(error, HpcServeError):
        return Outcome(failed_part="launcher", reason=str(error), exit_code=error.exit_code)
    _log.error("unexpected error", exc_info=error)
    return Outcome(failed_part="launcher", reason=f"{type(error).__name__}: {error}", exit_code=1)


def failure(part: str, reason: str, *, exit_code: int = 1, last_log_lines: tuple[str, ...] = ()) -> PartFailedError:
    """Return the error of a part that failed, to be raised."""
    return PartFailedError(Outcome(reason=reason, exit_code=exit_code, failed_part=part, last_log_lines=last_log_lines))


def drain_s_after_signal(kill_wait_s: float) -> float:
    """Return how long requests may take after SIGTERM: Slurm's KillWait, less what the way down takes."""
    return max(0.0, kill_wait_s - _WAY_DOWN_S)


class RunEnd:
    """The end of the run on this node. `stop` ends it on purpose, `fail` because a part failed.

    A second signal or failure during the drain after a stop interrupts the drain. `kill_wait_s` is how long after
    SIGTERM Slurm sends SIGKILL.
    """

    def __init__(self, kill_wait_s: float = KILL_WAIT_S) -> None:
        self._kill_wait_s = kill_wait_s
        self._signalled_at: float | None = None
        self._stopped = asyncio.Event()
        self._decided: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._interrupted: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()

    @property
    def outcome(self) -> Outcome | None:
        """Return how the run ends, or what began the drain before its end; None: it goes on."""
        return self._decided.result() if self._decided.done() else None

    @property
    def was_signalled(self) -> bool:
        """Return whether a signal has come, which Slurm sends to every process of the step."""
        return self._signalled_at is not None

    @property
    def grace_s(self) -> float:
        """Return how long a part may take to end: without limit, or what Slurm leaves after its signal."""
        if self._signalled_at is None:
            return math.inf
        return max(_LEAST_GRACE_S, self._signalled_at + self._kill_wait_s - _WAY_DOWN_S / 2 - time.monotonic())

    def stop_on_signals(self) -> None:
        """Stop at SIGTERM, which Slurm sends at scancel, preemption and the time limit, and at SIGINT.

        A further one ends a drain.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_on_signal, number)

    def _stop_on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._signalled_at is not None and now - self._signalled_at < _SAME_SIGNAL_S:
            return
        self._signalled_at = self._signalled_at or now
        reason = f"{number.name} (cancelled, preempted, or out of time)"
        if self._decided.done():
            self._interrupt(None)
        else:
            self.stop(reason, drain_s=drain_s_after_signal(self._kill_wait_s))

    def stop(self, reason: str, *, drain_s: float = 0.0, cause: DrainCause = "slurm") -> None:
        """End the run after a drain of `drain_s` seconds at most. 0 also ends a drain that has begun."""
        self._stopped.set()
        if self._decided.done() and drain_s == 0:
            self._interrupt(None)
        self._decide(Outcome(reason=reason, exit_code=0, drain_s=drain_s, drain_cause=cause))

    async def fail(self, outcome: Outcome) -> None:
        """Report a failure. It counts unless a stop follows within a second; it interrupts a drain."""
        await self.wait_for_stop(_SETTLE_S)
        if self._decided.done():
            self._interrupt(outcome)
        self._decide(outcome)

    async def fail_on_error(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`, and report the error that ends it, if any, as the run's failure."""
        try:
            await work
        except Exception as error:
            await self.fail(outcome_of(error))

    async def wait(self) -> Outcome:
        """Wait until the outcome is decided, and return it."""
        return await asyncio.shield(self._decided)

    async def wait_for_interruption(
        self, *or_done: asyncio.Future[Any], within_s: float | None = None
    ) -> Outcome | None:
        """Wait until a drain is to end, until one of `or_done` is done, or for `within_s` seconds.

        Returns the failure of a part that ends the drain, if any. There is none if somebody wants the end at once.
        """
        await asyncio.wait({self._interrupted, *or_done}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        return self._interrupted.result() if self._interrupted.done() else None

    async def wait_for_stop(self, timeout_s: float) -> None:
        """Return at a stop, even one that comes after a failure, or after `timeout_s` seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), timeout_s)

    def _interrupt(self, failure: Outcome | None) -> None:
        if not self._interrupted.done():
            self._interrupted.set_result(failure)

    def _decide(self, outcome: Outcome) -> None:
        if not self._decided.done():
            self._decided.set_result(outcome)


# -- the parts

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
        """Start a child in a session of its own, with exactly `environ`; the caller looks after its end.

        If `told` is true, the child has a standard input, for `Child.tell`. Raises PartFailedError if there is no such
        command.
        """
        self.require_command(name, argv[0], environ)
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=environ,
            stdin=asyncio.subprocess.PIPE if told else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        return Child(name, process, on_line, is_noise)

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
