"""What tests of the command line share: a home with a Slurm of stand-ins, its site file, and what commands say."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from hpc_serve.cli import complete
from hpc_serve.client import engine_work
from hpc_serve.rendezvous.record import NodeRecord
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.services import stop, wait
from tests.support.fake_slurm import FakeSlurm
from tests.support.patience import PATIENCE_S, be_patient
from tests.support.stubs import StubService, make_record, make_submitted


@pytest.fixture
def told(ran):
    """What a command says in JSON to these words, with this exit code."""
    return lambda *words, code=0: json.loads(ran([*words, "--json"], code).out)


@pytest.fixture
def plan(told):
    return partial(told, "plan")


@pytest.fixture(autouse=True)
def stand_ins(tmp_path, monkeypatch):
    """A home, an environment, a Slurm of stand-ins, patience, and no settings of whoever runs the tests."""
    be_patient(monkeypatch)
    monkeypatch.setattr(wait, "_RECORDS_S", 0.02)
    monkeypatch.setattr(stop, "_RECORDS_S", 0.02)
    monkeypatch.setattr(engine_work, "LOOK_S", 0.01)
    monkeypatch.setattr(complete, "_LIST_S", PATIENCE_S)
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
def site(tmp_path):
    """Writes the site file, and the site's own models if there are any."""

    def write(text: str, models: str = "") -> None:
        path = tmp_path / "config" / "hpc-serve" / "site.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        if models:
            (tmp_path / "models.yaml").write_text(models)
            text += f"models: {tmp_path}/models.yaml\n"
        path.write_text(text)

    return write


@pytest.fixture
def store(tmp_path):
    """The services of that home."""
    return ServiceStore(tmp_path / "home")


@pytest.fixture
def failed_job(store: ServiceStore) -> Callable[..., None]:
    """Writes down a job of 8b that has failed."""

    def write(job_id: str = "7", **fields: Any) -> None:
        store.write_submitted(make_submitted(service="8b", job_id=job_id, submitted_at=time.time() - 60))
        usual = {"service": "8b", "job_id": job_id, "state": "failed", "reason": "engine exited with 1"}
        store.write(make_record(**{**usual, **fields}))

    return write


@pytest.fixture
def live(store) -> Iterator[StubService]:
    """A service with a stub engine that answers."""
    service = StubService(store.home, "8b")
    service.start(service="8b", job_id="7", cluster="local", nodes=(NodeRecord(name="n1", address="10.0.0.1"),))
    yield service
    service.close()
