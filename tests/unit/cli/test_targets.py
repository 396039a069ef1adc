"""What Prometheus and Grafana are given: a list of targets, how each is asked, a dashboard."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from pathlib import Path

import pytest
import yaml

from hpc_serve.cli.services import targets
from hpc_serve.client.engine_work import scrape_config, target_groups
from hpc_serve.client.replicas.status import ProbeResult, ReplicaStatus, assess_replica, assess_submitted
from hpc_serve.trust.certificates import authority_certificate
from hpc_serve.vllm.arguments import load_data
from tests.support.stubs import make_record, make_submitted


def ready(**fields) -> ReplicaStatus:
    fields = {"certificate": "PEM", "port": 8000, "hosts": ("10.0.0.1",), **fields}
    host = fields["hosts"][0]
    return assess_replica(make_record(**fields), probe=ProbeResult(status="ready", host=host))


def test_each_replica_is_a_target_with_labels(live, ran):
    model = "meta-llama/Llama-3.1-405B-Instruct"
    labels = {"service": "8b", "slurm_job": "7", "replica": "7", "node": "n1", "model": model}
    group = {"targets": [f"127.0.0.1:{live.engines[0].port}"], "labels": labels}
    assert json.loads(ran(["targets"]).out) == [group]
    out, err = ran(["targets", "70b"])
    assert (json.loads(out), "warning: there is no service 70b" in err) == ([], True)


def test_one_that_does_not_answer_for_a_while_stays_and_one_that_is_over_goes():
    statuses = [
        ready(job_id="1", service="b"),
        ready(job_id="2", service="a", hosts=("fe80::1",)),
        assess_replica(make_record(job_id="3", certificate="PEM"), probe=ProbeResult(status="no answer")),
        assess_replica(make_record(job_id="4", certificate="PEM", state="stopped")),
        assess_replica(make_record(job_id="5", certificate="PEM", state="starting")),
        assess_submitted(make_submitted(service="c", job_id="6")),
    ]
    groups, problems = target_groups(statuses)
    assert ([group["labels"]["slurm_job"] for group in groups], problems) == (["3", "2", "1"], [])
    assert groups[1]["targets"] == ["[fe80::1]:8000"]


def test_a_key_goes_to_nobody_who_cannot_be_told_from_others():
    groups, problems = target_groups([ready(job_id="9", hosts=("a/b@evil",)), ready(job_id="10", hosts=("x\n",))])
    assert (groups, ["is no address" in problem for problem in problems]) == ([], [True, True])


@pytest.fixture
def watched(monkeypatch, ran, tmp_path):
    """What `targets --watch` says on stderr while these things happen one after the other."""

    def watch(*happen) -> str:
        left = list(happen)

        def pause(seconds: float) -> None:
            if not left:
                raise KeyboardInterrupt
            left.pop(0)()

        monkeypatch.setattr(targets, "_pause", pause)
        return ran(["targets", "8b", "--output", str(tmp_path / "targets.json"), "--watch"], 130).err

    return watch


def test_the_file_is_written_whole_and_again_when_replicas_come(live, tmp_path, watched):
    further = [lambda job_id=job_id: live.start(service="8b", job_id=job_id) for job_id in ("10", "20")]
    assert watched(*further).count("targets in") == 3
    output = tmp_path / "targets.json"
    assert [len(group["targets"]) for group in json.loads(output.read_text())] == [1, 1, 1]
    assert [path.name for path in tmp_path.glob("*targets*")] == ["targets.json"]
    assert output.stat().st_mode & 0o777 == 0o600


def test_watching_goes_on_while_the_store_cannot_be_read(live, tmp_path, watched):
    services = live.store.home / "services"
    assert "warning:" in watched(lambda: services.chmod(0o777), lambda: services.chmod(0o700))
    assert len(json.loads((tmp_path / "targets.json").read_text())) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--watch"], "--watch needs the file's name"),
        (["--scrape-config"], "--scrape-config needs the file's name"),
        (["--output", "nowhere/x.json"], "there is no folder"),
        (["--scrape-config", "--output", "x.json"], "No service waits or runs"),
    ],
)
def test_what_cannot_be_done_is_said(argv, words, ran, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in ran(["targets", *argv], 2).err


def test_the_configuration_has_one_job_for_each_key(live, tmp_path, ran):
    live.store.ensure_api_key("70b")
    live.store.write_submitted(make_submitted(service="70b", job_id="8"))
    live.store.ensure_api_key("over")
    live.store.write(make_record(service="over", job_id="9", state="stopped", updated_at=time.time()))
    output = tmp_path / 'a "quoted" name.json'
    first, second = yaml.safe_load(ran(["targets", "--scrape-config", "--output", str(output)]).out)["scrape_configs"]
    assert (first["job_name"], second["job_name"]) == ("hpc-serve-70b", "hpc-serve-8b")
    assert second["authorization"] == {"credentials_file": str(live.key_file)}
    assert (second["scheme"], second["follow_redirects"]) == ("https", False)
    assert second["file_sd_configs"] == [{"files": [str(output)]}]
    (relabel,) = second["relabel_configs"]
    assert relabel == {"source_labels": ["service"], "regex": "8b", "action": "keep"}
    authority = Path(second["tls_config"]["ca_file"])
    assert authority.read_text() == authority_certificate(live.store.home)
    assert live.key_file.read_text().strip() not in output.name


def test_a_service_with_a_dot_keeps_its_own_targets_alone():
    text = scrape_config([("llama-3.1", Path("/k"))], targets_file=Path("/t"), authority_file=Path("/a"))
    (job,) = yaml.safe_load(text)["scrape_configs"]
    pattern = job["relabel_configs"][0]["regex"]
    assert re.fullmatch(pattern, "llama-3.1")
    assert not re.fullmatch(pattern, "llama-301")


def test_every_metric_of_the_dashboard_is_one_of_the_installed_vllm():
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.origin).parent / "v1"
    known = {name for path in folder.rglob("*metrics/*.py") for name in re.findall(r'"(vllm:\w+)"', path.read_text())}
    assert "vllm:num_requests_running" in known
    used = set(re.findall(r"vllm:\w+", json.dumps(load_data("grafana.json"))))
    assert len(used) > 10
    assert {re.sub(r"_(total|bucket)$", "", name) for name in used} - known == set()


def test_the_dashboard_is_printed_as_grafana_takes_it(ran):
    found = json.loads(ran(["targets", "--dashboard"]).out)
    assert found["title"].startswith("hpc-serve")
    assert all(panel["targets"] and panel["title"] for panel in found["panels"])
    for expression in (target["expr"] for panel in found["panels"] for target in panel["targets"]):
        assert expression.count("(") == expression.count(")")
        assert 'service=~"$service"' in expression
