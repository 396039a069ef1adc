"""`logs`: which files are shown of which job, whose lines, and how they are followed."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from hpc_serve.exit_codes import exit_code_words
from hpc_serve.submit import diagnosis, logs
from hpc_serve.submit.services import wait
from tests.support.stubs import make_record


def test_logs_of_the_latest_job_and_of_one_node(store, ran):
    log_dir = store.ensure_service("8b") / "logs"
    for job_id, age_s in (("1", 300), ("2", 200)):
        started = {"state": "stopped", "started_at": time.time() - age_s, "log_dir": str(log_dir)}
        store.write(make_record(service="8b", job_id=job_id, **started))
        for name in (f"{job_id}.log", f"{job_id}-node0.log", f"{job_id}-node1.log"):
            (log_dir / name).write_text(f"first of {name}\nlast of {name}\n")
    blocks = [f"==> {log_dir}/{name} <==\nlast of {name}\n" for name in ("2.log", "2-node0.log", "2-node1.log")]
    out, err = ran(["logs", "8b", "--tail", "1"])
    assert out == "\n".join(blocks)
    assert err == "These are the logs of job 2, which is stopped. 8b also has 1 (stopped): hpc-serve logs JOB\n"
    last = f"==> {log_dir}/1-node1.log <==\nfirst of 1-node1.log\nlast of 1-node1.log\n"
    assert ran(["logs", "1", "--node", "1", "--follow"]).out == last
    assert len(ran(["logs", "8b", "--files"]).out.split()) == 3
    why = f"has no logs of node 5 that this host can see; they would be {log_dir}/2*.log"
    assert why in ran(["logs", "8b", "--node", "5"], 1).err
    ran(["logs", "nonesuch"], 5)


def test_logs_that_went_to_a_place_of_their_own_are_named(store, stand_ins, ran, tmp_path, monkeypatch):
    monkeypatch.setattr(wait, "_RECORD_MAY_FOLLOW_S", 0.0)
    log = tmp_path / "hpc-serve-8b-9.log"
    stand_ins.job("9", "FAILED", exit_code="78:0", name="hpc-serve-8b", log=str(log))
    said = ran(["logs", "8b"], 1).err
    assert f"8b (job 9, failed: its script exited with code 78: {exit_code_words(78)} (FAILED)) has no logs" in said
    assert f"they would be {log} and {store.log_dir('8b')}/9*.log" in said
    log.write_text("no Python environment\n")
    assert ran(["logs", "8b"]).out == f"==> {log} <==\nno Python environment\n"
    for target in ("8b", "9"):
        assert f"Logs: {log}, " in ran(["wait", target], 6).err


@pytest.fixture
def job_logs(store, monkeypatch):
    """The folder of logs of a job of two nodes, and what happens before each time that its end is asked for."""
    monkeypatch.setattr(logs, "_POLL_S", 0.01)
    store.ensure_api_key("8b")
    store.write(make_record(service="8b", job_id="7", cluster="local", state="starting"))
    steps = list[Callable[[], None]]()

    def is_over() -> bool:
        if not steps:
            return True
        steps.pop(0)()
        return False

    monkeypatch.setattr(diagnosis, "end_of", lambda store, status: is_over)
    return store.log_dir("8b"), steps


def append(path, text: str):
    def write() -> None:
        with path.open("a") as file:
            file.write(text)

    return write


def test_one_node_is_followed_from_before_its_file_is_there(job_logs, ran):
    folder, steps = job_logs
    node0, node1 = folder / "7-node0.log", folder / "7-node1.log"
    node0.write_text("of the head\n")
    steps += [append(node1, "first\nhalf"), append(node0, "more of the head\n"), append(node1, " a line\n\x1b[2Jlast")]
    assert ran(["logs", "8b", "--follow", "--node", "1"]).out == f"==> {node1} <==\nfirst\nhalf a line\n\\x1b[2Jlast\n"


def test_without_a_node_all_files_are_followed_each_under_its_name(job_logs, ran):
    folder, steps = job_logs
    batch, node0 = folder / "7.log", folder / "7-node0.log"
    batch.write_text("old\nscript\n")
    steps += [append(node0, "head\n"), append(batch, "script again\n")]
    out = f"==> {batch} <==\nscript\n\n==> {node0} <==\nhead\n\n==> {batch} <==\nscript again\n"
    assert ran(["logs", "8b", "--follow", "--tail", "1"]).out == out


BATCH = "hpc-serve: logs of this run are x\n"
LAUNCHER = "2026-11-22 14:05:13 n1 INFO hpc-serve: launcher of 8b begins\n"
ENGINE = "(APIServer pid=1) INFO 11-22 14:05:20 [model.py:733] a line\n  File x.py, of a traceback\n"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((), {"7.log": BATCH, "7-node0.log": LAUNCHER + ENGINE, "7-node1.log": LAUNCHER}),
        (("--only", "script"), {"7.log": BATCH}),
        (("--only", "launcher"), {"7-node0.log": LAUNCHER, "7-node1.log": LAUNCHER}),
        (("--only", "launcher", "--node", "1"), {"7-node1.log": LAUNCHER}),
        (("--only", "engine"), {"7-node0.log": ENGINE}),
        (("--only", "engine", "--tail", "1"), {"7-node0.log": ENGINE.splitlines(True)[1]}),
        (("--only", "ray"), {"7-node0-ray.log": "==> raylet.out\nR\n"}),
        (("--only", "ray", "--node", "0"), {"7-node0-ray.log": "==> raylet.out\nR\n"}),
    ],
)
def test_the_lines_of_one_writer_are_shown(job_logs, ran, words, shown):
    folder, _ = job_logs
    files = {"7.log": BATCH, "7-node0.log": LAUNCHER + ENGINE, "7-node1.log": LAUNCHER}
    for name, text in {**files, "7-node0-ray.log": "==> raylet.out\nR\n"}.items():
        (folder / name).write_text(text)
    parts = [f"==> {folder / name} <==\n{text}" for name, text in shown.items()]
    assert ran(["logs", "8b", *words]).out == "\n".join(parts)
    if "--tail" not in words:
        assert ran(["logs", "8b", *words, "--follow"]).out == "\n".join(parts)


def test_that_a_writer_has_no_logs_is_said(job_logs, ran):
    folder, _ = job_logs
    (folder / "7-node0.log").write_text(LAUNCHER)
    assert "has no logs by ray of node 0" in ran(["logs", "8b", "--only", "ray", "--node", "0"], 1).err
