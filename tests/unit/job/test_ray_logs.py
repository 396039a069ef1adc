"""The ends of Ray's logs are in the job's folder after the run, whatever became of the node's own folder."""

from __future__ import annotations

import shutil

import pytest

from hpc_serve.job.ray import ray_logs
from hpc_serve.job.ray.ray_logs import kept_ray_logs, read_ends
from tests.cluster import wait_for
from tests.support.nodes import make_node


@pytest.fixture
def logs(tmp_path):
    """Where Ray's session has its logs."""
    session = tmp_path / "node" / "ray" / "session_2026"
    (session / "logs").mkdir(parents=True)
    (session.parent / "session_latest").symlink_to(session.name)
    return session / "logs"


def test_the_ends_of_all_of_them_each_below_its_name(logs, monkeypatch):
    monkeypatch.setattr(ray_logs, "_BYTES_OF_A_FILE", 20)
    (logs / "raylet.out").write_text("first line\nsecond line\nlast line\n")
    (logs / "gcs_server.out").write_text("gone\n")
    (logs / "worker-1.err").write_bytes(b"\xff" * 30)
    (logs / "worker-2.err").touch()
    (logs / "monitor.log").write_text("of no use\n")
    assert read_ends(logs.parents[1]) == (
        "==> gcs_server.out\ngone\n==> raylet.out\nlast line\n==> worker-1.err\n" + "�" * 20 + "\n"
    )


def test_no_more_than_so_many_bytes_of_a_node(logs, monkeypatch):
    monkeypatch.setattr(ray_logs, "_BYTES_OF_A_NODE", 25)
    (logs / "gcs_server.out").write_text("a\n" * 10)
    (logs / "raylet.out").write_text("b\n" * 10)
    assert read_ends(logs.parents[1]) == "==> gcs_server.out\n" + "a\n" * 10 + "==> raylet.out\n" + "b\n" * 2


def test_they_are_kept_at_the_end_of_a_run(logs, tmp_path):
    node = make_node(tmp_path / "node", environ={"HPC_SERVE_LOG_DIR": str(tmp_path)})
    with kept_ray_logs(node):
        (logs / "raylet.out").write_text("[2026-11-22 10:00:00,000 E 1 1] (raylet) main.cc:9: the end\n")
    kept = tmp_path / "1-node0-ray.log"
    assert kept.read_text().endswith("main.cc:9: the end\n")
    assert kept.stat().st_mode & 0o777 == 0o600


def test_and_while_it_lasts_for_a_node_that_is_lost(logs, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_logs, "_FIRST_AFTER_S", 0.01)
    node = make_node(tmp_path / "node", environ={"HPC_SERVE_LOG_DIR": str(tmp_path)})
    (logs / "raylet.out").write_text("so far\n")
    kept = tmp_path / "1-node0-ray.log"
    with kept_ray_logs(node):
        wait_for(kept.exists, 180, what="the first copy", step_s=0.02)
        shutil.rmtree(tmp_path / "node")
    assert kept.read_text() == "==> raylet.out\nso far\n"


@pytest.mark.parametrize(("backend", "environ"), [("mp", {"HPC_SERVE_LOG_DIR": "."}), ("ray", {})])
def test_a_run_without_ray_or_without_such_a_folder_keeps_none(logs, tmp_path, monkeypatch, backend, environ):
    monkeypatch.chdir(tmp_path)
    (logs / "raylet.out").write_text("x\n")
    with kept_ray_logs(make_node(tmp_path / "node", backend=backend, environ=environ)):
        pass
    assert not list(tmp_path.glob("*.log"))


def test_a_folder_that_cannot_be_written_to_ends_nothing(logs, tmp_path, monkeypatch):
    said: list[str] = []  # not by caplog: a library that another test imports turns off loggers that are there
    monkeypatch.setattr(ray_logs._log, "warning", lambda words, *values: said.append(words % values))
    (logs / "raylet.out").write_text("x\n")
    with kept_ray_logs(make_node(tmp_path / "node", environ={"HPC_SERVE_LOG_DIR": str(tmp_path / "none")})):
        pass
    assert "Ray's logs cannot be kept" in said[0]
