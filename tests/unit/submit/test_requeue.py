"""--requeue: what the script says of it, and when the script asks Slurm for another run. Programs are stood in for."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from hpc_serve.submit.request.options import Environment, SlurmOptions
from tests.cluster import wait_for
from tests.support.nodes import write_program
from tests.unit.submit import service_8b
from tests.unit.submit.test_render import bash_accepts


def script(requeue: bool | None, **fields) -> str:
    return service_8b.script(slurm=SlurmOptions(requeue=requeue), **fields)


@pytest.mark.parametrize(("requeue", "words"), [(True, ["--requeue"]), (False, ["--no-requeue"]), (None, [])])
def test_slurm_is_told(requeue, words):
    text = script(requeue)
    bash_accepts(text)
    assert re.findall("^#SBATCH (.*requeue.*)$", text, re.MULTILINE) == words
    assert ("scontrol requeue" in text) == bool(requeue)


PROGRAMS = {
    "srun": 'while [[ $1 != python ]]; do shift; done; exec "$@"',
    "python": """
case "$1 $2" in
"-m hpc_serve.job.rerun") echo rerun >> calls; [[ ! -e no-rerun ]] || exit 1; echo 7_1 ;;
"-m hpc_serve.job")
    if [[ ! -e waits ]]; then exit "$(cat end)"; fi
    echo started >> calls
    until [[ -e drain ]]; do sleep 0.05; done; exit 9 ;;
*) echo "export HPC_SERVE_LOG_DIR=. HPC_SERVE_JOB_ID=7_1 HPC_SERVE_DRAIN_REQUEST=drain" ;;
esac
""",
    "scontrol": 'echo "$*" >> calls; [[ ! -e refused ]] || { cat refused >&2; exit 1; }',
}


def start(folder: Path, *, end: int, per_job: int = 1) -> subprocess.Popen[str]:
    """Start the script; the program in the job exits with `end`."""
    for name, text in PROGRAMS.items():
        write_program(folder / name, f"#!/bin/bash\n{text}\n")
    (folder / "end").write_text(str(end))
    (folder / "script.sh").write_text(script(True, replicas_per_job=per_job, environment=Environment(kind="none")))
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "1"}
    return subprocess.Popen(
        ["bash", "script.sh"], cwd=folder, env=environ, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


@pytest.mark.parametrize("per_job", [1, 2])
@pytest.mark.parametrize(
    ("end", "is_worth_it", "asked"),
    [
        (137, True, ["rerun", "requeue 7_1"]),
        (0, True, []),
        (3, True, ["rerun", "requeue 7_1"]),
        (137, False, ["rerun"]),
    ],
)
def test_a_run_that_failed_may_be_run_again_once(tmp_path, end, is_worth_it, asked, per_job):
    if not is_worth_it:
        (tmp_path / "no-rerun").touch()
    process = start(tmp_path, end=end, per_job=per_job)
    said = process.communicate(timeout=60)[1]
    assert (process.returncode, calls(tmp_path)) == (end, asked), said


def test_a_refusal_is_said_in_words(tmp_path):
    (tmp_path / "refused").write_text("Requested operation is presently disabled for job 7_1\n")
    process = start(tmp_path, end=137)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 137
    assert "Requested operation is presently disabled for job 7_1\nhpc-serve: Slurm does not run job 7_1 again;" in said
    assert "Submit it anew with `hpc-serve submit`." in said


@pytest.mark.parametrize("per_job", [1, 2])
def test_a_run_that_was_told_to_end_is_not_run_again(tmp_path, per_job):
    (tmp_path / "waits").touch()
    process = start(tmp_path, end=0, per_job=per_job)
    wait_for(lambda: calls(tmp_path) == ["started"] * per_job, 60, what="the launchers")
    process.terminate()
    process.communicate(timeout=60)
    assert (process.returncode, calls(tmp_path)) == (9, ["started"] * per_job)
