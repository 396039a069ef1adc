"""One service on GPUs and on the CPUs of two makers, on a real Slurm: a script each, shares by speed, one wanted state.

The engine is the stub, which answers at another speed on each kind of machine.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest

from tests.cluster import wait_for
from tests.e2e.wanted import MOST_S, WantedSeen, told_at_the_end

pytestmark = [pytest.mark.slurm]

SERVICE = "llama"
SPEEDS = {"gpu": 0.02, "intel": 0.1, "amd": 0.2}  # seconds a word
NODES = {"gpu": "n1", "intel": "n2", "amd": "n3"}
SITE = """
machines:
  gpu: {{gpu: h100-80gb, gpus_per_node: 1, nodelist: n1, cpus_per_task: 2, mem: 2G, env: {{STUB_ENGINE_ARGS: "{gpu}"}}}}
  intel: {{gpu: cpu-spr, gpu_memory: 64GiB, nodelist: n2, env: {{STUB_ENGINE_ARGS: "{intel}"}}}}
  amd: {{gpu: cpu-genoa, gpu_memory: 64GiB, nodelist: n3, env: {{STUB_ENGINE_ARGS: "{amd}"}}}}
"""
ASK = """
import json, sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from hpc_serve.client import connect

client = connect(sys.argv[1], wait=300)

def ask(_):
    client.completions.create(model=client.model, prompt="Hello", max_tokens=8)
    return client.last_replica

with ThreadPoolExecutor(12) as threads:
    print(json.dumps(Counter(threads.map(ask, range(300)))))
"""


@pytest.fixture
def alice_variables(stub_env, cluster):
    site = cluster.home("alice") / "machines.yaml"
    site.write_text(SITE.format(**{name: f"--stub-words 8 --stub-word-s {word_s}" for name, word_s in SPEEDS.items()}))
    return {**stub_env, "HPC_SERVE_SITE": str(site)}


def test_gpu_cpu_and_amd_are_one_service(alice, asking, show_table):
    words = ("submit", "llama-2-7b", "--name", SERVICE, "--replicas", "gpu:1,intel:1,amd:1", "--keep-up", "--json")
    told = json.loads(alice.hpc_serve_said(*words))["submissions"]
    job_ids = {one["machine"]: one["job_id"] for one in told}
    assert list(job_ids) == list(SPEEDS)
    alice.hpc_serve_said("wait", SERVICE, "--replicas", "3", "--timeout", "5m")
    found = status(alice)
    assert {machine: one["nodes"][0]["name"] for machine, one in found.items()} == NODES
    assert f"{SERVICE}: 3 of 3 replicas; 1 of 1 on gpu, 1 of 1 on intel, 1 of 1 on amd" in alice.hpc_serve_said(
        "status"
    )

    ran = alice.run(sys.executable, "-c", ASK, SERVICE)
    answered = Counter(json.loads(ran.stdout))
    shares = {machine: answered[f"{job_id}-r0-0"] / answered.total() for machine, job_id in job_ids.items()}
    show_table("\n".join(f"{machine}: {SPEEDS[machine]} s a word, {share:.0%}" for machine, share in shares.items()))
    assert shares["gpu"] > max(shares["intel"], shares["amd"])
    assert min(shares.values()) > 0

    program = asking.start(4, SERVICE)
    seen = WantedSeen(alice, SERVICE)
    alice.run("scancel", job_ids["amd"])
    seen.wait_until(lambda: status(alice).get("amd", {}).get("state") == "ready", what="another replica on amd")
    again = status(alice)
    assert again["amd"]["nodes"][0]["name"] == "n3"
    assert again["amd"]["job_id"] != job_ids["amd"]
    assert {again[machine]["job_id"] for machine in ("gpu", "intel")} == {job_ids["gpu"], job_ids["intel"]}
    assert f"{SERVICE} has 2 replicas (gpu:1,amd:1), it had 3." in alice.hpc_serve_said(
        "scale", SERVICE, "intel:0,amd:1"
    )
    assert list(status(alice)) == ["gpu", "amd"]
    load = told_at_the_end(program)
    assert load["errors"] == []
    alice.hpc_serve_said("stop", SERVICE)
    wait_for(lambda: not alice.processes(), MOST_S, what="no process left")


def status(alice):
    """The replicas that are not over, by their kind of machine."""
    told = json.loads(alice.hpc_serve_said("status", SERVICE, "--json"))["services"]
    live = [one for one in told if one["state"] not in ("stopped", "failed")]
    return {one["machine"]: one for one in live}
