"""What is asked of a machine, and that nothing it says, or does not say, ends the question."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from hpc_serve.submit.init import look as looking
from hpc_serve.submit.init.look import look
from tests.support.fake_cluster import FakeCluster
from tests.unit.submit.init.printed import SLURM_24_11


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> FakeCluster:
    monkeypatch.delenv("HPC_SERVE_ENV", raising=False)
    return FakeCluster(tmp_path / "bin", monkeypatch)


def test_everything_that_answers_is_read(cluster):
    cluster.slurm(SLURM_24_11)
    cluster.command("apptainer", "exit 0")
    facts = look()
    assert facts.slurm_version == "24.11.5"
    assert [one.name for one in facts.partitions] == ["cpu", "boost", "vip", "old"]
    assert (facts.default_account, len(facts.associations)) == ("genom", 3)
    assert facts.runtimes == ("apptainer",)
    assert facts.environ["HOME"] == os.environ["HOME"]


def test_commands_that_are_not_there_are_named(cluster):
    facts = look()
    assert facts.partitions == ()
    assert "no `scontrol` here" in facts.unanswered["scontrol show partition"]
    assert facts.unanswered["df"] == "there is no `df` here"


def test_a_command_that_fails_is_quoted(cluster):
    cluster.command("sacctmgr", "echo 'sacctmgr: error: You are not running a supported storage plugin' >&2; exit 1")
    cluster.command("scontrol", "echo 'scontrol: error: Unable to contact slurm controller' >&2; exit 1")
    facts = look()
    assert facts.unanswered["sacctmgr"] == "You are not running a supported storage plugin"
    assert "Unable to contact slurm controller" in facts.unanswered["scontrol show partition"]
    assert facts.partitions == ()


def test_one_that_does_not_answer_holds_nothing_up_and_is_ended(cluster, monkeypatch):
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    cluster.command("df", "sleep 600")
    with pytest.raises(OSError, match="`df` has not answered for 0 s"):
        looking._output(["df"], 0.01)
    assert started[0].wait(60) == -signal.SIGKILL


def test_the_environment_that_is_named_is_looked_into(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("HPC_SERVE_ENV", str(tmp_path / "env"))
    assert (look().environment, look().engine) == (str(tmp_path / "env"), None)
    package = tmp_path / "env" / "lib" / "python3.12" / "site-packages" / "vllm-0.99.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.0\n")
    assert look().engine == "0.99.0"
