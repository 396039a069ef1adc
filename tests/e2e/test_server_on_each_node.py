"""A server on each node (`--data-parallel-hybrid-lb`) on a real Slurm of several hosts: a record for each, one fate.

The engine is the stub, put in vLLM's place by the environment that scripts activate. It does not share experts.
`test_real_data_parallel.py` has real vLLM.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.cluster import wait_for
from tests.e2e.jobs import STUB, Record, User, result_of, send

pytestmark = [pytest.mark.slurm]

MOST_S = 300.0
WORDS = (
    *("submit", "Qwen/Qwen3-30B-A3B", "--data-parallel-size", "4", "--enable-expert-parallel", "-tp", "1", "-pp", "1"),
    *("--nodes", "2", "--gpus-per-node", "2", "--max-model-len", "4096", "--no-exclusive", "--mem", "4G", "--json"),
)


@pytest.fixture
def alice_variables(stub_env) -> dict[str, str]:
    return {**stub_env, "STUB_ENGINE_ARGS": "--stub-words 40 --stub-word-s 0.25"}


def servers(alice: User, service: str, *states: str) -> list[Record]:
    """The records of a service's servers, once they are in these states."""

    def look() -> list[Record]:
        found = alice.records(service)
        return found if [one["state"] for one in found] == list(states) else []

    return wait_for(look, MOST_S, what=f"{service}: {', '.join(states)}")


def submit(alice: User, service: str) -> tuple[str, list[Record]]:
    told = alice.hpc_serve_said(*WORDS, "--name", service, "--", "--data-parallel-hybrid-lb")
    return json.loads(told)["job_id"], servers(alice, service, "ready", "ready")


def test_clients_choose_among_the_servers_and_a_stop_lets_all_finish(alice):
    job, found = submit(alice, "each")
    assert [one["nodes"][0]["name"] for one in found] == ["n1", "n2"]
    assert found[0]["certificate"] != found[1]["certificate"]
    alice.hpc_serve_said("wait", "each", "--replicas", "2", "--timeout", "5m")
    program = alice.begin_streams("each", 12)
    logs = alice.hpc_serve_said("logs", f"{job}-1", "--files").split()
    assert [Path(path).name for path in logs[1:]] == [f"{job}-node0.log", f"{job}-node1.log"]
    alice.hpc_serve_said("stop", f"{job}-1")
    assert result_of(program)["streams"] == [[40, "stop"]] * 12
    alice.wait_until_gone(job)
    ended = servers(alice, "each", "stopped", "stopped")
    assert all(one["drain_cause"] == "stop" for one in ended)
    assert not list((alice.home / ".hpc-serve").glob("services/each/*.drain"))


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_the_end_of_one_server_ends_all_and_is_named(alice, node):
    job, _ = submit(alice, f"fate-{node}")
    victims = [one.pid for one in alice.processes() if str(STUB) in one.argv[:2] and one.host == node]
    assert victims
    send(victims, signal.SIGKILL)
    first, second = servers(alice, f"fate-{node}", "failed", "failed")
    assert first["failed_part"] == ("engine" if node == "n1" else "engine on n2")
    assert "SIGKILL" in first["reason"]
    assert first["reason"].split(";")[0] in second["reason"]
    alice.wait_until_gone(job)
