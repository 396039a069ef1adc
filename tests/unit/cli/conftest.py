"""What tests of the command line share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

from hpc_serve.rendezvous.record import NodeRecord
from hpc_serve.rendezvous.store import ServiceStore
from tests.support.fake_slurm import FakeSlurm
from tests.support.patience import be_patient
from tests.support.stubs import StubService
from tests.unit.conftest import Ran

Plan: TypeAlias = Callable[..., Any]


@pytest.fixture
def plan(ran: Ran) -> Plan:
    """What `plan --json` says to these words, with this exit code."""
    return lambda *words, code=0: json.loads(ran(["plan", *words, "--json"], code).out)


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """A home, an environment, a Slurm of stand-ins, patience, and no settings of whoever runs the tests."""
    be_patient(monkeypatch)
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


@pytest.fixture
def store(tmp_path):
    """The services of that home."""
    return ServiceStore(tmp_path / "home")


@pytest.fixture
def live(store) -> Iterator[StubService]:
    """A service with a stub engine that answers."""
    service = StubService(store.home, "8b")
    service.start(service="8b", job_id="7", cluster="local", nodes=(NodeRecord(name="n1", address="10.0.0.1"),))
    yield service
    service.close()
