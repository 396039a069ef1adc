"""submitit's executor with our script: the hooks it rests on, sbatch's answers, and a local job's life."""

from __future__ import annotations

import inspect
import os
import signal
import stat
import subprocess
import threading
from pathlib import Path

import pytest
import submitit
from submitit.core import core, utils

from hpc_serve.errors import SchedulerError, SchedulerUnavailableError, SubmissionRefusedError
from hpc_serve.rendezvous.files import make_private_folder
from hpc_serve.rendezvous.record import SubmittedJob
from hpc_serve.rendezvous.store import process_start_time
from hpc_serve.submit.slurm.executor import start_locally, submit_to_slurm, why_it_never_starts
from hpc_serve.submit.slurm.scheduler import local_job_state, stop_local_job
from hpc_serve.submit.slurm.slurm import GONE, UNKNOWN
from tests.cluster import wait_for
from tests.support.fake_slurm import FakeSlurm
from tests.support.nodes import write_program
from tests.support.stubs import make_submitted

DEADLINE_S = 60.0


def command(folder: Path, name: str, text: str) -> None:
    """Put a stand-in for a Slurm command into `folder`."""
    write_program(folder / name, f"#!/bin/bash\n{text}\n")


def scripts(folder: Path) -> Path:
    """The private folder that `submit` makes for scripts."""
    return make_private_folder(folder / "scripts")


@pytest.fixture
def bin_folder(tmp_path, monkeypatch):
    """A folder of stand-ins that comes before everything else; Slurm itself is not to be found."""
    folder = tmp_path / "bin"
    command(folder, "sinfo", "echo 'gpu*|up|1-00:00:00|3|gpu:h100:8'")
    for name in ("bash", "cat", "sleep", "env", "cp", "printenv"):
        found = subprocess.run(["which", name], capture_output=True, text=True, check=True)
        (folder / name).symlink_to(found.stdout.strip())
    monkeypatch.setenv("PATH", str(folder))
    return folder


# The contract with submitit


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (submitit.SlurmExecutor, "_make_submission_file_text", ["self", "command", "uid"]),
        (submitit.SlurmExecutor, "_make_submission_command", ["self", "submission_file_path"]),
        (submitit.SlurmExecutor, "_get_job_id_from_submission_command", ["string"]),
        (core.PicklingExecutor, "_submit_command", ["self", "command"]),
        (utils.JobPaths, "move_temporary_file", ["self", "tmp_path", "name", "keep_as_symlink"]),
    ],
)
def test_submitit_still_has_what_we_override_or_call(owner, name, parameters):
    assert list(inspect.signature(getattr(owner, name)).parameters) == parameters


# sbatch


def test_sbatch_gets_our_script_and_it_is_kept_privately(bin_folder, tmp_path):
    answer = 'echo "Submitted batch job 4711 on cluster x"'
    command(bin_folder, "sbatch", f'cat "$1" > {tmp_path}/seen; umask > {tmp_path}/umask; {answer}')
    job_id, script = submit_to_slurm("#!/bin/bash\necho 'ü'\n", scripts(tmp_path))
    assert job_id == "4711"
    assert (tmp_path / "seen").read_text() == script.read_text() == "#!/bin/bash\necho 'ü'\n"
    assert list((tmp_path / "scripts").iterdir()) == [script]
    assert stat.S_IMODE((tmp_path / "scripts").stat().st_mode) == 0o700
    assert (tmp_path / "umask").read_text() == "0077\n"  # Slurm makes the job's output with the umask of sbatch


def test_what_sbatch_says_when_it_refuses_is_told_once_with_a_hint(bin_folder, tmp_path, capfd):
    words = "sbatch: error: invalid partition specified: nope"
    command(bin_folder, "sbatch", f"echo '{words}' >&2; exit 1")
    with pytest.raises(SubmissionRefusedError) as caught:
        submit_to_slurm("#!/bin/bash\n", scripts(tmp_path))
    assert str(caught.value) == (
        "sbatch refused the job: invalid partition specified: nope. Partitions here: gpu (default)."
    )
    assert capfd.readouterr() == ("", "")
    assert list((tmp_path / "scripts").iterdir()) == []


@pytest.mark.parametrize(
    ("sbatch", "error", "told"),
    [
        ("", SchedulerUnavailableError, "no `sbatch` here"),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", SchedulerUnavailableError, "Nothing was submitted"),
        ("echo 'Socket timed out on send' >&2; exit 1", SchedulerUnavailableError, "taken the job all the same"),
        ("echo done", SchedulerError, r"without a job id\. Look with `squeue --me`"),
    ],
    ids=["missing", "silent", "late", "no id"],
)
def test_what_is_no_refusal_is_told_as_such(bin_folder, tmp_path, sbatch, error, told):
    if sbatch:
        command(bin_folder, "sbatch", sbatch)
    with pytest.raises(error, match=told):
        submit_to_slurm("#!/bin/bash\n", scripts(tmp_path))
    assert list((tmp_path / "scripts").iterdir()) == []


def test_inside_a_job_its_sizes_are_not_handed_on(bin_folder, tmp_path, monkeypatch):
    command(bin_folder, "sbatch", f"env > {tmp_path}/env; echo 'Submitted batch job 1'")
    for name, value in {"SLURM_JOB_ID": "9", "SLURM_MEM_PER_CPU": "100", "SLURM_CONF": "/etc/x"}.items():
        monkeypatch.setenv(name, value)
    submit_to_slurm("#!/bin/bash\n", scripts(tmp_path))
    seen = [line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()]
    assert [name for name in seen if name.startswith("SLURM")] == ["SLURM_CONF"]
    assert os.environ["SLURM_MEM_PER_CPU"] == "100"


def test_sbatch_s_variables_do_not_win_over_the_script(bin_folder, tmp_path, monkeypatch):
    command(bin_folder, "sbatch", f"env > {tmp_path}/env; echo 'Submitted batch job 1'")
    for name in ("EXPORT", "TIMELIMIT", "MEM_PER_NODE", "GPUS_PER_NODE", "ACCOUNT", "QOS"):
        monkeypatch.setenv(f"SBATCH_{name}", "x")
    submit_to_slurm("#!/bin/bash\n#SBATCH --time=1\n#SBATCH --mem=4G\n#SBATCH --gpus-per-node=1\n", scripts(tmp_path))
    seen = [line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()]
    assert sorted(name for name in seen if name.startswith("SBATCH")) == ["SBATCH_ACCOUNT", "SBATCH_QOS"]
    assert os.environ["SBATCH_TIMELIMIT"] == "x"


# A local job


def start(tmp_path: Path, text: str) -> SubmittedJob:
    pid, _ = start_locally(f"#!/bin/bash\n{text}\n", scripts(tmp_path), tmp_path)
    return local_job(pid=pid, pid_start_time=process_start_time(pid))


def local_job(*, pid: int, pid_start_time: int | None, host: str = os.uname().nodename) -> SubmittedJob:
    of_process = {"pid": pid, "pid_start_time": pid_start_time, "host": host}
    return make_submitted(cluster="local", job_id=f"local-{pid}", **of_process)


def test_a_local_job_writes_its_log_and_keeps_the_gpus_it_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    job = start(tmp_path, "echo $CUDA_VISIBLE_DEVICES; echo oops >&2; echo local-$$")
    log = tmp_path / f"{job.job_id}.log"
    wait_for(lambda: log.read_text() == f"3,5\noops\n{job.job_id}\n", DEADLINE_S, what="the log is not complete")
    wait_for(lambda: local_job_state(job).state == GONE, DEADLINE_S, what="it does not end")
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert not list(tmp_path.glob(".starting*"))


def test_a_local_job_is_its_own_session_and_is_stopped_in_order(tmp_path):
    job = start(tmp_path, f"trap 'echo asked > {tmp_path}/asked; exit 0' TERM\necho up\nwhile :; do sleep 0.05; done")
    wait_for(lambda: "up" in (tmp_path / f"{job.job_id}.log").read_text(), DEADLINE_S, what="it does not start")
    assert local_job_state(job).state == "RUNNING"
    assert os.getsid(job.pid) == job.pid
    stop_local_job(job, grace_s=DEADLINE_S)
    assert local_job_state(job).state == GONE
    assert (tmp_path / "asked").read_text() == "asked\n"
    stop_local_job(job, grace_s=0)  # once more is no error


def test_a_local_job_that_was_stopped_by_a_signal_ends_in_order(tmp_path):
    job = start(tmp_path, f"trap 'echo asked > {tmp_path}/asked; exit 0' TERM\necho up\nwhile :; do sleep 0.05; done")
    wait_for(lambda: "up" in (tmp_path / f"{job.job_id}.log").read_text(), DEADLINE_S, what="it does not start")
    os.killpg(job.pid, signal.SIGSTOP)
    stop_local_job(job, grace_s=DEADLINE_S)
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_a_local_job_that_does_not_listen_is_killed(tmp_path):
    job = start(tmp_path, "trap '' TERM\necho up\nwhile :; do sleep 0.05; done")
    wait_for(lambda: "up" in (tmp_path / f"{job.job_id}.log").read_text(), DEADLINE_S, what="it does not start")
    stop_local_job(job, grace_s=0.2)
    assert local_job_state(job).state == GONE


def test_a_pid_that_was_used_again_is_not_our_job():
    alive = process_start_time(os.getpid())
    job = local_job(pid=os.getpid(), pid_start_time=alive - 1)
    assert local_job_state(job).state == GONE
    stop_local_job(job, grace_s=0)  # must not signal this very process


def test_from_another_host_a_local_job_is_unknown_and_cannot_be_stopped():
    job = local_job(pid=1, pid_start_time=1, host="other")
    state = local_job_state(job)
    assert state.state == UNKNOWN
    assert "other" in state.detail
    with pytest.raises(SchedulerError, match="cannot be stopped from here"):
        stop_local_job(job, grace_s=0)


def test_a_job_that_slurm_has_not_looked_at_yet_is_asked_for_again(slurm: FakeSlurm) -> None:
    """As with Slurm 26.05, the first answers have no reason."""

    def answer(reason: str) -> None:
        slurm.queue(("7", "PENDING", reason))
        slurm.job("7", "PENDING", reason=reason)

    answer("None")
    later = threading.Timer(0.7, answer, ["PartitionTimeLimit"])
    later.start()
    try:
        assert "more time than its partition allows" in why_it_never_starts("7")
    finally:
        later.join()
