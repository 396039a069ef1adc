"""What is shown while a replica starts: plain lines here, since there is no terminal, and `status --watch`."""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace
from unittest.mock import Mock

from hpc_serve.cli.console import PlainConsole
from hpc_serve.cli.services import stages, status_watch
from hpc_serve.client.replicas.status import ProbeResult, assess_replica
from hpc_serve.rendezvous.record import Progress, StartRecord
from hpc_serve.rendezvous.store import ServiceStore
from tests.support.stubs import make_record

START = StartRecord(stage="weights", since=120.0, took_s={"engine": 20.0}, time_left_s=60.0)
HERE = {"service": "8b", "job_id": "7", "cluster": "local", "state": "starting", "stage": "loading weights"}
RECORD = make_record(**HERE, progress=Progress(done=1, total=4), started_at=100.0, updated_at=140.0, start=START)


LOADING = assess_replica(RECORD)
DONE = StartRecord(stage="", since=180.0, took_s={"engine": 20.0})
READY = assess_replica(
    replace(RECORD, state="ready", stage="ready", progress=None, start=DONE), probe=ProbeResult(status="ready")
)


def test_plain_lines_tell_of_coarse_changes_alone(capsys):
    with stages.Stages("8b") as shown:
        for done in range(5):
            shown.show(replace(LOADING, progress=Progress(done=done, total=40)))
        shown.show(replace(LOADING, progress=Progress(done=20, total=40)))
        shown.show(READY)
    lines = [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "8b loading weights 0/40, ready in about 60 s",
        "8b loading weights 20/40, ready in about 60 s",
        "8b ready",
        "took: engine 20 s",
    ]


def test_a_start_of_which_nothing_is_known_yet_has_a_line_with_a_word(capsys):
    with stages.Stages("8b") as shown:
        shown.show(assess_replica(replace(RECORD, stage="", progress=None, start=None)))
    assert capsys.readouterr().err.partition(" ")[2] == "8b starting\n"


def test_a_terminal_shows_one_line_that_changes(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(PlainConsole, "is_terminal", True)
    shown = stages.Stages("8b")
    shown.console.file = screen
    with shown:
        shown.show(LOADING)
        shown.progress.refresh()
        shown.show(replace(LOADING, stage="compiling", progress=None))
    text = screen.getvalue()
    assert "8b loading weights 1/4, ready in about 60 s" in text
    assert re.search(r"\d\d:\d\d:\d\d loading weights", text)


def starting(store: ServiceStore, **fields):
    took = {"nodes": 2.0, "engine": 31.0}
    start = StartRecord(stage="weights", since=time.time() - 7200, took_s=took, time_left_s=36e3)
    store.write(make_record(**{**HERE, "progress": Progress(done=1, total=4), "start": start, **fields}))


def test_status_shows_the_stages_and_the_time_left(store, ran, told):
    starting(store)
    assert "ready in about 10 h" in " ".join(ran(["status"]).out.split())
    out = ran(["status", "8b"]).out
    assert "starting: loading weights 1/4, ready in about 10 h" in out
    assert "nodes 2 s, engine 31 s, weights for 2 h" in out
    assert "requests" not in out
    (replica,) = told("status", "8b")["services"]
    found = {"stage": "weights", "took_s": {"nodes": 2.0, "engine": 31.0}, "time_left_s": 36e3}
    assert found.items() <= replica["start"].items()
    assert replica["progress"] == {"done": 1, "total": 4}


def test_watch_prints_a_line_for_each_coarse_change_until_ctrl_c(store, ran, monkeypatch):
    starting(store)
    steps = [Progress(done=1, total=4), Progress(done=1, total=4), Progress(done=2, total=4)]

    def go_on(seconds: float) -> None:
        if not steps:
            raise KeyboardInterrupt
        starting(store, progress=steps.pop(0))

    monkeypatch.setattr(status_watch, "sleep", go_on)
    lines = [line.partition(" ")[2] for line in ran(["status", "8b", "--watch"], 130).out.splitlines()]
    assert lines == [f"8b 7 loading weights {done}/4, ready in about 10 h" for done in (1, 2)]


def test_watch_draws_the_table_on_a_terminal(store, ran, monkeypatch):
    starting(store)
    monkeypatch.setattr(status_watch, "sleep", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(PlainConsole, "is_terminal", True)
    out = " ".join(ran(["status", "--watch"], 130).out.split())
    assert "8b" in out
    assert "ready in about 10 h" in out


def test_watch_is_for_people_and_of_what_there_is(ran):
    ran(["status", "nope", "--watch"], 5)
    assert "leave out --json" in ran(["status", "--watch", "--json"], 2).err
