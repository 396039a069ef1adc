"""The logs of a replica are read for what is wrong with it, long ones too, and a report holds no secret."""

from __future__ import annotations

import json
import os
import stat
import tarfile
from pathlib import Path

import pytest

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import StoreError
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.diagnosis import choose_replica, diagnose_replica, read_log, write_bundle
from hpc_serve.submit.services.wait import failure_report
from tests.support.stubs import make_submitted

OOM = "ERROR 11-20 10:00:03 [a.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
DEAD = "ERROR 11-20 10:00:09 [b.py:7] EngineDeadError: EngineCore encountered an issue."


def failed(log_dir, **values) -> ReplicaStatus:
    job_id, cluster = values.pop("job_id", "7"), values.pop("cluster", "slurm")
    job = make_submitted(service="8b", job_id=job_id, cluster=cluster)
    known = {"job": job, "state": "failed", "reason": "engine exited with 1"}
    return ReplicaStatus(**{**known, "log_dir": str(log_dir), **values})


@pytest.fixture
def logs(tmp_path):
    (tmp_path / "7.log").write_text("srun: error: n1: task 0: Exited with exit code 1\n")
    (tmp_path / "7-node0.log").write_text(f"begin\n{DEAD}\n")
    (tmp_path / "7-node1.log").write_text(f"begin\nstep\r{OOM}\n")
    return tmp_path


def test_the_cause_is_found_on_whichever_node(logs):
    found = diagnose_replica(failed(logs))
    assert (found.cause.name, found.cause.lines[0].place) == ("gpu-out-of-memory", "7-node1.log:2")
    lines = found.report.splitlines()
    assert lines[0] == "Cause: a GPU ran out of memory."
    assert lines[1].startswith("To do: `hpc-serve plan`")
    assert lines[2:4] == [
        "Read from:",
        "    7-node1.log:2: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    ]
    assert lines[-1] == f"Logs: {logs}/7*.log"


def test_slurm_s_words_are_a_cause_where_the_logs_tell_none(tmp_path):
    status = failed(tmp_path, reason="it used more memory than it had asked Slurm for (OUT_OF_MEMORY)")
    (tmp_path / "7-node0.log").write_text("all is well\n")
    assert diagnose_replica(status).cause.name == "node-memory-limit"


@pytest.mark.parametrize("state", ["ready", "draining", "stopped", "pending"])
def test_nothing_is_wrong_with_a_replica_that_serves_waits_or_was_stopped(logs, state):
    assert diagnose_replica(failed(logs, state=state, reason="")).findings == ()


RAYLET = (
    "[2026-11-20 10:00:02,000 C 9 9] (raylet) thread.cc:1: pthread_create failed: Resource temporarily unavailable\n"
)


def test_ray_s_own_logs_are_read_where_the_others_tell_a_symptom_alone(tmp_path):
    (tmp_path / "7-node0.log").write_text("raylet [exit code=-6]\n")
    (tmp_path / "7-node1-ray.log").write_text(f"==> raylet.out\n{RAYLET}")
    found = diagnose_replica(failed(tmp_path))
    assert (found.cause.name, found.cause.lines[0].place) == ("too-many-threads", "7-node1-ray.log:2")
    assert [path.name for path in found.logs] == ["7-node0.log", "7-node1-ray.log"]
    (tmp_path / "7-node0.log").write_text(OOM)
    assert [one.name for one in diagnose_replica(failed(tmp_path)).findings] == ["gpu-out-of-memory"]


def test_what_hpc_serve_ended_by_itself_is_said_in_its_own_words(tmp_path):
    own = "HPC_SERVE_TMPDIR=/tmp/ray on n1 is not used: it belongs to user 9. Set it to a folder of your own."
    (tmp_path / "7-node0.log").write_text(f"2026-11-20 10:00:00 n1 ERROR hpc-serve: {own}\n")
    report = diagnose_replica(failed(tmp_path, reason=own)).report
    assert report.splitlines()[0] == f"Cause: {own}"
    assert "no cause that is known here" not in report


def test_a_start_is_wrong_only_for_a_known_cause(logs):
    assert diagnose_replica(failed(logs, state="starting", reason="")).cause is not None
    (logs / "7-node1.log").write_text("ERROR 11-20 10:00:03 [a.py:1] ValueError: tried again\n")
    assert diagnose_replica(failed(logs, state="starting", reason="")).findings == ()


def test_a_job_that_waits_for_ever_says_so(tmp_path):
    reason = "it asks for more nodes than its partition allows; it will not start by itself (PartitionNodeLimit)"
    status = failed(tmp_path, state="pending", reason=reason, pending_reason="PartitionNodeLimit")
    cause = diagnose_replica(status).cause
    assert (cause.cause, cause.cure.startswith("Submit it with fewer --nodes")) == (reason, True)


def test_a_failure_without_a_word_says_what_the_record_says(tmp_path):
    status = failed(tmp_path, last_log_lines=("a", "b"))
    cause = diagnose_replica(status).cause
    assert (cause.cause, [line.text for line in cause.lines]) == ("engine exited with 1", ["a", "b"])
    assert "Last log lines:\n    a\n    b\nCause: engine exited with 1." in failure_report(status)


def test_of_a_long_log_both_ends_are_read_and_lines_keep_their_numbers(tmp_path):
    path = tmp_path / "log"
    lines = [f"line {number}" for number in range(1, 20_001)]
    lines[2], lines[9_999], lines[19_989] = OOM, OOM.replace("CUDA", "HIP"), DEAD
    path.write_text("\n".join(lines) + "\n")
    log = read_log(path, head_bytes=2_000, tail_bytes=3_000)
    assert [match.line for match in log.matches] == [3]
    assert [one.line for one in log.raised] == [3, 19_990]
    assert log.last_lines[-1] == (20_000, "line 20000")
    assert not read_log(tmp_path / "none").last_lines


def test_lines_keep_their_numbers_behind_one_that_is_read_in_pieces(tmp_path):
    (tmp_path / "log").write_text(f"{'x' * 3_000_000}\n{OOM}\n")
    assert [match.line for match in read_log(tmp_path / "log").matches] == [2]


def test_of_several_replicas_the_one_in_trouble_is_meant(tmp_path):
    states = ("ready", "unresponsive", "failed", "stopped")
    ready, hung, old, stopped = (failed(tmp_path, state=state) for state in states)
    assert choose_replica([old, hung, ready]) is hung
    assert choose_replica([ready, old]) is old
    assert choose_replica([old, ready]) is ready
    assert choose_replica([ready, stopped]) is ready
    assert choose_replica([old, stopped]) is stopped


def texts_of(bundle: Path) -> dict[str, str]:
    """The text of each file of a bundle."""
    folder = "hpc-serve-report/"
    with tarfile.open(bundle) as tar:
        assert all(name.startswith(folder) for name in tar.getnames())
        return {one.name.removeprefix(folder): tar.extractfile(one).read().decode() for one in tar.getmembers()}


def test_a_bundle_holds_the_logs_and_no_secret(logs):
    store = ServiceStore(logs / "home")
    store.ensure_api_key("8b")
    key = store.read_api_key("8b")
    planted = {"HF_TOKEN": "planted-in-the-environment", "HOME": str(logs)}
    script = logs / "script.sh"
    script.write_text("export HF_TOKEN=planted-in-the-script\nexport MODEL=8b\n")
    store.write_submitted(make_submitted(service="8b", script=str(script)))
    (logs / "7-node0.log").write_text(
        f"key {key}\n{planted['HF_TOKEN']}\n-----BEGIN CERTIFICATE-----\nplanted\n-----END CERTIFICATE-----\n{OOM}\n"
    )
    found = diagnose_replica(failed(logs, last_log_lines=(f"Bearer {key}",)))
    path = logs / "report.tar.gz"
    status = {"last_log_lines": [f"Bearer {key}"], "reason": "engine exited with 1"}
    names = write_bundle(path, found, status, store, planted)
    assert names == [
        *("diagnosis.txt", "status.json", "versions.txt", "logs/7.log", "logs/7-node0.log", "logs/7-node1.log"),
        "script.sh",
    ]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    texts = texts_of(path)
    assert list(texts) == names
    whole = "\n".join(texts.values())
    assert key not in whole
    assert "planted" not in whole
    assert "CUDA out of memory" in texts["logs/7-node0.log"]
    assert "export MODEL=8b" in texts["script.sh"]
    assert json.loads(texts["status.json"])["reason"] == "engine exited with 1"
    with pytest.raises(StoreError, match="is there already"):
        write_bundle(path, found, status, store, planted)


def test_a_long_log_in_a_bundle_is_cut_between_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("hpc_serve.submit.diagnosis._REPORT_HEAD_BYTES", 50)
    monkeypatch.setattr("hpc_serve.submit.diagnosis._REPORT_TAIL_BYTES", 50)
    (tmp_path / "7.log").write_text("".join(f"HF_TOKEN=planted-{number:04}\n" for number in range(100)))
    write_bundle(tmp_path / "x.tar.gz", diagnose_replica(failed(tmp_path)), {}, ServiceStore(tmp_path / "home"), {})
    text = texts_of(tmp_path / "x.tar.gz")["logs/7.log"]
    assert "planted" not in text
    assert "a part of this log was left out" in text


def test_a_line_of_a_bundle_that_is_too_long_is_left_out(tmp_path):
    (tmp_path / "7.log").write_text("a\n" + "x" * 1_100_000 + " HF_TOKEN=planted-" + "y" * 7_000_000 + "\nb\n")
    write_bundle(tmp_path / "x.tar.gz", diagnose_replica(failed(tmp_path)), {}, ServiceStore(tmp_path / "home"), {})
    text = texts_of(tmp_path / "x.tar.gz")["logs/7.log"]
    assert text.splitlines() == ["a", "… a part of this log was left out …", "b"]
