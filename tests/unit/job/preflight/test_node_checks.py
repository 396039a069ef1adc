"""Each check of one node, over facts of a healthy node with one thing changed. The facts are stand-ins."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import hpc_serve.job.preflight.checks
from hpc_serve.job.preflight.checks import node
from hpc_serve.job.preflight.facts import CudaFacts, GpusFacts, LimitFacts, NodeReport
from hpc_serve.job.preflight.judge import CHECKS, judge
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
ON_CPUS = replace(NEEDS, gpus=0, num_nodes=1, world_size=1, backend="mp")


NODE_CHECKS = [(name, group) for name, group, scope, _ in CHECKS if scope == "node"]


def judged(check, facts, needs):
    """Return the verdict of one check on one node."""
    (verdict,) = (one for one in judge([NodeReport(name="n1", facts=facts)], needs) if one.check == check)
    return verdict


@pytest.mark.parametrize("check", [name for name, _ in NODE_CHECKS])
def test_a_healthy_node_passes(check):
    seen = judged(check, FACTS, NEEDS)
    assert (seen.level, seen.cure) == ("ok", ""), seen


@pytest.mark.parametrize(("name", "group"), NODE_CHECKS)
def test_what_was_not_gathered_is_not_checked(name, group):
    assert judged(name, replace(FACTS, **{group: None}), NEEDS).level == "not checked"
    problem = replace(FACTS, **{group: None}, problems={group: "no answer within 20 s"})
    assert judged(name, problem, NEEDS).seen == "no answer within 20 s"


STAGED = replace(NEEDS, staged_bytes=140 * GIB)
SCRATCH = replace(FOLDER, purpose=node.STAGED, path="/scratch/c", is_writable=True, free_bytes=100 * GIB)


def case(check, level, words, *, facts=FACTS, needs=NEEDS, **changes):
    """One check of a healthy node with these changes, and what is expected of it."""
    return check, replace(facts, **changes), needs, level, words


NEW_OPTION = ("--monokernel", "--seed", "1")
CASES = {
    "no room for a copy": case(
        "staging",
        "failed",
        "140.0 GiB of the model are copied to /scratch/c, which has 100.0 GiB free",
        needs=STAGED,
        folders=(SCRATCH,),
    ),
    "room for a copy": case("staging", "ok", "", needs=STAGED, folders=(replace(SCRATCH, free_bytes=141 * GIB),)),
    "a copy is there": case("staging", "ok", "another run on this node has copied", needs=STAGED, folders=()),
    "a GPU is gone": case("gpus", "failed", "shows 7 GPUs", facts=with_cuda(devices=(DEVICE,) * 7)),
    "more GPUs than needed": case("gpus", "ok", "9 GPUs", facts=with_cuda(devices=(DEVICE,) * 9)),
    "no GPU is visible": case("gpus", "failed", "set and empty", gpus=replace(NO_CUDA, visible="", gpus=())),
    "a module has set which GPUs are visible": case(
        "gpus",
        "failed",
        "CUDA_VISIBLE_DEVICES=0, 1 names 2 of the GPUs, the engine needs 8",
        gpus=GpusFacts(tool="", visible="0, 1"),
    ),
    "all are visible, and no tool lists them": case(
        "gpus", "not checked", "neither nvidia-smi nor rocm-smi", gpus=GpusFacts(tool="", visible="0,1,2,3,4,5,6,7")
    ),
    "the driver's tool lists fewer": case("gpus", "warning", "lists 7 GPUs", gpus=replace(NO_CUDA, gpus=(GPU,) * 7)),
    "the driver's tool fails": case(
        "gpus",
        "warning",
        "couldn't communicate",
        gpus=GpusFacts(tool="nvidia-smi", error="couldn't communicate with the NVIDIA driver"),
    ),
    "no tool": case("gpus", "not checked", "nvidia-smi", gpus=GpusFacts(tool="")),
    "parts of GPUs": case("gpus", "not checked", "MIG-1", gpus=replace(NO_CUDA, visible="MIG-1", gpus=None)),
    "an engine on CPUs": case("gpus", "not checked", "needs no GPUs", needs=ON_CPUS),
    "no fabric manager": case(
        "gpus-working",
        "failed",
        "GPU 0 (NVIDIA H100 80GB HBM3): CUDA says CUDA_ERROR_SYSTEM_NOT_READY",
        facts=with_cuda(devices=(replace(DEVICE, error="CUDA_ERROR_SYSTEM_NOT_READY"),)),
    ),
    "no library": case(
        "gpus-working",
        "failed",
        "no library libcuda.so.1",
        facts=with_cuda(error="no library libcuda.so.1: not found", devices=()),
    ),
    "no library, and none needed": case(
        "gpus-working",
        "warning",
        "no library",
        facts=replace(
            with_cuda(error="no library libcuda.so.1", devices=()), software=replace(SOFTWARE, torch_cuda="")
        ),
    ),
    "an error that is not known": case(
        "gpus-working", "warning", "error 12345", facts=with_cuda(devices=(replace(DEVICE, error="error 12345"),))
    ),
    "memory errors": case(
        "gpus-working",
        "warning",
        "3 uncorrected memory errors",
        gpus=replace(GPUS, gpus=(replace(GPU, uncorrected_errors=3),)),
    ),
    "a GPU in use": case("gpus-free", "failed", "40.0 of 79.0 GiB free", facts=with_cuda(devices=(FULL,))),
    "a GPU in use that need not be free": case(
        "gpus-free",
        "warning",
        "40.0 of 79.0",
        facts=with_cuda(devices=(FULL,)),
        needs=replace(NEEDS, sets_cache_bytes=True),
    ),
    "a GPU in use beyond those needed": case("gpus-free", "ok", "78.0", facts=with_cuda(devices=(*CUDA.devices, FULL))),
    "a driver of an older CUDA": case("driver", "failed", "supports CUDA 11.8", facts=with_cuda(cuda_version=11080)),
    "a driver of an older minor": case("driver", "warning", "CUDA 12.2", facts=with_cuda(cuda_version=12020)),
    "a newer driver": case("driver", "ok", "CUDA 13.0", facts=with_cuda(cuda_version=13000)),
    "a driver, and torch for ROCm": case(
        "driver", "not checked", "no torch built for CUDA", software=replace(SOFTWARE, torch_cuda="")
    ),
    "GPUs too old for the wheel": case(
        "capability",
        "failed",
        "Tesla V100 has compute capability 7.0",
        facts=replace(with_cuda(devices=(VOLTA,)), software=CUDA_13),
    ),
    "the same GPUs with an older wheel": case("capability", "ok", "7.0", facts=with_cuda(devices=(VOLTA,))),
    "no bfloat16": case(
        "capability",
        "failed",
        "--dtype bfloat16 needs 8.0",
        facts=with_cuda(devices=(VOLTA,)),
        needs=replace(NEEDS, dtype="bfloat16"),
    ),
    "GPUs newer than the wheel": case(
        "capability",
        "warning",
        "known to CUDA 12.8",
        facts=replace(with_cuda(devices=(BLACKWELL,)), software=replace(SOFTWARE, torch_cuda="12.6")),
    ),
    "a folder that a node does not see": case(
        "weights", "failed", "/models/m: no such folder", weights=replace(WEIGHTS, error="no such folder on this node")
    ),
    "files are missing": case(
        "weights",
        "failed",
        "only 3 of its 4",
        weights=replace(WEIGHTS, missing="only 3 of its 4 files of weights (b missing)"),
    ),
    "a file is cut short": case(
        "weights",
        "failed",
        "has 10 of its 20 bytes",
        weights=replace(WEIGHTS, damaged=("a.safetensors has 10 of its 20 bytes",)),
    ),
    "random weights": case(
        "weights",
        "ok",
        "random",
        needs=replace(NEEDS, load_format="dummy"),
        weights=replace(WEIGHTS, missing="none of its weights"),
    ),
    "weights read in another way": case(
        "weights",
        "not checked",
        "tensorizer",
        needs=replace(NEEDS, load_format="tensorizer"),
        weights=replace(WEIGHTS, missing="none of its weights"),
    ),
    "offline without weights": case("weights", "failed", "HF_HUB_OFFLINE", weights=replace(HUB, is_offline=True)),
    "offline with some of the weights": case(
        "weights",
        "warning",
        "only 3 of its 4",
        weights=replace(HUB, is_offline=True, folder="/hf/m", missing="only 3 of its 4 files"),
    ),
    "a gated model without a token": case(
        "weights", "failed", "there is no token", weights=replace(HUB, hub_status=401, hub_error="GatedRepo")
    ),
    "a gated model with another's token": case(
        "weights",
        "failed",
        "your token may not read it",
        weights=replace(HUB, hub_status=403, hub_error="GatedRepo", has_token=True),
    ),
    "a model that the hub does not have": case(
        "weights", "failed", "RepoNotFound", weights=replace(HUB, hub_status=401, hub_error="RepoNotFound")
    ),
    "a proxy that refuses": case("weights", "warning", "fetches them first", weights=replace(HUB, hub_status=403)),
    "a model without a config of its own": case(
        "weights", "warning", "fetches them first", weights=replace(HUB, hub_status=404, hub_error="EntryNotFound")
    ),
    "a hub that does not answer": case("weights", "warning", "does not answer", weights=replace(HUB, hub_status=0)),
    "weights that the hub gives": case(
        "weights", "warning", "fetches them first", weights=replace(HUB, hub_status=302)
    ),
    "a cgroup with less than Slurm says": case(
        "memory",
        "warning",
        "the job's cgroup allows 64.0 GiB, Slurm says that this job has 512.0",
        memory=replace(MEMORY, limit_bytes=64 * GIB),
    ),
    "more offloaded than there is": case(
        "memory", "failed", "--cpu-offload-gb keeps 800.0 GiB", needs=replace(NEEDS, offload_bytes=100 * GIB)
    ),
    "little memory for many ranks": case(
        "memory",
        "warning",
        "the node has 8.0 GiB for 8 ranks",
        needs=replace(NEEDS, memory_bytes=None),
        memory=replace(MEMORY, total_bytes=8 * GIB, limit_bytes=None),
    ),
    "a copy of the model in memory that is not there": case(
        "memory",
        "failed",
        "the job's cgroup allows 512.0 GiB, and the copy of the model takes 600.0 GiB of it",
        needs=replace(NEEDS, staged_bytes=600 * GIB),
        folders=(FOLDER, replace(FOLDER, purpose=node.STAGED, path="/dev/shm/s", is_in_memory=True)),
    ),
    "a copy of the model, and caches, in memory that ranks need": case(
        "memory",
        "warning",
        "about 521 are needed, 505 of them for files in memory (/dev/shm, /tmp/c)",
        needs=replace(NEEDS, staged_bytes=500 * GIB),
        folders=(
            replace(FOLDER, purpose=node.STAGED, path="/dev/shm/s", is_in_memory=True),
            replace(FOLDER, purpose=node.CACHES, path="/tmp/c", is_in_memory=True),
        ),
    ),
    "no /dev/shm": case("shm", "failed", "not writable", memory=replace(MEMORY, shm_is_writable=False)),
    "a full /dev/shm": case(
        "shm", "failed", "0.0 of 64 MiB free", memory=replace(MEMORY, shm_bytes=64 * MIB, shm_free_bytes=0)
    ),
    "a container's /dev/shm": case(
        "shm",
        "warning",
        "ranks of one node share memory",
        memory=replace(MEMORY, shm_bytes=64 * MIB, shm_free_bytes=64 * MIB),
    ),
    "a container's /dev/shm for one rank": case(
        "shm", "ok", "GiB free", needs=ON_CPUS, memory=replace(MEMORY, shm_bytes=64 * MIB, shm_free_bytes=64 * MIB)
    ),
    "a folder without room": case(
        "disk",
        "failed",
        "/local (caches) has 0.0 MiB free",
        folders=(FOLDER, replace(FOLDER, purpose="caches", path="/local", free_bytes=1000)),
    ),
    "a folder without files": case("disk", "failed", "no file free", folders=(replace(FOLDER, free_files=0),)),
    "a folder of a quota that is used up": case(
        "disk", "failed", "cannot be written to", folders=(replace(FOLDER, is_writable=False),)
    ),
    "logs without room": case(
        "disk",
        "warning",
        "(logs) cannot be written to",
        folders=(replace(FOLDER, purpose="logs", is_writable=False, free_bytes=0),),
    ),
    "little room": case("disk", "warning", "1.0 GiB free", folders=(replace(FOLDER, free_bytes=GIB),)),
    "little locked memory": case(
        "limits", "warning", "memlock is 65,536", limits={**LIMITS, "memlock": LimitFacts(soft=65536, hard=65536)}
    ),
    "little locked memory on one node": case(
        "limits",
        "ok",
        "no limit",
        needs=replace(NEEDS, num_nodes=1),
        limits={**LIMITS, "memlock": LimitFacts(soft=65536, hard=65536)},
    ),
    "no tokenizer": case(
        "weights", "failed", "/models/m holds no tokenizer", weights=replace(WEIGHTS, lacks_tokenizer=True)
    ),
    "no tokenizer, beside weights that are cut short": case(
        "weights",
        "failed",
        "a.safetensors is empty",
        weights=replace(WEIGHTS, lacks_tokenizer=True, damaged=("a.safetensors is empty",)),
    ),
    "no tokenizer, and another is named": case(
        "weights",
        "ok",
        "4 files",
        needs=replace(NEEDS, has_own_tokenizer=True),
        weights=replace(WEIGHTS, lacks_tokenizer=True),
    ),
    "no tokenizer yet of a hub's model": case(
        "weights", "ok", "4 files", weights=replace(WEIGHTS, lacks_tokenizer=True, is_of_hub=True)
    ),
    "few files": case(
        "limits", "warning", "nofile is 1,024", limits={**LIMITS, "nofile": LimitFacts(soft=1024, hard=1024)}
    ),
    "few processes": case(
        "limits", "warning", "nproc is 512 (hard 1,024)", limits={**LIMITS, "nproc": LimitFacts(soft=512, hard=1024)}
    ),
    "too few processes for Ray": case(
        "limits",
        "failed",
        "nproc is 150 (ulimit -u), and you have 20 processes and threads there before the engine",
        limits={**LIMITS, "nproc": LimitFacts(soft=150, hard=150, used=20)},
    ),
    "as many, without Ray": case(
        "limits",
        "warning",
        "nproc is 150",
        needs=ON_CPUS,
        limits={**LIMITS, "nproc": LimitFacts(soft=150, hard=150, used=20)},
    ),
    "no processes left": case(
        "limits",
        "failed",
        "nproc is 4,096 (hard 8,192) (ulimit -u), and you have 4,050",
        needs=ON_CPUS,
        limits={**LIMITS, "nproc": LimitFacts(soft=4096, hard=8192, used=4050)},
    ),
    "a limited address space": case(
        "limits", "warning", "address space", limits={**LIMITS, "as": LimitFacts(soft=64 * GIB, hard=-1)}
    ),
    "few tasks left": case(
        "limits",
        "warning",
        "room for 900 of 1000 tasks",
        limits={**LIMITS, "tasks": LimitFacts(soft=1000, hard=1000, used=100)},
    ),
    "no tasks left": case(
        "limits",
        "failed",
        "room for 10 of 100 tasks",
        limits={**LIMITS, "tasks": LimitFacts(soft=100, hard=100, used=90)},
    ),
    "no command": case(
        "commands", "failed", "no command vllm and ray", software=replace(SOFTWARE, missing_commands=("vllm", "ray"))
    ),
    "an option of a later version": case(
        "commands", "failed", "vLLM 0.32.0 has no option --monokernel", needs=replace(NEEDS, engine_words=NEW_OPTION)
    ),
    "a version without data": case(
        "commands",
        "warning",
        "no data of vLLM 0.41.0: plan and options are those of 0.33.0, the nearest",
        needs=replace(NEEDS, engine_words=NEW_OPTION),
        software=replace(SOFTWARE, versions={**VERSIONS, "vllm": "0.41.0"}),
    ),
    "a long path": case(
        "paths",
        "failed",
        "116 characters, 107 are allowed",
        software=replace(SOFTWARE, socket_folder="/scratch/" + "x" * 70),
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


def test_a_later_version_has_its_options():
    software = replace(SOFTWARE, versions={**VERSIONS, "vllm": "0.33.0+cu130"})
    seen = judged("commands", replace(FACTS, software=software), replace(NEEDS, engine_words=NEW_OPTION))
    assert seen.level == "ok"


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
