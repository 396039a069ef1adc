"""The two users of the cluster in the security tests: the owner of services, and the stranger."""

from __future__ import annotations

import sys

import pytest

from tests.e2e.jobs import BUSY, User

MAKE_OWN = """
import sys
from pathlib import Path
from hpc_serve.trust.certificates import make_peer_files
run = Path(sys.argv[1]) / "run"
run.mkdir(mode=0o700, exist_ok=True)
make_peer_files(run, Path(sys.argv[1]) / "own", addresses=[sys.argv[2]])
"""


@pytest.fixture(scope="module")
def alice(cluster, alice_env, tiny_models):
    return User(cluster, {**alice_env, **BUSY, "HPC_SERVE_MODEL": str(tiny_models / "405b")})


@pytest.fixture(scope="module")
def mallory(cluster, alice_env):
    return User(cluster, alice_env, name="mallory")


@pytest.fixture(scope="module")
def own_certificate(mallory) -> str:
    """A folder with an authority, a certificate and a key of the stranger's own making."""
    done = mallory.run(sys.executable, "-c", MAKE_OWN, str(mallory.home), "10.77.0.13")
    assert done.returncode == 0, done.stderr
    return str(mallory.home / "own")
