"""`init` writes a site file that the other commands take; `site` shows what holds."""

from __future__ import annotations

import stat

import pytest

from tests.support.fake_cluster import FakeCluster
from tests.support.sites import load_site
from tests.unit.submit.init.printed import SLURM_24_11


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> FakeCluster:
    monkeypatch.setenv("HPC_SERVE_SYSTEM_SITE", "")
    found = FakeCluster(tmp_path / "bin", monkeypatch)
    found.slurm(SLURM_24_11)
    return found


@pytest.fixture
def site_file(tmp_path):
    return tmp_path / "config" / "hpc-serve" / "site.yaml"


def test_what_init_writes_is_what_plan_and_submit_take(cluster, site_file, ran):
    out = ran(["init"]).out
    assert "boost: 4 nodes of 4 nvidia_a100-sxm4-80gb" in " ".join(out.split())
    assert "hpc-serve submit qwen3-8b --wait" in out
    assert stat.S_IMODE(site_file.stat().st_mode) == 0o600
    site = load_site(site_file)
    assert (site.partition, site.account, site.gpu, site.exclusive) == ("boost", "genom", "a100-80gb", True)
    script = ran(["render", "8b"]).out
    assert "#SBATCH --partition=boost\n#SBATCH --account=genom\n#SBATCH --qos=boost_prod\n" in script
    assert "#SBATCH --gpus-per-node=nvidia_a100-sxm4-80gb:1\n" in script


def test_a_file_that_is_there_stays_unless_force_is_given(cluster, site_file, ran):
    site_file.parent.mkdir(parents=True)
    site_file.write_text("partition: mine\n")
    assert "--force replaces it" in ran(["init"], 1).err
    assert site_file.read_text() == "partition: mine\n"
    assert "\npartition: boost\n" in ran(["init", "--print"]).out
    assert site_file.read_text() == "partition: mine\n"
    ran(["init", "--force"])
    assert load_site(site_file).partition == "boost"


def test_it_is_written_where_one_says(cluster, tmp_path, monkeypatch, ran, told):
    path = tmp_path / "new" / "here.yaml"
    found = told("init", "--output", str(path))
    assert (found["file"], load_site(path).partition) == (str(path), "boost")
    assert all(set(one) == {"value", "reason"} for one in found["settings"].values())
    monkeypatch.setenv("HPC_SERVE_SITE", str(tmp_path / "named.yaml"))
    ran(["init"])
    assert load_site(tmp_path / "named.yaml").partition == "boost"
    assert "--output FILE writes elsewhere" in ran(["init", "--output", "/proc/none/site.yaml"], 1).err


def test_what_the_system_s_file_sets_is_left_to_it(cluster, site_file, tmp_path, monkeypatch, ran, told):
    (tmp_path / "system.yaml").write_text("partition: boost\naccount: lab\n")
    monkeypatch.setenv("HPC_SERVE_SYSTEM_SITE", str(tmp_path / "system.yaml"))
    ran(["init"])
    assert (load_site(site_file).partition, load_site(site_file).account) == (None, None)
    shown = told("site")
    assert shown["files"] == [str(tmp_path / "system.yaml"), str(site_file)]
    assert shown["settings"]["account"] == {"value": "lab", "file": str(tmp_path / "system.yaml")}
    assert shown["settings"]["gpu"] == {"value": "a100-80gb", "file": str(site_file)}
    lines = ran(["site"]).out.splitlines()
    assert f"[1] {tmp_path}/system.yaml" in lines
    assert ["[2]", "gpu", "a100-80gb"] in [line.split() for line in lines]


def test_without_slurm_it_says_what_must_be_answered(site_file, tmp_path, monkeypatch, ran):
    monkeypatch.setenv("HPC_SERVE_SYSTEM_SITE", "")
    FakeCluster(tmp_path / "bin", monkeypatch)
    out = " ".join(ran(["init"]).out.split())
    assert "no `scontrol` here" in out
    assert "Answer first: gpu" in out
    assert load_site(site_file).partition is None


def test_site_without_a_file_names_the_command_that_makes_one(cluster, ran):
    assert "`hpc-serve init`" in ran(["site"]).out


def test_init_answers_in_json_on_any_machine(tmp_path, told):
    path = tmp_path / "mine.yaml"
    assert told("init", "--output", str(path))["file"] == str(path)
    assert path.exists()
