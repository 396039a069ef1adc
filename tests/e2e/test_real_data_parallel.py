"""Data-parallel ranks that share experts, with real vLLM: on one host and over two, with vLLM's own start and over Ray,
with one server and with a server on each host.

The hosts' GPUs are declared, the ranks run on CPUs, and tiny mixtures of experts take the place of the weights. All
else is what a user runs. vLLM's CPU backend lacks two collectives and the map of experts, which tests/vllm_ray_on_cpu
adds. `make real-replicas` runs these tests, `make test` skips them.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from hpc_serve.hub.hub import find_spec
from hpc_serve.plan import EngineConfig, accelerator, estimate_memory
from hpc_serve.plan.memory.loaded import pipeline_stages
from hpc_serve.units import GIB
from tests.cluster import wait_for
from tests.e2e.jobs import ENDS_WITHIN_S, REAL_REPLICAS, Record, User, send
from tests.support.moe_model import CONFIGS, make_moe_model

pytestmark = REAL_REPLICAS

ASK = Path(__file__).with_name("ask_greedily.py")
START_S = 900.0
SILENCE_S = 10
WATCH = {
    "HPC_SERVE_CANARY_S": "30",  # ranks share two cores
    "HPC_SERVE_SILENCE_S": str(SILENCE_S),
    "RAY_DEDUP_LOGS": "0",  # ranks say the same
}
MODEL = "Qwen/Qwen3-30B-A3B"
CACHE_BYTES = 16_777_216  # of the tiny models' words
SHARED = ("--enable-expert-parallel", "-pp", "1")
# vLLM 0.32's latent attention on CPUs answers otherwise when requests share a step, and with TP=2: without data
# parallelism as well.
AT_ONCE = {"qwen2-moe": 6, "deepseek-v2": 1}
IS_COMPARED = {"qwen2-moe": (1, 2), "deepseek-v2": (1,)}  # with TP of
EACH_HOST = ("--", "--data-parallel-hybrid-lb")
LAYOUTS: dict[str, tuple[int, int, int, tuple[str, ...]]] = {  # nodes, TP, DP, further words
    "one-host": (1, 1, 2, ()),
    "two-hosts": (2, 2, 2, ()),
    "over-ray": (2, 2, 2, ("--backend", "ray")),
    "each-host": (2, 1, 4, EACH_HOST),  # two ranks each: vLLM calls one each external
}


@pytest.fixture(scope="module")
def folders(cluster) -> dict[str, Path]:
    return {like: make_moe_model(cluster.shared / "moe" / like, like) for like in CONFIGS}


@pytest.fixture(scope="module")
def answers_of_one_rank() -> dict[str, list[str]]:
    """Each model's answers with one rank, once a test has asked it."""
    return {}


@pytest.fixture
def alice_variables() -> dict[str, str]:
    return WATCH


def start(alice: User, folder: Path, service: str, *words: str) -> Record:
    user = User(alice.cluster, {**alice.environ, "HPC_SERVE_MODEL": str(folder)})
    told = json.loads(user.hpc_serve_said("submit", MODEL, "--name", service, "--json", *words))
    return alice.wait_until_ready(service, told["job_id"], START_S)


def answers(alice: User, service: str, at_once: int) -> list[str]:
    asked = alice.run(sys.executable, str(ASK), service, str(at_once), timeout=START_S)
    assert asked.returncode == 0, asked.stdout + asked.stderr
    return json.loads(asked.stdout.splitlines()[-1])


def stop(alice: User, record: Record) -> str:
    """Stop a service; returns what its nodes logged."""
    alice.hpc_serve_said("stop", record["service"])
    alice.wait_until_gone(record["job_id"])
    return logs(alice, record)


def logs(alice: User, record: Record) -> str:
    folder = alice.home / ".hpc-serve" / "services" / record["service"] / "logs"
    nodes = (path for path in folder.glob(f"{record['job_id']}*") if not path.name.endswith("-ray.log"))
    return "\n".join(path.read_text() for path in sorted(nodes))


def servers(alice: User, record: Record) -> list[Record]:
    """The records of all servers of a job."""
    return alice.records(record["service"], record["job_id"])


def ready_servers(alice: User, record: Record) -> list[Record]:
    """The same, once each node's server is ready."""

    def all_ready() -> list[Record]:
        found = servers(alice, record)
        return found if [one["state"] for one in found] == ["ready"] * record["num_nodes"] else []

    return wait_for(all_ready, START_S, what="a server on each node")


def workers(alice: User, host: str) -> list[int]:
    names = ("VLLM::Worker", "VLLM::EngineCore", "ray::RayWorkerProc")
    return [one.pid for one in alice.processes() if one.host == host and one.argv[0].startswith(names)]


def check_figures(log: str, folder: Path, tp: int, dp: int, *, expert_parallel: bool) -> None:
    """What the plan says of a rank is what each rank of the engine logs, to the byte."""
    _, spec, _ = find_spec(str(folder), EngineConfig(dtype="float32"))
    stages = pipeline_stages(spec, tp, 1, dp, expert_parallel=expert_parallel)
    found = re.findall(r"Weights of this rank: (\d+) bytes", log)
    assert found == [str(stages[0].weight_bytes)] * tp * dp
    planned = estimate_memory(
        spec,
        accelerator("cpu-spr", total_bytes=24 * GIB),
        EngineConfig(kv_cache_memory_bytes=CACHE_BYTES, dtype="float32", enable_expert_parallel=expert_parallel),
        tensor_parallel_size=tp,
        pipeline_parallel_size=1,
        data_parallel_size=dp,
        max_model_len=2048,
    )
    tokens = re.findall(r"KV cache size: ([\d,]+) tokens", log)
    assert tokens == [f"{planned.kv_cache_tokens:,}"] * dp


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("like", sorted(CONFIGS))
def test_ranks_that_share_experts_answer_as_one_rank_does(alice, folders, answers_of_one_rank, like, layout):
    if like not in answers_of_one_rank:
        alone = start(alice, folders[like], f"{like}-alone", "-tp", "1", "-pp", "1")
        answers_of_one_rank[like] = answers(alice, alone["service"], AT_ONCE[like])
        check_figures(stop(alice, alone), folders[like], 1, 1, expert_parallel=False)
    nodes, tp, dp, further = LAYOUTS[layout]
    sizes = ("-tp", str(tp), "--data-parallel-size", str(dp), "--nodes", str(nodes))
    words = (*sizes, "--gpus-per-node", str(dp * tp // nodes), *further)
    record = start(alice, folders[like], f"{like}-{layout}", *SHARED, *words)
    assert (record["num_nodes"], record["tensor_parallel_size"], record["data_parallel_size"]) == (nodes, tp, dp)
    if further == EACH_HOST:
        assert [one["nodes"][0]["name"] for one in ready_servers(alice, record)] == ["n1", "n2"]
    got = answers(alice, record["service"], AT_ONCE[like])
    assert got == answers_of_one_rank[like] or tp not in IS_COMPARED[like]
    check_figures(stop(alice, record), folders[like], tp, dp, expert_parallel=True)


@pytest.mark.parametrize("further", [(), ("--backend", "ray"), EACH_HOST], ids=["mp", "ray", "each-host"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_of_the_other_host_that_ends_or_hangs_ends_all_and_is_named(alice, folders, number, further, show_table):
    sizes = ("-tp", "1", "--data-parallel-size", "2", "--nodes", "2", "--gpus-per-node", "1")
    words = (*SHARED, *sizes, "--engine-restarts", "0")  # over Ray, an engine is started again
    record = start(alice, folders["qwen2-moe"], f"fate-{number}", *words, *further)
    job_id, other = record["job_id"], record["nodes"][1]["name"]
    if further == EACH_HOST:
        ready_servers(alice, record)
    victims = workers(alice, other)
    assert victims
    began = time.monotonic()
    send(victims[-1:], number)
    ended = wait_for(
        lambda: (found := alice.record(record["service"], job_id)) and found["state"] == "failed" and found,
        ENDS_WITHIN_S,
        what="the end of all ranks",
    )
    named = time.monotonic() - began
    alice.wait_until_gone(job_id)
    show_table(
        f"{further} {signal.Signals(number).name} on {other}: named after {named:.1f} s, gone after "
        f"{time.monotonic() - began:.1f} s: {ended['failed_part']}: {ended['reason']}"
    )
    assert other in ended["failed_part"] + ended["reason"]
    if further == EACH_HOST:
        assert [one["state"] for one in servers(alice, record)] == ["failed", "failed"]
