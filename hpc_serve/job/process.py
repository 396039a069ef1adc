"""One child process of a launcher: started in a session of its own, its lines read, ended with all its descendants.

Descendants that left the session (Ray's workers do) are found by a mark in their environment, so that a node is
left as it was found, whatever the child did.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hpc_serve.vllm.log import is_consequence, read_error

_LAST_LOG_LINES = 30
_LONGEST_LINE = 4_000
MARK = "HPC_SERVE_RUN_MARK"


class Child:
    """A running child. `last_log_lines` are its latest lines of output, `first_error` the error it reported first."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> None:
        self.name = name
        self.last_log_lines: deque[str] = deque(maxlen=_LAST_LOG_LINES)
        self.first_error: str | None = None
        self._consequence: str | None = None
        self._process = process
        self._on_line = on_line
        self._pump = asyncio.create_task(self._read_lines())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; as a shell would say, 128 + n for an end by signal n."""
        code = self._process.returncode
        return 128 - code if code is not None and code < 0 else code

    @property
    def epitaph(self) -> str:
        """How it ended, and why as far as it said."""
        how = f"exited with {self.exit_code}" if self.exit_code else "exited with 0 before it was stopped"
        why = self.first_error or self._consequence
        return f"{self.name} {how}" + (f": {why}" if why else "")

    async def wait(self) -> int:
        """Wait for the end, and for its last lines, which a left-behind descendant may hold open for ever."""
        await self._process.wait()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._pump), timeout=2)
        assert self.exit_code is not None
        return self.exit_code

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL to its whole session after `grace_s` seconds."""
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), timeout=grace_s)
        self._signal(signal.SIGKILL)
        await self._process.wait()
        self._pump.cancel()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGTERM:
                self._process.send_signal(number)
            else:
                os.killpg(self._process.pid, number)

    async def _read_lines(self) -> None:
        assert self._process.stdout is not None
        pending = b""
        while chunk := await self._process.stdout.read(65_536):
            # Progress bars end their states with a carriage return alone.
            *lines, pending = (pending + chunk).replace(b"\r", b"\n").split(b"\n")
            if len(pending) > _LONGEST_LINE:
                lines, pending = [*lines, pending], b""
            for line in lines:
                self._take(line)
        self._take(pending)

    def _take(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip()
        if line:
            self.last_log_lines.append(line[:_LONGEST_LINE])
            self.first_error = self.first_error or read_error(line)
            if self._consequence is None and is_consequence(line):
                self._consequence = line.rpartition("] ")[2].strip()
            self._on_line(line)


async def start_child(
    name: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    on_line: Callable[[str], None],
    *,
    cwd: Path | None = None,
) -> Child:
    """Start `argv` with exactly `environ`. Raises FileNotFoundError if there is no such command on its PATH."""
    if shutil.which(argv[0], path=environ.get("PATH")) is None:
        raise FileNotFoundError(argv[0])
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=environ,
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    return Child(name, process, on_line)


def mark_environ(mark: str) -> dict[str, str]:
    """What makes a process and its descendants carry `mark`.

    The engine's and Ray's processes give themselves titles, which setproctitle writes over the environment that /proc
    shows, unless SPT_NOENV tells it to make do with the command line's room.
    """
    return {MARK: mark, "SPT_NOENV": "1"}


async def end_marked(mark: str, *, grace_s: float) -> int:
    """End every process of ours that carries `mark` in its environment; returns how many there were."""
    found = set(marked(mark))
    for pid in found:
        _kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (left := set(marked(mark))) and time.monotonic() < deadline:
        found |= left
        await asyncio.sleep(0.1)
    deadline = time.monotonic() + grace_s
    while (left := set(marked(mark))) and time.monotonic() < deadline:
        for pid in left:
            _kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.05)
    return len(found)


def marked(mark: str) -> Iterator[int]:
    """The pids of this user's processes whose environment holds `mark`; zombies have none and do not count."""
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:
            continue


def read_bytes(mark: str) -> int:
    """Bytes that the marked processes have read so far: a load that moves shows here. Some are counted twice."""
    total = 0
    for pid in marked(mark):
        try:
            for line in Path(f"/proc/{pid}/io").read_text().splitlines():
                if line.startswith(("rchar:", "read_bytes:")):  # by read(), and from disk, mapped files too
                    total += int(line.split()[1])
        except (OSError, ValueError):
            continue
    return total


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
