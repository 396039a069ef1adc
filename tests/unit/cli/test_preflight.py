"""`hpc-serve doctor --preflight`: the job that is submitted, and what is shown of its report. The job is a stand-in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_serve.errors import ServiceFailedError
from hpc_serve.rendezvous.files import write_json
from hpc_serve.rendezvous.store import PreflightReport, Verdict, preflight_file
from hpc_serve.submit.services import services, wait
from tests.support.stubs import make_record

SHM = Verdict(check="shm", level="ok", nodes=("n1", "n2"), seen="/dev/shm has 10.0 of 10.0 GiB free", took_s=0.01)
CLOCKS = Verdict(check="clocks", level="warning", nodes=("n2",), seen="its clock is 60.0 s behind", cure="Tell NTP.")
WEIGHTS = Verdict(check="weights", level="failed", nodes=("n2",), seen="no such folder", cure="Copy them.")


@pytest.fixture
def ends_with(stand_ins, store, monkeypatch):
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


def test_as_json(store, ends_with, ran):
    ends_with(SHM)
    found = json.loads(ran(["doctor", "--preflight", "8b", "--json"]).out)
    assert found["service"] == "preflight-8b"
    assert found["verdicts"][0]["check"] == "shm"


def test_a_job_that_ends_before_its_preflight_says_how(store, ends_with, ran):
    ends_with()
    assert ran(["doctor", "--preflight", "8b"], 6).err.endswith("error: it ended\n")


def test_options_of_submit_alone_need_preflight(stand_ins, ran):
    ran(["doctor", "8b", "--nodes", "2"], 2)
    ran(["doctor", "8b", "--", "--preflight"], 2)


def test_the_doctor_says_what_the_preflight_of_a_run_warned_of(stand_ins, store, ran):
    store.ensure_service("8b")
    record = make_record(service="8b", job_id="7", cluster="local", state="failed", reason="engine exited with 1")
    store.write(record)
    report = PreflightReport(verdicts=(SHM, CLOCKS), num_nodes=2, took_s=0.2)
    path = preflight_file(store, "8b", "7-r0-0.json")
    write_json(path, report)
    said = (
        "Warned before the start: preflight check clocks: warning on n2: its clock is 60.0 s behind. To do: Tell NTP."
    )
    assert said in ran(["doctor", "8b"], 6).out
    path.write_text("{}")
    assert "Warned" not in ran(["doctor", "8b"], 6).out
    store.write(replace(record, job_id="8"))
    store.forget("8b", {"7"})
    assert not path.exists()
