"""A child process of a launcher: its lines are read, and it ends with its descendants.

Some descendants leave the session, as Ray's workers do. The run's mark in their environment finds them. So no process
of the run stays on the node. `is_own_script` tells whether a command can run as a module of this Python instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_serve.diagnose.causes import Finding
    from hpc_serve.diagnose.evidence import LogEvidence


_log = logging.getLogger(__name__)
_NUM_LAST_LINES = 30
_MAX_LINE_LENGTH = 4_000
_EXIT_INTERVAL_S = 0.1
_LAST_LINES_S = 2.0
_PIPE_CLOSES_S = 0.5
RUN_MARK = "HPC_SERVE_RUN_MARK"
"""The variable with the run's mark, in the environment of all its processes."""
ENGINE_MARK = "HPC_SERVE_ENGINE_MARK"
"""The same for the engine's processes alone; Ray's do not have it."""


class Child:
    """A running child. `last_log_lines` are its latest lines of output.

    Lines are dropped if `is_noise` is true of them.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        on_line: Callable[[str], None],
        is_noise: Callable[[str], bool],
    ) -> None:
        self.name = name
        self.last_log_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._process = process
        self._on_line, self._is_noise = on_line, is_noise
        self._reading = asyncio.create_task(self._read_lines())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the child runs; 128 + n after an end by signal n, as in a shell."""
        code = self._process.returncode
        return 128 - code if code is not None and code < 0 else code

    @cached_property
    def _evidence(self) -> LogEvidence:
        # The rules take a moment to import. The first child begins meanwhile, so no start waits for them.
        from hpc_serve.diagnose.evidence import LogEvidence

        return LogEvidence(self.name)

    @property
    def cause(self) -> Finding | None:
        """Return the cause of its end that its lines tell, if any."""
        from hpc_serve.diagnose.causes import first_cause

        return first_cause([self._evidence])

    @property
    def failure_reason(self) -> str:
        """Return how the child ended, and the cause that its lines tell, if any."""
        ending = f"exited with {self.exit_code}" if self.exit_code else "exited with 0 before it was stopped"
        cause = self.cause
        return f"{self.name} {ending}" + (f": {cause.sentence}" if cause else "")

    async def wait(self) -> int:
        """Wait for the child's end, then up to 2 s for its last lines; returns the exit code.

        A descendant that is still alive may keep the pipe open.
        """
        await self._wait_for_exit()
        await asyncio.wait({self._reading}, timeout=_LAST_LINES_S)
        assert self.exit_code is not None
        return self.exit_code

    def tell(self, line: str = "", *, is_last: bool = True) -> None:
        """Write a line to its standard input, if it was started with one, and close that after the last."""
        if self._process.stdin is not None:
            self._process.stdin.write(f"{line}\n".encode())
            if is_last:
                self._process.stdin.close()

    def terminate(self) -> None:
        """Send SIGTERM."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self._process.terminate()

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, wait up to `grace_s` seconds, then send SIGKILL to the whole session."""
        if self._process.returncode is None:
            self.terminate()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wait_for_exit(), timeout=grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._wait_for_exit()
        await asyncio.wait({self._reading}, timeout=_PIPE_CLOSES_S)
        self._reading.cancel()

    async def _wait_for_exit(self) -> None:
        # In several versions of Python, wait() of asyncio's process returns once its pipe is closed, and not before.
        while self._process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(_EXIT_INTERVAL_S)

    async def _read_lines(self) -> None:
        assert self._process.stdout is not None
        pending = b""
        while chunk := await self._process.stdout.read(65_536):
            # A progress bar ends each of its states with a carriage return alone.
            *lines, pending = (pending + chunk).replace(b"\r", b"\n").split(b"\n")
            if len(pending) > _MAX_LINE_LENGTH:
                lines, pending = [*lines, pending], b""
            for line in lines:
                self._handle_line(line)
        self._handle_line(pending)

    def _handle_line(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip()
        if line and not self._is_noise(line):
            self.last_log_lines.append(line[:_MAX_LINE_LENGTH])
            self._evidence.note(line)
            try:
                self._on_line(line)
            except Exception:  # who writes must not be stopped by a full pipe because one line was not understood
                _log.exception("a line of %s was not understood", self.name)


def mark_environ(mark: str, *, variable: str = RUN_MARK) -> dict[str, str]:
    """Return the variables that mark a process and its descendants as belonging to a run.

    The engine's and Ray's processes set titles with setproctitle, which overwrites the environment shown in /proc.
    SPT_NOENV limits it to the space of the command line.
    """
    return {variable: mark, "SPT_NOENV": "1"}


async def end_marked(mark: str, *, grace_s: float, killed_s: float | None = None, variable: str = RUN_MARK) -> None:
    """End the processes with `mark`: SIGTERM, then SIGKILL after `grace_s` seconds.

    After SIGKILL their end is waited for as long again, or for `killed_s` seconds.
    """
    for number, within_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, grace_s if killed_s is None else killed_s)):
        told: set[int] = set()
        deadline = time.monotonic() + within_s
        while (left := set(marked_pids(mark, variable=variable))) and (not told or time.monotonic() < deadline):
            for pid in left - told:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            told |= left
            await asyncio.sleep(0.05)


def run_processes(mark: str) -> dict[int, tuple[str, bool]]:
    """Return a run's processes on this node by their numbers: the name of each, and whether it is stopped (SIGSTOP)."""
    found = {}
    for pid in marked_pids(mark):
        with contextlib.suppress(OSError):
            folder = Path("/proc") / str(pid)
            name = (folder / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace").strip()
            found[pid] = name, (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    return found


def marked_pids(mark: str, *, variable: str = RUN_MARK) -> Iterator[int]:
    """The pids of this user's processes with `mark` in their environment. A zombie has no environment any more."""
    needle = f"{variable}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:
            continue


def is_own_script(command: str | None, module: str) -> bool:
    """Return whether a command is the script of this Python's environment that runs `module`."""
    if command is None:
        return False
    try:
        first, *others = Path(command).read_text().splitlines()
    except (OSError, ValueError):
        return False
    is_this = first.startswith("#!") and os.path.dirname(first[2:].strip()) == os.path.dirname(sys.executable)
    return is_this and any(module in line for line in others)
