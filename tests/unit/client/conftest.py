"""A service of stub engines, found by a client that does not wait long between two looks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_serve.client import wait as waiting
from tests.support.stubs import StubService


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubService]:
    monkeypatch.setenv("HPC_SERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(waiting, "STEP_S", 0.05)
    service = StubService(tmp_path / "home")
    yield service
    service.close()
