"""`make test` runs again, alone, what failed once (tests/__main__.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.config import CHECKOUT

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


def run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_sample.py").write_text(PASSES + source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "tests", "-q"]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTEST_ADDOPTS": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_run_without_a_failure_runs_once(tmp_path: Path) -> None:
    ended = run(tmp_path, "")
    assert ended.returncode == pytest.ExitCode.OK
    assert "again" not in ended.stdout


def test_what_fails_once_is_listed_as_unsteady_and_the_run_passes(tmp_path: Path) -> None:
    ended = run(tmp_path, FAILS_ONCE)
    assert ended.returncode == pytest.ExitCode.OK, ended.stdout + ended.stderr
    assert "test_sample.py::test_fails_once: failed, then passed alone" in ended.stdout


def test_what_fails_twice_fails_the_run(tmp_path: Path) -> None:
    ended = run(tmp_path, FAILS + FAILS_ONCE)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    assert ended.stdout.count("FAILED TWICE") == 1
    assert "UNSTEADY" in ended.stdout


def test_many_failures_are_not_run_again(tmp_path: Path) -> None:
    ended = run(tmp_path, FAILS_OFTEN)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    assert "again" not in ended.stdout
