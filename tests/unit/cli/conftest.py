"""What tests of the command line share."""

from __future__ import annotations

import os

import pytest

from tests.support.fake_slurm import FakeSlurm


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """A home, an environment, a Slurm of stand-ins, and no settings of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith(("HPC_SERVE_", "OPENAI_", "HF_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "activate").touch()
    fake = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("HPC_SERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HPC_SERVE_ENV", str(tmp_path / "env"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("COLUMNS", "80")
    return fake
