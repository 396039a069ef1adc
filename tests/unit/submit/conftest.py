"""An empty home, and stand-ins for Slurm's commands with an environment for jobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.services import stop as stopping
from hpc_serve.submit.services import wait as waiting
from hpc_serve.submit.site.site import SiteProfile
from tests.support.fake_slurm import FakeSlurm
from tests.support.patience import be_patient
from tests.support.sites import load_site
from tests.support.stubs import StubService


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
    for name in ("_RECORDS_S", "_SCHEDULER_S", "_RECORD_MAY_FOLLOW_S"):
        monkeypatch.setattr(waiting, name, 0.02)
    monkeypatch.setattr(stopping, "_RECORDS_S", 0.02)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServiceStore:
    monkeypatch.setenv("HPC_SERVE_HOME", str(tmp_path / "home"))
    return ServiceStore(tmp_path / "home")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "slurm")
    activate = tmp_path / "env" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("HPC_SERVE_ENV", str(tmp_path / "env"))
    return fake


@pytest.fixture
def engines(store: ServiceStore) -> Iterator[StubService]:
    """The engines of the service 8b; none is started yet."""
    service = StubService(store.home, "8b")
    yield service
    service.close()


@pytest.fixture
def site_of(tmp_path: Path) -> Callable[[str], SiteProfile]:
    """Reads a site file with this text."""

    def read(text: str) -> SiteProfile:
        (tmp_path / "site.yaml").write_text(text)
        return load_site(tmp_path / "site.yaml")

    return read
