"""`status`: its table, its details and its JSON; an engine's work beside its plan; and the stages of a start.

There is no terminal here, so what is shown while a replica starts is plain lines.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest
from rich.console import Console

from hpc_serve.cli.console import PlainConsole
from hpc_serve.cli.services import stages, status_watch
from hpc_serve.cli.show import status_table
from hpc_serve.client import connect, engine_work
from hpc_serve.client.engine_work import ReplicaWork, WorkWatch
from hpc_serve.client.replicas.status import ProbeResult, assess_replica
from hpc_serve.rendezvous.claims import change_wanted
from hpc_serve.rendezvous.record import Progress, StartRecord
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.rendezvous.wanted import Decision, Wanted
from hpc_serve.submit.status.status_reader import read_status
from hpc_serve.vllm.metrics import EngineWork
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.stubs import StubService, make_record, make_submitted

STATUS_KEYS = {
    *("service", "job_id", "state", "cluster", "model", "stand_in", "stage", "progress", "reason", "address", "nodes"),
    *("start", "name", "data_parallel_size", "replicas_per_job", "log_dir", "batch_log", "scheduler_state", "logs"),
    *("num_nodes", "gpus_per_node", "tensor_parallel_size", "pipeline_parallel_size", "restart", "replica", "engine"),
    *("submitted_at", "started_at", "updated_at", "failed_part", "exit_code", "last_log_lines", "end_reported_by_job"),
    *("state_since", "engine_restarts", "cache", "loading", "pending_reason", "time_left", "successor"),
    *("successor_job_id", "measured", "predicted", "machine", "weight_version"),
}


def test_status_of_nothing(ran, told):
    assert ran(["status"]).out == "No services. Start one: hpc-serve submit --model 8b --wait\n"
    assert told("status") == {"services": [], "problems": [], "wanted": {}}
    ran(["status", "8b"], 5)


def test_what_a_gateway_decided_is_no_more_shown_once_its_jobs_are_forgotten(store, ran):
    store.write(make_record(service="8b", state="failed", updated_at=time.time()))
    decided = Decision(action="submit", cause="demand", why="a request asked the gateway for it", count=1)
    change_wanted(store, "8b", lambda _: Wanted(least=1, most=1, count=1).with_decisions(time.time(), decided))
    assert "a request asked the gateway for it" in ran(["status"]).out
    ran(["forget", "--ended"])
    assert ran(["status"]).out.splitlines() == ["No services. Start one: hpc-serve submit --model 8b --wait"]


@pytest.mark.parametrize("columns", [20, 40, 60, 80])
def test_a_narrow_terminal_cuts_nothing_and_a_pipe_has_no_colours(columns, store, ran, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    name, reason = "a-rather-long-name-of-a-service", "engine exited with 1: CUDA out of memory"
    store.write(make_record(service=name, job_id="123456_12", state="failed", reason=reason))
    out = ran(["status"]).out
    assert max(len(line) for line in out.splitlines()) <= columns
    assert "\x1b" not in out
    joined = "".join(out.split())
    assert all("".join(words.split()) in joined for words in (name, "123456_12", "failed", reason))


def test_paths_are_whole_where_a_program_reads_the_table(failed_job, monkeypatch):
    path = f"/{'long-name-of-a-folder/' * 5}model"
    failed_job(model=path, reason=f"cannot read {path}/x")
    monkeypatch.delenv("COLUMNS")
    told = subprocess.run([sys.executable, "-m", "hpc_serve.cli", "status"], capture_output=True, text=True)
    assert f"cannot read {path}/x" in told.stdout


def test_a_long_reason_is_cut_in_the_table_and_whole_in_the_details(failed_job, ran):
    reason = "engine exited with 1: " + " ".join(f"word{n}" for n in range(100))
    failed_job(reason=reason, exit_code=137)
    table = " ".join(ran(["status"]).out.split())
    assert "word1 " in table
    assert "word99" not in table
    assert "(hpc-serve doctor 7)" in table
    details = ran(["status", "7"]).out
    assert "word99" in details
    assert "137 (ended by SIGKILL)" in details


def test_a_script_that_slurm_saw_end_without_an_error_has_not_failed(stand_ins, ran):
    stand_ins.job("7", "COMPLETED", name="hpc-serve-8b")
    assert "stopped: its script ended without an error (COMPLETED)" in ran(["status", "8b"]).out


def test_status_as_json_has_stable_keys(live, told, stand_ins):
    stand_ins.queue(("7", "RUNNING", "None"))
    report = told("status")
    assert set(report) == {"services", "problems", "wanted"}
    assert (set(report["services"][0]), report["services"][0]["state"]) == (STATUS_KEYS, "ready")


def test_status_shows_what_is_live_and_the_ends_of_the_last_day(store, told):
    now = time.time()
    for service, job_id, ago_s in (("old", "3", 9e5), ("8b", "4", 2 * 86400), ("8b", "1", 300), ("8b", "2", 200)):
        at = {"started_at": now - ago_s, "updated_at": now - ago_s}
        store.write(make_record(service=service, job_id=job_id, state="failed", reason="x", **at))
    shown = {"": "12", "8b": "12", "--all": "3412", "8b --all": "412", "old": "3"}
    for words, jobs in shown.items():
        assert [status["job_id"] for status in told("status", *words.split())["services"]] == list(jobs)


def test_status_of_one_service_says_it_all(failed_job, ran):
    words = ("Traceback (most recent call last):", "ValueError: [x] no memory")
    figures = {"measured": {"kv_cache_tokens": 1024.0, "model_loading_bytes": 2.0**30}}
    figures |= {"predicted": {"kv_cache_tokens": 2048.0, "model_loading_bytes": 2.0**31}}
    failed_job(failed_part="engine", exit_code=1, last_log_lines=words, **figures)
    out = ran(["status", "8b"]).out
    for line in (
        "8b  job 7",
        "  state      failed: engine exited with 1",
        "  exit code  1",
        f"    {words[1]}",
        f"  {'KV cache, tokens':<24}          2,048          1,024",
        f"  {'weights':<24}       2.00 GiB       1.00 GiB",
    ):
        assert f"{line}\n" in out


def test_status_says_since_when_an_engine_is_unresponsive(store, ran):
    why, caches, loading = "its engine leaves /health unanswered", "warm, from /tmp/c", "prefetch: 140.0 GiB on gpfs"
    words = {"reason": why, "state_since": 1_800_000_000.0, "engine_restarts": 2, "cache": caches, "loading": loading}
    here = {"service": "8b", "cluster": "local", "state": "unresponsive", "stage": "unresponsive"}
    store.write(make_record(**here, **words, weight_version="step-200"))
    out = ran(["status", "8b"]).out
    rows = {"state": f"unresponsive: {why}", "restarts": "2, of the engine in place", "weights": "version step-200"}
    for name, value in {**rows, "caches": caches, "loading": loading}.items():
        assert f"  {name:<10} {value}\n" in out
    assert re.search(r"^  since      2027-01-\d\d \d\d:\d\d:\d\d$", out, re.MULTILINE)


def test_a_record_that_is_not_trusted_is_a_warning(store, ran):
    store.ensure_service("8b")
    (store.service_dir("8b") / "7-r0-0.json").write_text("{")
    assert "7-r0-0.json" in ran(["status"]).err


@pytest.fixture
def busy(store, tmp_path):
    """A service of a stub engine with one request, in a long step."""
    hold = tmp_path / "hold"
    hold.touch()
    service = StubService(store.home, "8b")
    service.start("--stub-step-file", str(hold), service="8b", job_id="7", cluster="local")

    def ask() -> None:
        with connect("8b", home=store.home) as client:
            client.completions.create(model=client.model, prompt="a", max_tokens=3)

    asking = threading.Thread(target=ask)
    asking.start()
    (status,) = [one for one in read_status(store).replicas if one.state == "ready"]
    look = WorkWatch(store.read_api_key)
    wait_until(lambda: look.look([status])[0].now.running)
    yield service
    hold.unlink()
    asking.join(PATIENCE_S)
    service.close()


def test_requests_and_speed_stand_beside_the_planned_speed(busy, store, ran, told):
    assert "  planned    no speed: the plan was not written down" in ran(["status", "8b"]).out
    (found,) = told("status", "8b")["services"]
    assert found["engine"]["planned_generation_tokens_per_s"] is None
    predicted = {"output_tokens_per_s_at_1": 120.0, "request_input_tokens": 1024.0, "request_output_tokens": 256.0}
    store.write_submitted(make_submitted(service="8b", cluster="local", predicted={**predicted, "measured_runs": 3.0}))
    out = ran(["status", "8b"]).out
    planned = "120 generated with 1 in flight, of 1,024 tokens in and 256 out"
    for line in (
        "  requests   1 running, 0 waiting\n",
        "  tokens/s   0 generated, over ",
        f"  planned    {planned}; corrected by 3 earlier runs measured here\n",
        "  tokens     0 generated, since its engine started\n",
        "  age        ",
    ):
        assert line in out
    (found,) = told("status", "8b")["services"]
    engine = found["engine"]
    assert engine.pop("over_s") > 0
    assert engine == {
        **{"requests_running": 1, "requests_waiting": 0, "generation_tokens": 0.0, "generation_tokens_per_s": 0.0},
        **dict.fromkeys(("prompt_tokens", "prompt_tokens_per_s", "kv_cache_use", "problem")),
        "planned_generation_tokens_per_s": 120.0,
    }


def test_the_table_of_all_services_says_what_each_engine_does(busy, store, ran, told):
    store.write(make_record(service="8b", job_id="8", cluster="local", state="starting"))
    out = " ".join(ran(["status"]).out.split())
    assert " 1 running, 0 waiting, 0 tokens/s 8b 8 starting " in out
    assert out.count("running") == 1  # the one that starts does nothing yet
    found = {one["job_id"]: one["engine"] for one in told("status")["services"]}
    assert (found["7"]["requests_running"], found["8"]["problem"]) == (1, "it is starting")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_figures_of_an_engine_stay_within_the_terminal(capsys, width):
    names = {"service": "llama-3.1-405b", "job_id": "1234567_12", "model": "meta-llama/Llama-3.1-405B-Instruct-FP8"}
    record = make_record(**names, started_at=time.time() - 3 * 86_400 - 2 * 3_600 - 60)
    status = replace(assess_replica(record, probe=ProbeResult(status="ready")), time_left="1-09:54:12")
    now = EngineWork(running=256, waiting=1_024, cache_use=0.987)
    work = ReplicaWork(now=now, over_s=1.0, generation_tokens_per_s=12_345.6)
    Console(width=width).print(status_table([status], [work], width=width))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    words = " ".join(out.split())
    for figure in ("256 running", "12,346 tokens/s", "98.7 %", ", 3 d 2 h old, 1-09:54:12 left"):
        assert figure in words


def test_an_engine_without_requests_is_looked_at_once(live, ran, told, monkeypatch):
    monkeypatch.setattr(engine_work, "LOOK_S", 1e9)
    out = ran(["status", "8b"]).out
    assert "  requests   0 running, 0 waiting\n" in out
    assert "  tokens/s   none: no request runs\n" in out
    assert "planned" not in out
    assert " 0 running, 0 waiting" in " ".join(ran(["status"]).out.split())
    (found,) = told("status")["services"]
    assert (found["engine"]["requests_running"], found["engine"]["problem"]) == (0, None)


def test_what_others_write_into_a_record_moves_no_cursor(store, ran):
    evil = {"a\x1b[2Jb": 1.0}
    store.ensure_api_key("8b")
    store.write(make_record(service="8b", job_id="7", cluster="local", measured=evil, predicted=evil))
    assert "\x1b" not in ran(["status", "8b"]).out
    assert "\x1b" not in ran(["status", "8b", "--json"]).out


# -- the stages of a start, and `status --watch`

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
