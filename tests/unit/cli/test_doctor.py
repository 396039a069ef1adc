"""`hpc-serve doctor`: what is printed, and its exit code."""

from __future__ import annotations

import json
import os
import tarfile

import pytest

from hpc_serve.cli.main import run
from hpc_serve.rendezvous.store import ServiceStore
from tests.support.fake_slurm import FakeSlurm
from tests.support.stubs import make_record

OOM = "ERROR 11-20 10:00:03 [a.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"


@pytest.fixture
def slurm(tmp_path):
    return FakeSlurm(tmp_path / "slurm")


@pytest.fixture
def store(tmp_path, monkeypatch, slurm):
    """The store of a home, and a Slurm of stand-ins."""
    monkeypatch.setenv("PATH", f"{slurm.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("HPC_SERVE_HOME", str(tmp_path / "home"))
    return ServiceStore(tmp_path / "home")


def fail(store, **values):
    log_dir = store.ensure_service("8b") / "logs"
    known = {"state": "failed", "failed_part": "engine", "reason": "engine exited with 1", "log_dir": str(log_dir)}
    store.write(make_record(**{"service": "8b", "job_id": "7", "cluster": "local", **known, **values}))
    return log_dir


def test_a_failure_is_explained_with_its_cure_and_its_lines(store, capsys):
    log_dir = fail(store)
    (log_dir / "7-node0.log").write_text("begin\n")
    (log_dir / "7-node1.log").write_text(f"begin\n{OOM}\n")
    for target in ("8b", "7"):
        assert run(["doctor", target]) == 6
        out = capsys.readouterr().out
        assert out.startswith("8b (job 7) failed: engine exited with 1\nCause: a GPU ran out of memory.\nTo do: ")
        assert "\n    7-node1.log:2: torch.OutOfMemoryError: CUDA out of memory." in out
        assert out.endswith(f"Logs: {log_dir}/7*.log\n")
    assert run(["status", "8b"]) == 0
    assert (
        "  cause      a GPU ran out of memory (7-node1.log:2)\n  to do      `hpc-serve plan`" in capsys.readouterr().out
    )


def test_what_srun_said_in_the_log_of_a_script_given_to_sbatch_by_hand_is_read(store, slurm, capsys, tmp_path):
    """As seen where a node did not see the home: the record has the consequence alone, Slurm knows the script's log."""
    log_dir = fail(store, cluster="slurm", failed_part="nodes", reason="no launcher from node rank 1 within 120 s")
    (log_dir / "7-node0.log").write_text("begin\n")
    log = tmp_path / "hpc-serve-8b-7.log"
    log.write_text("srun: error: task 1 launch failed: Slurmd could not connect IO\n")
    slurm.job("7", "FAILED", log=str(log))
    assert run(["doctor", "7"]) == 6
    assert "does not see the folder of logs" in capsys.readouterr().out.partition("To do: ")[0]


def test_as_json(store, capsys):
    log_dir = fail(store)
    (log_dir / "7-node0.log").write_text(f"{OOM}\n")
    assert run(["doctor", "8b", "--json"]) == 6
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"service", "job", "state", "reason", "findings", "logs"}
    assert found["findings"][0]["name"] == "gpu-out-of-memory"
    assert found["findings"][0]["lines"][0]["number"] == 1


def test_where_nothing_is_wrong_the_exit_code_is_0(store, capsys):
    fail(store, state="stopped", reason="SIGTERM", failed_part=None)
    assert run(["doctor", "8b"]) == 0
    assert "Nothing is wrong that its logs or Slurm tell of." in capsys.readouterr().out


def test_an_unknown_service_has_the_exit_code_of_what_is_not_found(store, capsys):
    assert run(["doctor", "nonesuch"]) == 5


def test_a_bundle_is_written_beside_the_report(store, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "planted-token")
    log_dir = fail(store)
    (log_dir / "7-node0.log").write_text(f"planted-token\n{OOM}\n")
    path = tmp_path / "report.tar.gz"
    assert run(["doctor", "8b", "--bundle", str(path)]) == 6
    assert f"Wrote {path}: diagnosis.txt, status.json, versions.txt, logs/7-node0.log." in capsys.readouterr().err
    with tarfile.open(path) as tar:
        assert not any("planted" in tar.extractfile(member).read().decode() for member in tar.getmembers())
    assert run(["doctor", "8b", "--bundle", str(path)]) == 5
