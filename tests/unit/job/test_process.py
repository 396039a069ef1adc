"""Children of a launcher: their lines are read, they end with all that they started, whatever they did."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from hpc_serve.job.machine.process import Child, end_marked, mark_environ, marked_pids
from hpc_serve.job.run.parts import Parts, RunEnd
from tests.cluster import wait_for


def environ(mark: str = "none") -> dict[str, str]:
    return {**os.environ, **mark_environ(mark), "PYTHONUNBUFFERED": "1"}


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def begin(code: str, on_line=lambda line: None, *, mark: str = "none", **options) -> Child:
    return await Parts(mark, RunEnd()).start_child("engine", python(code), environ(mark), on_line=on_line, **options)


async def ended(code: str, on_line=lambda line: None, **options) -> Child:
    """A child, after its end."""
    child = await begin(code, on_line, **options)
    await child.wait()
    return child


async def test_lines_exit_code_and_last_lines_are_kept():
    lines: list[str] = []
    child = await ended("import sys; print('a\\rb'); print('c', file=sys.stderr); sys.exit(3)", lines.append)
    assert (child.exit_code, list(child.last_log_lines)) == (3, ["a", "b", "c"])
    assert lines == ["a", "b", "c"]


async def test_the_end_of_a_child_is_seen_though_a_process_that_it_started_keeps_its_pipe_open():
    """As an engine's core does, whose API server was killed."""

    started = asyncio.Event()
    code = "import subprocess, time; subprocess.Popen(['sleep', '600']); print(1, flush=True); time.sleep(600)"
    child = await begin(code, lambda line: started.set())
    await asyncio.wait_for(started.wait(), 60)
    os.kill(child.pid, signal.SIGKILL)
    exit_code = await asyncio.wait_for(child.wait(), 60)
    await child.stop(0)
    assert exit_code == 137


async def test_a_line_that_is_not_understood_stops_nobody_from_reading_the_next(caplog):
    """A child whose pipe nobody reads stands still once it is full."""
    lines: list[str] = []

    def understand(line: str) -> None:
        lines.append(line)
        if line == "bad":
            raise KeyError(line)

    code = "print('bad'); print('x' * 1000 + '\\n', end='', flush=True); [print('y' * 99) for _ in range(5000)]"
    assert (await ended(code, understand)).exit_code == 0
    assert lines[0] == "bad"
    assert len(lines) == 5002
    assert "a line of engine was not understood" in caplog.text


async def test_noise_is_neither_told_nor_kept():
    lines: list[str] = []
    is_noise = lambda line: line.startswith("noise")  # noqa: E731
    child = await ended("print('a'); print('noise 1'); print('b')", lines.append, is_noise=is_noise)
    assert list(child.last_log_lines) == lines == ["a", "b"]


WARNING = "WARNING 11-21 22:40:11 [a.py:1] Exception: optional"
UP = "INFO:     Application startup complete."
DEAD = "(x pid=1) ERROR [a.py:1] EngineDeadError: EngineCore encountered an issue."


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ((WARNING, "x", "TypeError: the cause"), ": TypeError: the cause"),
        (("OSError: tried again", UP, "ValueError: later"), ": ValueError: later"),
        (("OSError: tried again", UP), ""),
        ((DEAD,), ": EngineDeadError: EngineCore encountered an issue."),  # a consequence is better than no reason
        ((DEAD, "ValueError: the cause"), ": ValueError: the cause"),
    ],
)
async def test_the_cause_is_no_warning_and_nothing_from_before_the_server_was_up(lines, reason):
    code = f"import sys; print(*{lines!r}, sep=chr(10)); sys.exit(1)"
    assert (await ended(code)).failure_reason == f"engine exited with 1{reason}"


async def test_an_end_without_an_error_and_a_signal_are_told_as_a_shell_would():
    assert (await ended("")).failure_reason == "engine exited with 0 before it was stopped"
    assert (await ended("import os; os.kill(os.getpid(), 9)")).exit_code == 137


async def test_a_child_that_ignores_sigterm_is_killed():
    ready = asyncio.Event()
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready'); time.sleep(600)"
    child = await begin(code, lambda line: ready.set())
    await asyncio.wait_for(ready.wait(), 60)
    await child.stop(grace_s=0.1)
    assert child.exit_code == 137


async def test_a_descendant_that_left_the_session_is_found_and_ended():
    mark = f"test-{os.getpid()}-leaver"
    code = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=-3, stderr=-3)"

    child = await begin(code, mark=mark)
    await child.wait()
    # While a program replaces another, /proc shows no environment for a moment.
    left = await asyncio.to_thread(wait_for, lambda: list(marked_pids(mark)), 60, what="what it has started")
    assert len(left) == 1
    await end_marked(mark, grace_s=60)
    assert not list(marked_pids(mark))


def test_a_process_that_gives_itself_a_title_is_found():
    pytest.importorskip("setproctitle", reason="comes with vLLM")
    mark = f"test-{os.getpid()}-titled"
    code = "import setproctitle, sys; setproctitle.setproctitle('VLLM::x'); print('done', flush=True); sys.stdin.read()"
    with subprocess.Popen(python(code), env=environ(mark), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as titled:
        titled.stdout.readline()
        with open(f"/proc/{titled.pid}/cmdline", "rb") as words:
            assert words.read().startswith(b"VLLM::x\0")
        assert list(marked_pids(mark)) == [titled.pid]
        titled.communicate()
