"""`doctor`, its preflight among it: what is printed, its exit code, and the job that is submitted. It is a stand-in."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from hpc_serve.cli.main import run
from hpc_serve.errors import ServiceFailedError
from hpc_serve.rendezvous.files import write_json
from hpc_serve.rendezvous.store import PreflightReport, Verdict, preflight_file
from hpc_serve.submit.services import services, wait
from tests.support.stubs import make_record

OOM = "ERROR 11-20 10:00:03 [a.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"


def fail(store, log="begin\n", **values):
    """Have job 7 of 8b fail with this log of its first node; return the folder of its logs."""
    log_dir = store.ensure_service("8b") / "logs"
    known = {"state": "failed", "failed_part": "engine", "reason": "engine exited with 1", "log_dir": str(log_dir)}
    store.write(make_record(**{"service": "8b", "job_id": "7", "cluster": "local", **known, **values}))
    (log_dir / "7-node0.log").write_text(log)
    return log_dir


def test_a_failure_is_explained_with_its_cure_and_its_lines(store, ran):
    log_dir = fail(store)
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
    fail(store, cluster="slurm", failed_part="nodes", reason="no launcher from node rank 1 within 120 s")
    log = tmp_path / "hpc-serve-8b-7.log"
    log.write_text("srun: error: task 1 launch failed: Slurmd could not connect IO\n")
    stand_ins.job("7", "FAILED", log=str(log))
    assert "could not open its log" in ran(["doctor", "7"], 6).out.partition("To do: ")[0]


def test_as_json(store, told):
    fail(store, f"{OOM}\n")
    found = told("doctor", "8b", code=6)
    assert found.keys() == {"service", "job", "state", "reason", "findings", "logs"}
    assert (found["findings"][0]["name"], found["findings"][0]["lines"][0]["number"]) == ("gpu-out-of-memory", 1)


def test_where_nothing_is_wrong_or_nothing_is_there(store, ran):
    fail(store, state="stopped", reason="SIGTERM", failed_part=None)
    assert "Nothing is wrong that its logs or Slurm tell of." in ran(["doctor", "8b"]).out
    ran(["doctor", "nonesuch"], 5)


def test_a_bundle_is_written_beside_the_report(store, ran, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "planted-token")
    fail(store, f"planted-token\n{OOM}\n")
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
    log = "\n".join(["Traceback (most recent call last):", *lines, ""])
    fail(store, log, reason=said, last_log_lines=tuple(lines))
    run(words)
    out = "".join(capsys.readouterr())
    assert "RuntimeError: <redacted>" in out
    assert [secret for secret in (key, HUB_TOKEN, *PEM_LINES[1:3]) if secret in out] == []
    if words[0] != "doctor":
        assert ("of-the-environment" in out, "the last line" in out) == (False, True)


@commands
def test_no_character_of_a_log_reaches_the_terminal_as_it_is(store, capsys, words):
    hostile = "RuntimeError: a\x9b31mb\u202ec\u2066d\u200ee\u2028f\x1b[2Jg"
    fail(store, f"Traceback (most recent call last):\n{hostile}\n", reason=hostile, last_log_lines=(hostile,))
    run(words)
    out = capsys.readouterr().out
    assert "RuntimeError: a" in out
    assert all(character.isprintable() or character == "\n" for character in out), ascii(out)
    if "--json" in words:
        assert json.loads(out)


SHM = Verdict(check="shm", level="ok", nodes=("n1", "n2"), seen="/dev/shm has 10.0 of 10.0 GiB free", took_s=0.01)
CLOCKS = Verdict(check="clocks", level="warning", nodes=("n2",), seen="its clock is 60.0 s behind", cure="Tell NTP.")
WEIGHTS = Verdict(check="weights", level="failed", nodes=("n2",), seen="no such folder", cure="Copy them.")


@pytest.fixture
def ends_with(store, monkeypatch):
    """Has the job end at once with a report of these verdicts; returns the requests that were submitted."""
    requests = []

    def submit_with(*verdicts: Verdict):
        submit = services.submit

        def submitted(request, **options):
            requests.append(request)
            return submit(request, **options)

        def ended(store, service, *, job_id, **options):
            state = "failed" if any(verdict.level == "failed" for verdict in verdicts) else "stopped"
            store.write(make_record(service=service, job_id=job_id, state=state, reason="it ended"))
            if verdicts:
                report = PreflightReport(verdicts=verdicts, num_nodes=2, took_s=0.2)
                write_json(preflight_file(store, service, f"{job_id}-r0-0.json"), report)
            raise ServiceFailedError("it ended")

        monkeypatch.setattr(services, "submit", submitted)
        monkeypatch.setattr(wait, "wait", ended)
        return requests

    return submit_with


def test_a_short_job_of_another_name_is_submitted_and_its_table_is_shown(store, ends_with, ran):
    requests = ends_with(SHM, CLOCKS)
    out = ran(["doctor", "--preflight", "8b", "--keep-up", "--time", "20", "--", "--enforce-eager"]).out
    rows = [line.split() for line in out.splitlines()]
    assert ["shm", "ok", "n1,", "n2", "/dev/shm", "has", "10.0", "of", "10.0", "GiB", "free", "0.01", "s"] in rows
    assert "\nclocks: Tell NTP.\n" in out
    assert out.endswith("preflight of 2 nodes in 0.2 s: 1 warning, 1 ok\n")
    (request,) = requests
    assert (request.service, request.preflight_only) == ("preflight-8b", True)
    assert (request.keep_up, request.replicas, request.slurm.time) == (False, 1, "20")
    assert request.engine_args == ("--enforce-eager",)
    assert not store.read("preflight-8b").records
    assert not list(store.service_dir("preflight-8b").glob("*.preflight"))


def test_the_script_ends_after_the_preflight(store, ends_with, ran):
    ends_with(WEIGHTS)
    assert "\nweights: Copy them.\n" in ran(["doctor", "--preflight", "8b"], 6).out
    (job,) = store.read_submitted("preflight-8b")
    script = Path(str(job.script)).read_text()
    assert " --preflight-only -- \\\n" in script
    assert "#SBATCH --time=00:15:00\n" in script


def test_a_preflight_as_json(ends_with, told):
    ends_with(SHM)
    found = told("doctor", "--preflight", "8b")
    assert (found["service"], found["verdicts"][0]["check"]) == ("preflight-8b", "shm")


def test_a_job_that_ends_before_its_preflight_says_how(ends_with, ran):
    ends_with()
    assert ran(["doctor", "--preflight", "8b"], 6).err.endswith("error: it ended\n")


def test_options_of_submit_alone_need_preflight(ran):
    ran(["doctor", "8b", "--nodes", "2"], 2)
    ran(["doctor", "8b", "--", "--preflight"], 2)


def test_the_doctor_says_what_the_preflight_of_a_run_warned_of(store, ran):
    fail(store)
    path = preflight_file(store, "8b", "7-r0-0.json")
    write_json(path, PreflightReport(verdicts=(SHM, CLOCKS), num_nodes=2, took_s=0.2))
    said = "preflight check clocks: warning on n2: its clock is 60.0 s behind. To do: Tell NTP."
    assert f"Warned before the start: {said}" in ran(["doctor", "8b"], 6).out
    path.write_text("{}")
    assert "Warned" not in ran(["doctor", "8b"], 6).out
    fail(store, job_id="8")
    store.forget("8b", {"7"})
    assert not path.exists()
