"""What tests of whole jobs share."""

from __future__ import annotations

import pytest

from tests.cluster import wait_for
from tests.e2e.jobs import User
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
