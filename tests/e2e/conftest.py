"""What tests of whole jobs share."""

from __future__ import annotations

import pytest

from tests.cluster import wait_for
from tests.e2e.jobs import User


@pytest.fixture
def alice(cluster, alice_env):
    """Alice, for one test; nothing of hers is left running after it."""
    user = User(cluster, alice_env)
    yield user
    user.run("scancel", "--user", "alice")
    wait_for(lambda: not user.processes(), 60, what="the end of what a failed test left")
