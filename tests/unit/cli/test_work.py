"""What `status NAME` says of an engine's work, beside what was planned."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

import pytest
from rich.console import Console

from hpc_serve.cli.main import run
from hpc_serve.cli.show import status_table
from hpc_serve.client import connect, engine_work
from hpc_serve.client.engine_work import ReplicaWork, WorkWatch
from hpc_serve.client.replicas.status import ProbeResult, assess_replica
from hpc_serve.submit.status.status_reader import read_status
from hpc_serve.vllm.metrics import EngineWork
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.stubs import StubService, make_record, make_submitted


@pytest.fixture(autouse=True)
def place(stand_ins, monkeypatch):
    monkeypatch.setattr(engine_work, "LOOK_S", 0.01)
    return stand_ins


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


def shown(capsys, *argv) -> str:
    assert run(["status", *argv]) == 0
    return capsys.readouterr().out


def test_requests_and_speed_stand_beside_the_planned_speed(busy, store, capsys):
    assert "  planned    no speed: the plan was not written down" in shown(capsys, "8b")
    (found,) = json.loads(shown(capsys, "8b", "--json"))["services"]
    assert found["engine"]["planned_generation_tokens_per_s"] is None
    predicted = {"output_tokens_per_s_at_1": 120.0, "request_input_tokens": 1024.0, "request_output_tokens": 256.0}
    store.write_submitted(make_submitted(service="8b", cluster="local", predicted={**predicted, "measured_runs": 3.0}))
    out = shown(capsys, "8b")
    planned = "120 generated with 1 in flight, of 1,024 tokens in and 256 out"
    for line in (
        "  requests   1 running, 0 waiting\n",
        "  tokens/s   0 generated, over ",
        f"  planned    {planned}; corrected by 3 earlier runs measured here\n",
        "  tokens     0 generated, since its engine started\n",
        "  age        ",
    ):
        assert line in out
    (found,) = json.loads(shown(capsys, "8b", "--json"))["services"]
    engine = found["engine"]
    assert engine.pop("over_s") > 0
    assert engine == {
        "requests_running": 1,
        "requests_waiting": 0,
        "prompt_tokens": None,
        "generation_tokens": 0.0,
        "prompt_tokens_per_s": None,
        "generation_tokens_per_s": 0.0,
        "kv_cache_use": None,
        "planned_generation_tokens_per_s": 120.0,
        "problem": None,
    }


def test_the_table_of_all_services_says_what_each_engine_does(busy, store, capsys):
    store.write(make_record(service="8b", job_id="8", cluster="local", state="starting"))
    out = " ".join(shown(capsys).split())
    assert " 1 running, 0 waiting, 0 tokens/s 8b 8 starting " in out
    assert out.count("running") == 1  # the one that starts does nothing yet
    found = {one["job_id"]: one["engine"] for one in json.loads(shown(capsys, "--json"))["services"]}
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


def test_an_engine_without_requests_is_looked_at_once(live, capsys, monkeypatch):
    monkeypatch.setattr(engine_work, "LOOK_S", 1e9)
    out = shown(capsys, "8b")
    assert "  requests   0 running, 0 waiting\n" in out
    assert "  tokens/s   none: no request runs\n" in out
    assert "planned" not in out
    assert " 0 running, 0 waiting" in " ".join(shown(capsys).split())
    (found,) = json.loads(shown(capsys, "--json"))["services"]
    assert (found["engine"]["requests_running"], found["engine"]["problem"]) == (0, None)


def test_one_that_starts_has_no_line_and_one_that_does_not_answer_has_the_reason(store, capsys):
    store.ensure_api_key("8b")
    store.write(make_record(service="8b", job_id="7", cluster="local", state="starting"))
    assert "requests" not in shown(capsys, "8b")
    (found,) = json.loads(shown(capsys, "8b", "--json"))["services"]
    assert found["engine"]["problem"] == "it is starting"


def test_what_others_write_into_a_record_moves_no_cursor(store, capsys):
    evil = {"a\x1b[2Jb": 1.0}
    store.ensure_api_key("8b")
    store.write(make_record(service="8b", job_id="7", cluster="local", measured=evil, predicted=evil))
    assert "\x1b" not in shown(capsys, "8b")
    assert "\x1b" not in shown(capsys, "8b", "--json")
