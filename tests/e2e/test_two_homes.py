"""A service and a user's commands with another HPC_SERVE_HOME, on a real Slurm with stub engines."""

from __future__ import annotations

import json

import pytest

from tests.e2e.jobs import SMALL, User

pytestmark = [pytest.mark.slurm]


@pytest.fixture
def alice_variables(stub_env):
    return stub_env


def test_another_home_ends_no_service_and_what_is_forgotten_is_hidden_at_once(alice):
    home = alice.home / "first-home"
    first = User(alice.cluster, {**alice.environ, "HPC_SERVE_HOME": str(home)})
    second = User(alice.cluster, {**alice.environ, "HPC_SERVE_HOME": str(alice.home / "second-home")})
    submitted = json.loads(first.hpc_serve_said("submit", "8b", "--replicas", "2", *SMALL, "--json"))
    kept, ended = jobs = [one["job_id"] for one in submitted["replicas"]]
    first.hpc_serve_said("wait", "8b", "--replicas", "2", "--timeout", "5m")

    for words in (("stop", "8b"), ("stop", "8b", "--now"), ("stop", kept), ("scale", "8b", "1"), ("wake", "8b")):
        refused = second.hpc_serve(*words)
        assert (refused.returncode, refused.stdout) == (5, "")
        assert f"set HPC_SERVE_HOME={home}, or end it without a drain: hpc-serve stop {kept} --now" in refused.stderr
    assert states(first, jobs) == {kept: "ready", ended: "ready"}

    said = second.hpc_serve_said("stop", ended, "--now")
    assert f"There is no record of job {ended} in {alice.home / 'second-home'}: it is ended without a drain." in said
    assert states(first, jobs) == {kept: "ready", ended: "stopped"}

    first.hpc_serve_said("stop", "8b")
    assert states(first, jobs) == {kept: "stopped", ended: "stopped"}
    first.hpc_serve_said("forget", "--ended")
    assert "JobState=COMPLETED" in alice.run("scontrol", "show", "job", kept).stdout, "Slurm still lists it"
    assert states(first, jobs) == {}


def states(user: User, jobs: list[str]) -> dict[str, str]:
    """The state of each of the jobs that `status --all` shows. Slurm may still list those of tests before."""
    told = json.loads(user.hpc_serve_said("status", "--all", "--json"))
    return {one["job_id"]: one["state"] for one in told["services"] if one["job_id"] in jobs}
