"""`make test` runs again, alone, what failed once (tests/__main__.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.config import CHECKOUT
from tests.support.patience import wait_until

PASSES = "def test_passes():\n    pass\n"
FAILS = "def test_fails():\n    assert False\n"
FAILS_ONCE = """
from pathlib import Path

def test_fails_once():
    ran = Path(__file__).with_name("ran")
    before = ran.exists()
    ran.touch()
    assert before
"""
FAILS_OFTEN = """
import pytest

@pytest.mark.parametrize("number", range(9))
def test_fails(number):
    assert False
"""
WAITS = """
import os
import time
from pathlib import Path

def test_waits():
    Path(__file__).with_name("pid").write_text(str(os.getpid()))
    time.sleep(600)
"""


def start(folder: Path, source: str, *words: str) -> subprocess.Popen[str]:
    (folder / "test_sample.py").write_text(PASSES + source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "tests", "-q", *words]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTEST_ADDOPTS": ""}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    started = start(folder, source)
    out, errors = started.communicate()
    return subprocess.CompletedProcess(started.args, started.returncode, out, errors)


@pytest.mark.parametrize(
    ("source", "code", "said", "unsaid"),
    [
        ("", pytest.ExitCode.OK, [], "again"),
        (FAILS_ONCE, pytest.ExitCode.OK, ["test_sample.py::test_fails_once: failed, then passed alone"], "TWICE"),
        (FAILS + FAILS_ONCE, pytest.ExitCode.TESTS_FAILED, ["FAILED TWICE", "UNSTEADY"], "error"),
        (FAILS_OFTEN, pytest.ExitCode.TESTS_FAILED, [], "again"),
    ],
    ids=["no failure", "unsteady", "failed twice", "many"],
)
def test_what_failed_is_run_again_alone(tmp_path: Path, source: str, code: int, said: list[str], unsaid: str) -> None:
    ended = run(tmp_path, source)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert [words for words in said if words not in ended.stdout] == []
    assert unsaid not in ended.stdout


def test_workers_end_before_a_run_that_is_terminated(tmp_path: Path) -> None:
    started = start(tmp_path, WAITS, "--numprocesses=1")
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and pid.read_text())
    started.terminate()
    started.communicate()
    assert started.returncode == 128 + signal.SIGTERM
    assert not Path(f"/proc/{pid.read_text()}").exists()
