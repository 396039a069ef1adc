"""The scripts for hardware other than NVIDIA's, as far as this machine goes.

CPU nodes are the real thing: the committed script, and vLLM's CPU backend as it is, without the plugin of other tests.
Of TPUs there are none: real Slurm and real Ray carry the chips as a resource, and a stub stands in for vLLM.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.environment import ENGINE_ON_FEW_CORES
from tests.cluster.processes import variable_of
from tests.e2e.jobs import CHECKOUT, STUB, User
from tests.e2e.test_serving import START_S, ask_from_a_job
from tests.support.int8_checkpoint import quantise

pytestmark = [pytest.mark.slurm]


@pytest.fixture(scope="module")
def alice(cluster, alice_env, tiny_models):
    environ = {name: value for name, value in alice_env.items() if name not in ENGINE_ON_FEW_CORES}
    int8 = quantise(tiny_models / "8b", cluster.shared / "models" / "8b-int8")
    for path in int8.iterdir():
        path.chmod(0o644)
    # This machine has one socket: vLLM's own switch lets two ranks share it, each bound to half of its cores.
    alice = User(cluster, {**environ, "HPC_SERVE_MODEL": str(int8), "VLLM_CPU_SIM_MULTI_NUMA": "1"})
    yield alice
    alice.run("scancel", "--user=alice")


@pytest.mark.engine
def test_the_committed_script_serves_an_int8_checkpoint_on_the_sockets_of_a_cpu_node(alice):
    job_id = alice.sbatch(CHECKOUT / "sbatch" / "llama-2-7b-cpu.sh")
    record = alice.wait_until_ready("llama-2-7b", job_id, START_S)
    assert (record["tensor_parallel_size"], record["gpus_per_node"]) == (2, 0)
    other = next(node for node in alice.cluster.nodes if node != record["nodes"][0]["name"])
    got = ask_from_a_job(alice, "llama-2-7b", other)
    assert got["model"] == "meta-llama/Llama-2-7b-chat-hf"
    assert got["text"].strip()
    assert not [process for process in alice.processes() if "raylet" in process.argv[0]]
    log = (Path(record["log_dir"]) / f"{job_id}-node0.log").read_text()
    assert "CPUInt8ScaledMMLinearKernel for CompressedTensorsW8A8Int8" in log
    assert "local_rank=1, core ids=" in log, "two ranks, bound to cores"
    alice.cancel(job_id)
    alice.wait_until_gone(job_id)


def test_chips_of_tpu_hosts_are_waited_for_as_rays_resource(alice):
    rendered = alice.hpc_serve("render", "--model", "8b", "--gpu", "v5p:2x2x2", "--name", "on-tpus")
    assert rendered.returncode == 0, rendered.stderr
    script = alice.write("on-tpus.sh", rendered.stdout.replace("vllm serve", f"python {STUB} serve"))
    job_id = alice.sbatch(script)
    record = alice.wait_until_ready("on-tpus", job_id)
    assert (record["tensor_parallel_size"], record["num_nodes"], record["gpus_per_node"]) == (8, 2, 4)
    raylets = [process for process in alice.processes() if process.argv[0].endswith("raylet/raylet")]
    assert sorted(process.host for process in raylets) == sorted(node["name"] for node in record["nodes"])
    assert all(any("TPU,4" in word for word in process.argv) for process in raylets)
    engine = next(process for process in alice.processes() if process.argv[1:2] == (str(STUB),))
    assert variable_of(engine.pid, "TPU_MULTIHOST_BACKEND") == "ray"
    assert "--distributed-executor-backend" not in engine.argv
    alice.cancel(job_id)
    alice.wait_until_gone(job_id)
