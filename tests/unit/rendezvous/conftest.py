"""A store of its own for each test."""

import pytest

from hpc_serve.rendezvous.store import ServiceStore


@pytest.fixture
def store(tmp_path):
    return ServiceStore(tmp_path / "home")
