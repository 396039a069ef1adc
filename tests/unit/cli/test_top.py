"""`top`: one look as plain text, and the view on a terminal, which is left as it was."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from dataclasses import replace

import pytest

from hpc_serve.cli.services.top import Frame, Looks, frame_lines
from hpc_serve.client.engine_work import ReplicaWork
from hpc_serve.client.replicas.status import ProbeResult, assess_replica
from hpc_serve.rendezvous.record import NodeRecord
from hpc_serve.vllm.metrics import EngineWork
from tests.support.patience import PATIENCE_S
from tests.support.stubs import make_record

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


def frame(*services: str, node: str = "n1", **fields) -> Frame:
    of_all = {"started_at": 1000.0, "nodes": (NodeRecord(name=node, address="10.0.0.1"),)}
    records = [make_record(service=name, job_id=str(place), **of_all) for place, name in enumerate(services)]
    replicas = [replace(assess_replica(one, probe=ProbeResult(status="ready")), **fields) for one in records]
    now = EngineWork(running=3, waiting=1, prompt_tokens=9.0, generation_tokens=8.0, cache_use=0.5)
    work = ReplicaWork(now=now, over_s=2.0, prompt_tokens_per_s=2000.0, generation_tokens_per_s=1234.0)
    return Frame(replicas=tuple(replicas), works=(work,) * len(replicas), at=4600.0)


def test_a_frame_has_a_line_for_each_replica_and_a_sum():
    lines = frame_lines(frame("8b", "70b"), width=120, height=None)
    assert lines[0].endswith("  2/2 ready, 6 running, 2 waiting, 2,468 tokens/s")
    assert " ".join(lines[2].split()) == "SERVICE JOB STATE RUN WAIT TOKENS/S CACHE PROMPTS/S AGE LEFT NODE"
    assert lines[3].split() == ["8b", "0", "ready", "3", "1", "1,234", "50.0", "%", "2,000", "1", "h", "n1"]
    assert lines[4].startswith("70b")


@pytest.mark.parametrize("width", [10, 30, 40, 60, 80])
def test_on_a_narrow_terminal_the_last_columns_go(width):
    lines = frame_lines(frame("8b", "70b"), width=width, height=None)
    assert max(map(len, lines)) <= width
    assert len(lines) == 5


def test_on_a_low_terminal_it_says_how_much_is_left_out():
    lines = frame_lines(frame(*"abcdefgh"), width=80, height=6)
    assert len(lines) == 6
    assert lines[-1].startswith("… 6 more lines")


def test_text_of_records_moves_no_cursor_and_breaks_no_line():
    evil = "a\x1b[2J\nb\rc\x9b"
    found = frame("8b", node=evil, time_left=evil, state="starting", stage=evil)
    lines = frame_lines(Frame(**{**vars(found), "problems": (evil,)}), width=300, height=None)
    assert len(lines) == 6
    assert all(line.isprintable() for line in lines)


def test_once_prints_one_look(live, store, ran):
    store.write(make_record(service="70b", job_id="8", cluster="local", state="starting", stage="loading weights"))
    out = ran(["top", "--once"]).out
    assert "  1/2 ready, 0 running, 0 waiting" in out
    assert "8: loading weights" in out
    assert "\x1b" not in out
    assert "1/1 ready" in ran(["top", "8b"]).out, "without a terminal it is as with --once"


def test_a_service_that_is_not_there_is_said_and_others_are_left_out(live, ran):
    out = ran(["top", "--once", "70b"]).out
    assert "No replicas." in out
    assert "warning: 70b has no replica" in out
    assert "8b" not in out


def test_a_busy_engine_is_looked_at_twice(live, ran, monkeypatch):
    looks = iter([frame("8b"), frame("70b")])
    monkeypatch.setattr(Looks, "look", lambda self: next(looks))
    assert "70b" in ran(["top", "--once"]).out


def test_a_store_that_cannot_be_read_is_a_warning(store, monkeypatch):
    store.home.mkdir(mode=0o700)
    (store.home / "services").mkdir(mode=0o777)
    (store.home / "services").chmod(0o777)
    found = Looks(store, ()).look()
    assert found.replicas == ()
    assert "services" in found.problems[0]


class Terminal:
    """`top` on a pseudo-terminal."""

    def __init__(self) -> None:
        self.own, theirs = pty.openpty()
        self.settings = termios.tcgetattr(theirs)
        self.text = ""
        self.theirs = theirs
        words, environ = [sys.executable, "-m", "hpc_serve.cli", "top"], {**os.environ, "TERM": "xterm"}
        self.process = subprocess.Popen(
            words, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, start_new_session=True
        )

    def read_until(self, words: str) -> None:
        ends_at_s = time.monotonic() + PATIENCE_S
        while words not in self.text:
            assert time.monotonic() < ends_at_s, self.text
            if select.select([self.own], [], [], 1.0)[0]:
                self.text += os.read(self.own, 65536).decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.own)
        os.close(self.theirs)


@pytest.fixture
def terminal(live):
    terminal = Terminal()
    yield terminal
    terminal.close()


@pytest.mark.parametrize("end", ["q", "SIGTERM", "SIGINT"])
def test_it_ends_and_leaves_the_terminal_as_it_was(terminal, end):
    terminal.read_until("1/1 ready")
    assert ENTER in terminal.text
    assert not termios.tcgetattr(terminal.theirs)[3] & termios.ICANON
    if end.startswith("SIG"):
        terminal.process.send_signal(signal.Signals[end])
    else:
        os.write(terminal.own, end.encode())
    terminal.read_until(LEAVE)
    assert terminal.process.wait(PATIENCE_S) == 0
    assert terminal.text.rindex(LEAVE) > terminal.text.rindex(ENTER)
    assert "\x1b[?25h" in terminal.text[terminal.text.rindex("\x1b[?25l") :]
    assert termios.tcgetattr(terminal.theirs) == terminal.settings


def test_replicas_come_and_go_while_it_runs(terminal, live):
    terminal.read_until("1/1 ready")
    record = make_record(service="70b", job_id="8", cluster="local", state="starting")
    live.store.write(record)
    terminal.read_until("1/2 ready")
    live.renew(record, state="stopped")
    terminal.text = ""
    terminal.read_until("1/1 ready")
    os.write(terminal.own, b"q")
    terminal.read_until(LEAVE)
