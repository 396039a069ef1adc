"""Children of a launcher: their lines are read, they end with all that they started, whatever they did."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from hpc_serve.job.machine.process import end_marked, mark_environ, marked_pids, start_child
from tests.cluster import wait_for


def environ(mark: str = "none") -> dict[str, str]:
    return {**os.environ, **mark_environ(mark), "PYTHONUNBUFFERED": "1"}


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_lines_exit_code_and_last_lines_are_kept():
    lines: list[str] = []

    async def run():
        child = await start_child(
            "x", python("import sys; print('a\\rb'); print('c', file=sys.stderr); sys.exit(3)"), environ(), lines.append
        )
        return await child.wait(), list(child.last_log_lines)

    assert asyncio.run(run()) == (3, ["a", "b", "c"])
    assert lines == ["a", "b", "c"]


def test_the_end_of_a_child_is_seen_though_a_process_that_it_started_keeps_its_pipe_open():
    """As an engine's core does, whose API server was killed."""

    async def run():
        started = asyncio.Event()
        code = "import subprocess, time; subprocess.Popen(['sleep', '600']); print(1, flush=True); time.sleep(600)"
        child = await start_child("x", python(code), environ(), lambda line: started.set())
        await asyncio.wait_for(started.wait(), 60)
        os.kill(child.pid, signal.SIGKILL)
        exit_code = await asyncio.wait_for(child.wait(), 60)
        await child.stop(0)
        return exit_code

    assert asyncio.run(run()) == 137


def test_a_line_that_is_not_understood_stops_nobody_from_reading_the_next(caplog):
    """A child whose pipe nobody reads stands still once it is full."""
    lines: list[str] = []

    def understand(line: str) -> None:
        lines.append(line)
        if line == "bad":
            raise KeyError(line)

    async def run():
        code = "print('bad'); print('x' * 1000 + '\\n', end='', flush=True); [print('y' * 99) for _ in range(5000)]"
        child = await start_child("x", python(code), environ(), understand)
        return await child.wait()

    assert asyncio.run(run()) == 0
    assert lines[0] == "bad"
    assert len(lines) == 5002
    assert "a line of x was not understood" in caplog.text


def test_noise_is_neither_told_nor_kept():
    lines: list[str] = []

    async def run():
        code = "print('a'); print('noise 1'); print('b')"
        child = await start_child(
            "x", python(code), environ(), lines.append, is_noise=lambda line: line.startswith("noise")
        )
        await child.wait()
        return list(child.last_log_lines)

    assert asyncio.run(run()) == lines == ["a", "b"]


def test_the_cause_is_no_warning_and_nothing_from_before_the_server_was_up():
    async def reason(*lines: str) -> str:
        code = f"import sys; print(*{lines!r}, sep=chr(10)); sys.exit(1)"
        child = await start_child("engine", python(code), environ(), lambda line: None)
        await child.wait()
        return child.failure_reason

    warning = "WARNING 11-21 22:40:11 [a.py:1] Exception: optional"
    up = "INFO:     Application startup complete."
    assert asyncio.run(reason(warning, "x", "TypeError: the cause")) == "engine exited with 1: TypeError: the cause"
    assert (
        asyncio.run(reason("OSError: tried again", up, "ValueError: later"))
        == "engine exited with 1: ValueError: later"
    )
    assert asyncio.run(reason("OSError: tried again", up)) == "engine exited with 1"


def test_a_consequence_is_better_than_no_reason():
    async def run(code):
        child = await start_child("engine", python(code), environ(), lambda line: None)
        await child.wait()
        return child.failure_reason

    dead = "print('(x pid=1) ERROR [a.py:1] EngineDeadError: EngineCore encountered an issue.')"
    assert asyncio.run(run(dead)).endswith("before it was stopped: EngineDeadError: EngineCore encountered an issue.")
    assert asyncio.run(run(dead + "; print('ValueError: the cause')")).endswith(": ValueError: the cause")


def test_a_signal_is_told_as_a_shell_would():
    async def run():
        child = await start_child("x", python("import os; os.kill(os.getpid(), 9)"), environ(), lambda line: None)
        return await child.wait()

    assert asyncio.run(run()) == 137


def test_a_command_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match="no-such-engine"):
        asyncio.run(start_child("x", ["no-such-engine"], environ(), lambda line: None))


def test_a_child_that_ignores_sigterm_is_killed():
    async def run():
        ready = asyncio.Event()
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready'); time.sleep(600)"
        child = await start_child("x", python(code), environ(), lambda line: ready.set())
        await asyncio.wait_for(ready.wait(), 60)
        await child.stop(grace_s=0.1)
        return child.exit_code

    assert asyncio.run(run()) == 137


def test_a_descendant_that_left_the_session_is_found_and_ended():
    mark = f"test-{os.getpid()}-leaver"
    code = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=-3, stderr=-3)"

    async def run():
        child = await start_child("x", python(code), environ(mark), lambda line: None)
        await child.wait()
        # While a program replaces another, /proc shows no environment for a moment.
        left = await asyncio.to_thread(wait_for, lambda: list(marked_pids(mark)), 60, what="what it has started")
        return len(left), await end_marked(mark, grace_s=60)

    left, ended = asyncio.run(run())
    assert left == ended == 1
    assert not list(marked_pids(mark))


def test_a_process_that_gives_itself_a_title_is_found():
    pytest.importorskip("setproctitle", reason="comes with vLLM")
    mark = f"test-{os.getpid()}-titled"
    code = "import setproctitle, sys; setproctitle.setproctitle('VLLM::x'); print('done', flush=True); sys.stdin.read()"
    with subprocess.Popen(python(code), env=environ(mark), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as titled:
        assert titled.stdout is not None
        titled.stdout.readline()
        with open(f"/proc/{titled.pid}/cmdline", "rb") as words:
            assert words.read().startswith(b"VLLM::x\0")
        assert list(marked_pids(mark)) == [titled.pid]
        titled.communicate()
