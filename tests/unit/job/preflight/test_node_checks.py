"""Each check of one node, over facts of a healthy node with one thing changed. The facts are stand-ins."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import hpc_serve.job.preflight.checks
from hpc_serve.job.preflight.checks import node
from hpc_serve.job.preflight.facts import CudaFacts, GpusFacts, LimitFacts, NodeReport
from hpc_serve.job.preflight.judge import NODE_CHECKS, judge
from hpc_serve.job.preflight.verdict import findings
from hpc_serve.sizes import GIB, MIB
from tests.unit.job.preflight.nodes import (
    CUDA,
    DEVICE,
    FACTS,
    FOLDER,
    GPU,
    GPUS,
    LIMITS,
    MEMORY,
    NEEDS,
    SOFTWARE,
    VERSIONS,
    WEIGHTS,
    with_cuda,
)

NO_CUDA = replace(GPUS, cuda=None)
FULL = replace(DEVICE, free_bytes=40 * GIB)
VOLTA = replace(DEVICE, name="Tesla V100", capability="7.0")
BLACKWELL = replace(DEVICE, name="NVIDIA B200", capability="10.0")
CUDA_13 = replace(SOFTWARE, torch_cuda="13.0")
HUB = replace(WEIGHTS, source="acme/m", is_of_hub=True, folder="", missing="none of its weights")
ON_CPUS = replace(NEEDS, gpus_per_node=0, num_nodes=1, world_size=1, backend="mp")


def judged(check, facts, needs):
    """Return the verdict of one check on one node."""
    (verdict,) = (one for one in judge([NodeReport(name="n1", facts=facts)], needs) if one.check == check)
    return verdict


@pytest.mark.parametrize("check", [check[0] for check in NODE_CHECKS])
def test_a_healthy_node_passes(check):
    seen = judged(check, FACTS, NEEDS)
    assert (seen.level, seen.cure) == ("ok", ""), seen


@pytest.mark.parametrize(("name", "group"), [check[:2] for check in NODE_CHECKS])
def test_what_was_not_gathered_is_not_checked(name, group):
    assert judged(name, replace(FACTS, **{group: None}), NEEDS).level == "not checked"
    problem = replace(FACTS, **{group: None}, problems={group: "no answer within 20 s"})
    assert judged(name, problem, NEEDS).seen == "no answer within 20 s"


STAGED = replace(NEEDS, staged_bytes=140 * GIB)
SCRATCH = replace(FOLDER, purpose=node.STAGED, path="/scratch/c", is_writable=True, free_bytes=100 * GIB)

CASES = {
    "no room for a copy": (
        "staging",
        replace(FACTS, folders=(SCRATCH,)),
        STAGED,
        "failed",
        "140.0 GiB of the model are copied to /scratch/c, which has 100.0 GiB free",
    ),
    "room for a copy": (
        "staging",
        replace(FACTS, folders=(replace(SCRATCH, free_bytes=141 * GIB),)),
        STAGED,
        "ok",
        "",
    ),
    "a copy is there": ("staging", replace(FACTS, folders=()), STAGED, "ok", "another run on this node has copied"),
    "a GPU is gone": ("gpus", with_cuda(devices=(DEVICE,) * 7), NEEDS, "failed", "shows 7 GPUs"),
    "more GPUs than needed": ("gpus", with_cuda(devices=(DEVICE,) * 9), NEEDS, "ok", "9 GPUs"),
    "no GPU is visible": (
        "gpus",
        replace(FACTS, gpus=replace(NO_CUDA, visible="", gpus=())),
        NEEDS,
        "failed",
        "set and empty",
    ),
    "a module has set which GPUs are visible": (
        "gpus",
        replace(FACTS, gpus=GpusFacts(tool="", visible="0, 1")),
        NEEDS,
        "failed",
        "CUDA_VISIBLE_DEVICES=0, 1 names 2 of the GPUs, the engine needs 8",
    ),
    "all are visible, and no tool lists them": (
        "gpus",
        replace(FACTS, gpus=GpusFacts(tool="", visible="0,1,2,3,4,5,6,7")),
        NEEDS,
        "not checked",
        "neither nvidia-smi nor rocm-smi",
    ),
    "the driver's tool lists fewer": (
        "gpus",
        replace(FACTS, gpus=replace(NO_CUDA, gpus=(GPU,) * 7)),
        NEEDS,
        "warning",
        "lists 7 GPUs",
    ),
    "the driver's tool fails": (
        "gpus",
        replace(FACTS, gpus=GpusFacts(tool="nvidia-smi", error="couldn't communicate with the NVIDIA driver")),
        NEEDS,
        "warning",
        "couldn't communicate",
    ),
    "no tool": ("gpus", replace(FACTS, gpus=GpusFacts(tool="")), NEEDS, "not checked", "nvidia-smi"),
    "parts of GPUs": (
        "gpus",
        replace(FACTS, gpus=replace(NO_CUDA, visible="MIG-1", gpus=None)),
        NEEDS,
        "not checked",
        "MIG-1",
    ),
    "an engine on CPUs": ("gpus", FACTS, ON_CPUS, "not checked", "needs no GPUs"),
    "no fabric manager": (
        "gpus-working",
        with_cuda(devices=(replace(DEVICE, error="CUDA_ERROR_SYSTEM_NOT_READY"),)),
        NEEDS,
        "failed",
        "GPU 0 (NVIDIA H100 80GB HBM3): CUDA says CUDA_ERROR_SYSTEM_NOT_READY",
    ),
    "no library": (
        "gpus-working",
        with_cuda(error="no library libcuda.so.1: not found", devices=()),
        NEEDS,
        "failed",
        "no library libcuda.so.1",
    ),
    "no library, and none needed": (
        "gpus-working",
        replace(with_cuda(error="no library libcuda.so.1", devices=()), software=replace(SOFTWARE, torch_cuda="")),
        NEEDS,
        "warning",
        "no library",
    ),
    "an error that is not known": (
        "gpus-working",
        with_cuda(devices=(replace(DEVICE, error="error 12345"),)),
        NEEDS,
        "warning",
        "error 12345",
    ),
    "memory errors": (
        "gpus-working",
        replace(FACTS, gpus=replace(GPUS, gpus=(replace(GPU, uncorrected_errors=3),))),
        NEEDS,
        "warning",
        "3 uncorrected memory errors",
    ),
    "a GPU in use": ("gpus-free", with_cuda(devices=(FULL,)), NEEDS, "failed", "40.0 of 79.0 GiB free"),
    "a GPU in use that need not be free": (
        "gpus-free",
        with_cuda(devices=(FULL,)),
        replace(NEEDS, sets_cache_bytes=True),
        "warning",
        "40.0 of 79.0",
    ),
    "a GPU in use beyond those needed": ("gpus-free", with_cuda(devices=(*CUDA.devices, FULL)), NEEDS, "ok", "78.0"),
    "a driver of an older CUDA": ("driver", with_cuda(cuda_version=11080), NEEDS, "failed", "supports CUDA 11.8"),
    "a driver of an older minor": ("driver", with_cuda(cuda_version=12020), NEEDS, "warning", "CUDA 12.2"),
    "a newer driver": ("driver", with_cuda(cuda_version=13000), NEEDS, "ok", "CUDA 13.0"),
    "a driver, and torch for ROCm": (
        "driver",
        replace(FACTS, software=replace(SOFTWARE, torch_cuda="")),
        NEEDS,
        "not checked",
        "no torch built for CUDA",
    ),
    "GPUs too old for the wheel": (
        "capability",
        replace(with_cuda(devices=(VOLTA,)), software=CUDA_13),
        NEEDS,
        "failed",
        "Tesla V100 has compute capability 7.0",
    ),
    "the same GPUs with an older wheel": ("capability", with_cuda(devices=(VOLTA,)), NEEDS, "ok", "7.0"),
    "no bfloat16": (
        "capability",
        with_cuda(devices=(VOLTA,)),
        replace(NEEDS, dtype="bfloat16"),
        "failed",
        "--dtype bfloat16 needs 8.0",
    ),
    "GPUs newer than the wheel": (
        "capability",
        replace(with_cuda(devices=(BLACKWELL,)), software=replace(SOFTWARE, torch_cuda="12.6")),
        NEEDS,
        "warning",
        "known to CUDA 12.8",
    ),
    "a folder that a node does not see": (
        "weights",
        replace(FACTS, weights=replace(WEIGHTS, error="no such folder on this node")),
        NEEDS,
        "failed",
        "/models/m: no such folder",
    ),
    "files are missing": (
        "weights",
        replace(FACTS, weights=replace(WEIGHTS, missing="only 3 of its 4 files of weights (b missing)")),
        NEEDS,
        "failed",
        "only 3 of its 4",
    ),
    "a file is cut short": (
        "weights",
        replace(FACTS, weights=replace(WEIGHTS, damaged=("a.safetensors has 10 of its 20 bytes",))),
        NEEDS,
        "failed",
        "has 10 of its 20 bytes",
    ),
    "random weights": (
        "weights",
        replace(FACTS, weights=replace(WEIGHTS, missing="none of its weights")),
        replace(NEEDS, load_format="dummy"),
        "ok",
        "random",
    ),
    "weights read in another way": (
        "weights",
        replace(FACTS, weights=replace(WEIGHTS, missing="none of its weights")),
        replace(NEEDS, load_format="tensorizer"),
        "not checked",
        "tensorizer",
    ),
    "offline without weights": (
        "weights",
        replace(FACTS, weights=replace(HUB, is_offline=True)),
        NEEDS,
        "failed",
        "HF_HUB_OFFLINE",
    ),
    "offline with some of the weights": (
        "weights",
        replace(FACTS, weights=replace(HUB, is_offline=True, folder="/hf/m", missing="only 3 of its 4 files")),
        NEEDS,
        "warning",
        "only 3 of its 4",
    ),
    "a gated model without a token": (
        "weights",
        replace(FACTS, weights=replace(HUB, hub_status=401, hub_error="GatedRepo")),
        NEEDS,
        "failed",
        "there is no token",
    ),
    "a gated model with another's token": (
        "weights",
        replace(FACTS, weights=replace(HUB, hub_status=403, hub_error="GatedRepo", has_token=True)),
        NEEDS,
        "failed",
        "your token may not read it",
    ),
    "a model that the hub does not have": (
        "weights",
        replace(FACTS, weights=replace(HUB, hub_status=401, hub_error="RepoNotFound")),
        NEEDS,
        "failed",
        "RepoNotFound",
    ),
    "a proxy that refuses": (
        "weights",
        replace(FACTS, weights=replace(HUB, hub_status=403)),
        NEEDS,
        "warning",
        "fetches them first",
    ),
    "a model without a config of its own": (
        "weights",
        replace(FACTS, weights=replace(HUB, hub_status=404, hub_error="EntryNotFound")),
        NEEDS,
        "warning",
        "fetches them first",
    ),
    "a hub that does not answer": (
        "weights",
        replace(FACTS, weights=replace(HUB, hub_status=0)),
        NEEDS,
        "warning",
        "does not answer",
    ),
    "weights that the hub gives": (
        "weights",
        replace(FACTS, weights=replace(HUB, hub_status=302)),
        NEEDS,
        "warning",
        "fetches them first",
    ),
    "a cgroup with less than Slurm says": (
        "memory",
        replace(FACTS, memory=replace(MEMORY, limit_bytes=64 * GIB)),
        NEEDS,
        "warning",
        "the job's cgroup allows 64.0 GiB, Slurm says that this job has 512.0",
    ),
    "more offloaded than there is": (
        "memory",
        FACTS,
        replace(NEEDS, offload_bytes=100 * GIB),
        "failed",
        "--cpu-offload-gb keeps 800.0 GiB",
    ),
    "little memory for many ranks": (
        "memory",
        replace(FACTS, memory=replace(MEMORY, total_bytes=8 * GIB, limit_bytes=None)),
        replace(NEEDS, memory_bytes=None),
        "warning",
        "the node has 8.0 GiB for 8 ranks",
    ),
    "a copy of the model in memory that is not there": (
        "memory",
        replace(FACTS, folders=(FOLDER, replace(FOLDER, purpose=node.STAGED, path="/dev/shm/s", is_in_memory=True))),
        replace(NEEDS, staged_bytes=600 * GIB),
        "failed",
        "the job's cgroup allows 512.0 GiB, and the copy of the model takes 600.0 GiB of it",
    ),
    "a copy of the model, and caches, in memory that ranks need": (
        "memory",
        replace(
            FACTS,
            folders=(
                replace(FOLDER, purpose=node.STAGED, path="/dev/shm/s", is_in_memory=True),
                replace(FOLDER, purpose=node.CACHES, path="/tmp/c", is_in_memory=True),
            ),
        ),
        replace(NEEDS, staged_bytes=500 * GIB),
        "warning",
        "about 521 are needed, 505 of them for files in memory (/dev/shm, /tmp/c)",
    ),
    "no /dev/shm": (
        "shm",
        replace(FACTS, memory=replace(MEMORY, shm_is_writable=False)),
        NEEDS,
        "failed",
        "not writable",
    ),
    "a full /dev/shm": (
        "shm",
        replace(FACTS, memory=replace(MEMORY, shm_bytes=64 * MIB, shm_free_bytes=0)),
        NEEDS,
        "failed",
        "0.0 of 64 MiB free",
    ),
    "a container's /dev/shm": (
        "shm",
        replace(FACTS, memory=replace(MEMORY, shm_bytes=64 * MIB, shm_free_bytes=64 * MIB)),
        NEEDS,
        "warning",
        "ranks of one node share memory",
    ),
    "a container's /dev/shm for one rank": (
        "shm",
        replace(FACTS, memory=replace(MEMORY, shm_bytes=64 * MIB, shm_free_bytes=64 * MIB)),
        ON_CPUS,
        "ok",
        "GiB free",
    ),
    "a folder without room": (
        "disk",
        replace(FACTS, folders=(FOLDER, replace(FOLDER, purpose="caches", path="/local", free_bytes=1000))),
        NEEDS,
        "failed",
        "/local (caches) has 0.0 MiB free",
    ),
    "a folder without files": (
        "disk",
        replace(FACTS, folders=(replace(FOLDER, free_files=0),)),
        NEEDS,
        "failed",
        "no file free",
    ),
    "a folder of a quota that is used up": (
        "disk",
        replace(FACTS, folders=(replace(FOLDER, is_writable=False),)),
        NEEDS,
        "failed",
        "cannot be written to",
    ),
    "logs without room": (
        "disk",
        replace(FACTS, folders=(replace(FOLDER, purpose="logs", is_writable=False, free_bytes=0),)),
        NEEDS,
        "warning",
        "(logs) cannot be written to",
    ),
    "little room": (
        "disk",
        replace(FACTS, folders=(replace(FOLDER, free_bytes=GIB),)),
        NEEDS,
        "warning",
        "1.0 GiB free",
    ),
    "little locked memory": (
        "limits",
        replace(FACTS, limits={**LIMITS, "memlock": LimitFacts(soft=65536, hard=65536)}),
        NEEDS,
        "warning",
        "memlock is 65,536",
    ),
    "little locked memory on one node": (
        "limits",
        replace(FACTS, limits={**LIMITS, "memlock": LimitFacts(soft=65536, hard=65536)}),
        replace(NEEDS, num_nodes=1),
        "ok",
        "no limit",
    ),
    "no tokenizer": (
        "weights",
        replace(FACTS, weights=replace(WEIGHTS, lacks_tokenizer=True)),
        NEEDS,
        "failed",
        "/models/m holds no tokenizer",
    ),
    "no tokenizer, beside weights that are cut short": (
        "weights",
        replace(FACTS, weights=replace(WEIGHTS, lacks_tokenizer=True, damaged=("a.safetensors is empty",))),
        NEEDS,
        "failed",
        "a.safetensors is empty",
    ),
    "no tokenizer, and another is named": (
        "weights",
        replace(FACTS, weights=replace(WEIGHTS, lacks_tokenizer=True)),
        replace(NEEDS, has_own_tokenizer=True),
        "ok",
        "4 files",
    ),
    "no tokenizer yet of a hub's model": (
        "weights",
        replace(FACTS, weights=replace(WEIGHTS, lacks_tokenizer=True, is_of_hub=True)),
        NEEDS,
        "ok",
        "4 files",
    ),
    "few files": (
        "limits",
        replace(FACTS, limits={**LIMITS, "nofile": LimitFacts(soft=1024, hard=1024)}),
        NEEDS,
        "warning",
        "nofile is 1,024",
    ),
    "few processes": (
        "limits",
        replace(FACTS, limits={**LIMITS, "nproc": LimitFacts(soft=512, hard=1024)}),
        NEEDS,
        "warning",
        "nproc is 512 (hard 1,024)",
    ),
    "too few processes for Ray": (
        "limits",
        replace(FACTS, limits={**LIMITS, "nproc": LimitFacts(soft=150, hard=150, used=20)}),
        NEEDS,
        "failed",
        "nproc is 150 (ulimit -u), and you have 20 processes and threads there before the engine",
    ),
    "as many, without Ray": (
        "limits",
        replace(FACTS, limits={**LIMITS, "nproc": LimitFacts(soft=150, hard=150, used=20)}),
        ON_CPUS,
        "warning",
        "nproc is 150",
    ),
    "no processes left": (
        "limits",
        replace(FACTS, limits={**LIMITS, "nproc": LimitFacts(soft=4096, hard=8192, used=4050)}),
        ON_CPUS,
        "failed",
        "nproc is 4,096 (hard 8,192) (ulimit -u), and you have 4,050",
    ),
    "a limited address space": (
        "limits",
        replace(FACTS, limits={**LIMITS, "as": LimitFacts(soft=64 * GIB, hard=-1)}),
        NEEDS,
        "warning",
        "address space",
    ),
    "few tasks left": (
        "limits",
        replace(FACTS, memory=replace(MEMORY, tasks_limit=1000, tasks=100)),
        NEEDS,
        "warning",
        "room for 900 of 1000 tasks",
    ),
    "no tasks left": (
        "limits",
        replace(FACTS, memory=replace(MEMORY, tasks_limit=100, tasks=90)),
        NEEDS,
        "failed",
        "room for 10 of 100 tasks",
    ),
    "no command": (
        "commands",
        replace(FACTS, software=replace(SOFTWARE, missing_commands=("vllm", "ray"))),
        NEEDS,
        "failed",
        "no command vllm and ray",
    ),
    "a long path": (
        "paths",
        replace(FACTS, software=replace(SOFTWARE, socket_folder="/scratch/" + "x" * 70)),
        NEEDS,
        "failed",
        "116 characters, 107 are allowed",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_check_names_what_it_saw_and_what_to_do(name):
    check, facts, needs, level, words = CASES[name]
    seen = judged(check, facts, needs)
    assert seen.level == level, seen
    assert words in seen.seen
    assert not seen.seen.endswith(".")
    assert bool(seen.cure) == (level in ("warning", "failed"))
    assert not seen.cure or seen.cure.endswith((".", ")"))


def test_versions_of_healthy_nodes_are_shown():
    assert judged("commands", FACTS, NEEDS).seen == ", ".join(f"{name} {version}" for name, version in VERSIONS.items())


def test_an_error_of_cuda_itself_counts_for_all_of_its_checks():
    facts = replace(FACTS, gpus=replace(GPUS, cuda=CudaFacts(error="CUDA_ERROR_NO_DEVICE")))
    assert judged("gpus-working", facts, NEEDS).level == "failed"
    assert judged("gpus", facts, NEEDS).level == "ok"
    assert judged("gpus-free", facts, NEEDS).level == "not checked"


def test_a_copy_on_a_disk_takes_no_memory():
    staged = replace(FOLDER, purpose=node.STAGED, path="/local/s", free_bytes=1_000 * GIB)
    assert judged("memory", replace(FACTS, folders=(staged,)), replace(NEEDS, staged_bytes=600 * GIB)).level == "ok"


def test_each_finding_that_is_data_has_a_level_a_sentence_and_a_cure():
    for name in findings().sections():
        finding = findings()[name]
        assert set(finding) == {"level", "seen", "cure"}, name
        assert finding["level"] in ("warning", "failed"), name
        assert finding["cure"].endswith("."), name


def test_the_checks_and_the_data_name_the_same_findings():
    checks = Path(hpc_serve.job.preflight.checks.__file__).parent
    code = "".join(path.read_text() for path in checks.glob("*.py"))
    assert [name for name in findings().sections() if f'"{name}"' not in code] == []
    used = re.findall(r'found\(\s*"([^"]+)"', code)
    assert sorted(set(used) - set(findings().sections())) == []
