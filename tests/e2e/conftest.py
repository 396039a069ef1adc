"""What tests of whole jobs share."""

from __future__ import annotations

import sys

import pytest

from tests.cluster import wait_for
from tests.e2e.jobs import STUB, User
from tests.e2e.wanted import Asking


@pytest.fixture
def alice_variables() -> dict[str, str]:
    """Further variables of Alice's. A test file may have its own."""
    return {}


@pytest.fixture
def alice(cluster, alice_env, alice_variables):
    """Alice, for one test; nothing of hers is left running after it."""
    user = User(cluster, {**alice_env, **alice_variables})
    yield user
    user.run("scancel", "--user", "alice")
    wait_for(lambda: not user.processes(), 180, what="the end of what a failed test left")


@pytest.fixture
def asking(alice):
    """Starts programs of Alice's that ask a service all the time."""
    programs = Asking(alice)
    yield programs
    programs.end()


@pytest.fixture(scope="session")
def stub_env(cluster) -> dict[str, str]:
    """What makes scripts find the stub (tests/support/stub_engine.py) in place of `vllm`."""
    folder = cluster.home("alice") / "stub-env" / "bin"
    folder.mkdir(parents=True)
    (folder / "activate").write_text(f"export PATH={folder}:{sys.prefix}/bin:$PATH\n")
    (folder / "vllm").write_text(f'#!/bin/bash\nexec {sys.executable} {STUB} "$@"\n')
    (folder / "vllm").chmod(0o755)
    return {"HPC_SERVE_ENV": str(folder.parent)}
