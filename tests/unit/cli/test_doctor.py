"""`hpc-serve doctor`: what is printed, and its exit code."""

from __future__ import annotations

import json
import tarfile

import pytest

from hpc_serve.cli.main import run
from tests.support.stubs import make_record

OOM = "ERROR 11-20 10:00:03 [a.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"


pytestmark = pytest.mark.usefixtures("stand_ins")


def fail(store, **values):
    log_dir = store.ensure_service("8b") / "logs"
    known = {"state": "failed", "failed_part": "engine", "reason": "engine exited with 1", "log_dir": str(log_dir)}
    store.write(make_record(**{"service": "8b", "job_id": "7", "cluster": "local", **known, **values}))
    return log_dir


def test_a_failure_is_explained_with_its_cure_and_its_lines(store, ran):
    log_dir = fail(store)
    (log_dir / "7-node0.log").write_text("begin\n")
    (log_dir / "7-node1.log").write_text(f"begin\n{OOM}\n")
    for target in ("8b", "7"):
        out = ran(["doctor", target], 6).out
        assert out.startswith("8b (job 7) failed: engine exited with 1\nCause: a GPU ran out of memory.\nTo do: ")
        assert "\n    7-node1.log:2: torch.OutOfMemoryError: CUDA out of memory." in out
        assert out.endswith(f"Logs: {log_dir}/7*.log\n")
    details = "  cause      a GPU ran out of memory (7-node1.log:2)\n  to do      `hpc-serve plan`"
    assert details in ran(["status", "8b"]).out


def test_what_srun_said_in_the_log_of_a_script_given_to_sbatch_by_hand_is_read(store, stand_ins, ran, tmp_path):
    """As seen where a node did not see the home: the record has the consequence alone, Slurm knows the script's log."""
    log_dir = fail(store, cluster="slurm", failed_part="nodes", reason="no launcher from node rank 1 within 120 s")
    (log_dir / "7-node0.log").write_text("begin\n")
    log = tmp_path / "hpc-serve-8b-7.log"
    log.write_text("srun: error: task 1 launch failed: Slurmd could not connect IO\n")
    stand_ins.job("7", "FAILED", log=str(log))
    assert "could not open its log" in ran(["doctor", "7"], 6).out.partition("To do: ")[0]


def test_as_json(store, ran):
    log_dir = fail(store)
    (log_dir / "7-node0.log").write_text(f"{OOM}\n")
    found = json.loads(ran(["doctor", "8b", "--json"], 6).out)
    assert found.keys() == {"service", "job", "state", "reason", "findings", "logs"}
    assert found["findings"][0]["name"] == "gpu-out-of-memory"
    assert found["findings"][0]["lines"][0]["number"] == 1


def test_where_nothing_is_wrong_or_nothing_is_there(store, ran):
    fail(store, state="stopped", reason="SIGTERM", failed_part=None)
    assert "Nothing is wrong that its logs or Slurm tell of." in ran(["doctor", "8b"]).out
    ran(["doctor", "nonesuch"], 5)


def test_a_bundle_is_written_beside_the_report(store, ran, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "planted-token")
    log_dir = fail(store)
    (log_dir / "7-node0.log").write_text(f"planted-token\n{OOM}\n")
    path = tmp_path / "report.tar.gz"
    said = f"Wrote {path}: diagnosis.txt, status.json, versions.txt, logs/7-node0.log."
    assert said in ran(["doctor", "8b", "--bundle", str(path)], 6).err
    with tarfile.open(path) as tar:
        assert not any("planted" in tar.extractfile(member).read().decode() for member in tar.getmembers())
    ran(["doctor", "8b", "--bundle", str(path)], 5)


HUB_TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
PEM_LINES = ["-----BEGIN PRIVATE KEY-----", "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC", "short=", "-----END PRIVATE KEY-----"]
LINES = ("logs 8b", "status 8b", "status --json", "status 8b --json", "doctor 8b", "doctor 8b --json")
commands = pytest.mark.parametrize("words", [line.split() for line in LINES], ids=" ".join)


@commands
def test_keys_that_logs_or_records_hold_are_not_shown(store, capsys, monkeypatch, words):
    key = store.ensure_api_key("8b").read_text().strip()
    monkeypatch.setenv("MY_SECRET", "of-the-environment")
    said = f"RuntimeError: {HUB_TOKEN} and {key} for Authorization: Bearer {key}, of-the-environment"
    lines = [said, *PEM_LINES, "the last line"]
    log_dir = fail(store, reason=said, last_log_lines=tuple(lines))
    (log_dir / "7-node0.log").write_text("\n".join(["Traceback (most recent call last):", *lines]) + "\n")
    run(words)
    out = "".join(capsys.readouterr())
    assert "RuntimeError: <redacted>" in out
    for secret in (key, HUB_TOKEN, PEM_LINES[1], PEM_LINES[2]):
        assert secret not in out
    assert "of-the-environment" not in out or words[0] == "doctor"
    assert "the last line" in out or words[0] == "doctor"


@commands
def test_no_character_of_a_log_reaches_the_terminal_as_it_is(store, capsys, words):
    hostile = "RuntimeError: a\x9b31mb\u202ec\u2066d\u200ee\u2028f\x1b[2Jg"
    log_dir = fail(store, reason=hostile, last_log_lines=(hostile,))
    (log_dir / "7-node0.log").write_text(f"Traceback (most recent call last):\n{hostile}\n")
    run(words)
    out = capsys.readouterr().out
    assert "RuntimeError: a" in out
    assert all(character.isprintable() or character == "\n" for character in out), ascii(out)
    if "--json" in words:
        assert json.loads(out)
