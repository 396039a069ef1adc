"""Each check of one node, over facts of a healthy node with a few things changed. The facts are stand-ins."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hpc_serve.job.preflight.checks
from hpc_serve.job.preflight import checks
from hpc_serve.job.preflight.facts import CudaFacts, FolderFacts, GpusFacts, LimitFacts, findings
from hpc_serve.job.preflight.judge import CHECKS, judge
from hpc_serve.units import GIB, MIB
from tests.unit.job.preflight.nodes import CUDA, DEVICE, FACTS, FOLDER, GPU, NEEDS, VERSIONS, WEIGHTS, changed_run

FULL = replace(DEVICE, free_bytes=40 * GIB)
VOLTA = replace(DEVICE, name="Tesla V100", capability="7.0")
BLACKWELL = replace(DEVICE, name="NVIDIA B200", capability="10.0")
BROKEN = replace(DEVICE, error="CUDA_ERROR_SYSTEM_NOT_READY")
HUB = replace(WEIGHTS, source="acme/m", is_of_hub=True, folder="", missing="none of its weights")
ON_CPUS = replace(NEEDS, gpus=0, num_nodes=1, world_size=1, backend="mp")
SCRATCH = replace(FOLDER, purpose=checks.STAGED, path="/scratch/c", is_writable=True, free_bytes=100 * GIB)
IN_MEMORY = replace(FOLDER, purpose=checks.STAGED, path="/dev/shm/s", is_in_memory=True)
CACHES_IN_MEMORY = replace(IN_MEMORY, purpose=checks.CACHES, path="/tmp/c")
LITTLE_SHM = {"memory.shm_bytes": 64 * MIB, "memory.shm_free_bytes": 64 * MIB}
NEW_OPTION = {"needs.engine_words": ("--monokernel", "--seed", "1")}
NAMED_2 = GpusFacts(tool="", visible="0, 1")
ON_VOLTA = {"gpus.cuda.devices": (VOLTA,)}
GATED = replace(HUB, hub_status=401, hub_error="GatedRepo")
NO_LIMIT = {"memory.limit_bytes": None, "needs.memory_bytes": None}
FULL_CACHES = replace(FOLDER, purpose="caches", free_bytes=1000)
UNKNOWN_VLLM = {**NEW_OPTION, "software.versions": {"vllm": "0.41.0"}}
NODE_CHECKS = [(name, group) for name, group, scope, _ in CHECKS if scope == "node"]


def limits(name: str, soft: int, hard: int | None = None, used: int | None = None) -> dict[str, LimitFacts]:
    return {f"limits.{name}": LimitFacts(soft=soft, hard=soft if hard is None else hard, used=used)}


def staged(gib: int, *folders: FolderFacts) -> dict[str, Any]:
    return {"folders": folders, "needs.staged_bytes": gib * GIB}


def judged(check, changes):
    """Return the verdict of one check on a healthy node with these changes, of its facts or of the run's needs."""
    facts, needs = changed_run(FACTS, changes)
    (verdict,) = (one for one in judge({"n1": facts}, needs) if one.check == check)
    return verdict


@pytest.mark.parametrize("check", [name for name, _ in NODE_CHECKS])
def test_a_healthy_node_passes(check):
    seen = judged(check, {})
    assert (seen.level, seen.cure) == ("ok", ""), seen


@pytest.mark.parametrize(("name", "group"), NODE_CHECKS)
def test_what_was_not_gathered_is_not_checked(name, group):
    assert judged(name, {group: None}).level == "not checked"
    problems = {group: "no answer within 20 s"}
    assert judged(name, {group: None, "problems": problems}).seen == "no answer within 20 s"


CASES: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "gpus": [
        ("failed", "shows 7 GPUs", {"gpus.cuda.devices": (DEVICE,) * 7}),
        ("ok", "9 GPUs", {"gpus.cuda.devices": (DEVICE,) * 9}),
        ("failed", "set and empty", {"gpus.cuda": None, "gpus.visible": "", "gpus.gpus": ()}),
        ("failed", "VISIBLE_DEVICES=0, 1 names 2 of the GPUs, the engine needs 8", {"gpus": NAMED_2}),
        ("not checked", "there is no nvidia-smi", {"gpus": GpusFacts(tool="", visible="0,1,2,3,4,5,6,7")}),
        ("warning", "lists 7 GPUs", {"gpus.cuda": None, "gpus.gpus": (GPU,) * 7}),
        ("warning", "says: no driver", {"gpus": GpusFacts(tool="nvidia-smi", error="no driver")}),
        ("not checked", "nvidia-smi", {"gpus": GpusFacts(tool="")}),
        ("not checked", "MIG-1", {"gpus.cuda": None, "gpus.visible": "MIG-1", "gpus.gpus": None}),
        ("not checked", "needs no GPUs", {"needs": ON_CPUS}),
        ("ok", "", {"gpus.cuda": CudaFacts(error="CUDA_ERROR_NO_DEVICE")}),
    ],
    "gpus-working": [
        ("failed", "GPU 0 (NVIDIA H100 80GB HBM3): CUDA says CUDA_ERROR_SYSTEM_NOT_", {"gpus.cuda.devices": (BROKEN,)}),
        ("failed", "no library libcuda", {"gpus.cuda": CudaFacts(error="no library libcuda")}),
        ("warning", "no library", {"gpus.cuda": CudaFacts(error="no library"), "software.torch_cuda": ""}),
        ("warning", "error 1234", {"gpus.cuda.devices": (replace(DEVICE, error="error 1234"),)}),
        ("warning", "3 uncorrected memory errors", {"gpus.gpus": (replace(GPU, uncorrected_errors=3),)}),
        ("failed", "NO_DEVICE", {"gpus.cuda": CudaFacts(error="CUDA_ERROR_NO_DEVICE")}),
    ],
    "gpus-free": [
        ("failed", "40.0 of 79.0 GiB free", {"gpus.cuda.devices": (FULL,)}),
        ("warning", "40.0 of 79.0", {"gpus.cuda.devices": (FULL,), "needs.sets_cache_bytes": True}),
        ("ok", "78.0", {"gpus.cuda.devices": (*CUDA.devices, FULL)}),
        ("not checked", "", {"gpus.cuda": CudaFacts(error="CUDA_ERROR_NO_DEVICE")}),
    ],
    "driver": [
        ("failed", "supports CUDA 11.8", {"gpus.cuda.cuda_version": 11080}),
        ("warning", "CUDA 12.2", {"gpus.cuda.cuda_version": 12020}),
        ("ok", "CUDA 13.0", {"gpus.cuda.cuda_version": 13000}),
        ("not checked", "no torch built for CUDA", {"software.torch_cuda": ""}),
    ],
    "capability": [
        ("failed", "Tesla V100 has compute capability 7.0", {**ON_VOLTA, "software.torch_cuda": "13.0"}),
        ("ok", "7.0", ON_VOLTA),
        ("failed", "--dtype bfloat16 needs 8.0", {**ON_VOLTA, "needs.dtype": "bfloat16"}),
        ("warning", "known to CUDA 12.8", {"gpus.cuda.devices": (BLACKWELL,), "software.torch_cuda": "12.6"}),
    ],
    "weights": [
        ("failed", "/models/m: no such folder", {"weights.error": "no such folder on this node"}),
        ("failed", "only 3 of its 4", {"weights.missing": "only 3 of its 4 files of weights (b missing)"}),
        ("failed", "has 10 of its 20 bytes", {"weights.damaged": ("a.safetensors has 10 of its 20 bytes",)}),
        ("ok", "random", {"weights.missing": "none", "needs.load_format": "dummy"}),
        ("not checked", "tensorizer", {"weights.missing": "none", "needs.load_format": "tensorizer"}),
        ("failed", "/models/m holds no tokenizer", {"weights.lacks_tokenizer": True}),
        ("failed", "a is empty", {"weights.lacks_tokenizer": True, "weights.damaged": ("a is empty",)}),
        ("ok", "4 files", {"weights.lacks_tokenizer": True, "needs.has_own_tokenizer": True}),
        ("ok", "4 files", {"weights.lacks_tokenizer": True, "weights.is_of_hub": True}),
        ("failed", "HF_HUB_OFFLINE", {"weights": replace(HUB, is_offline=True)}),
        ("warning", "only 3 of 4", {"weights": replace(HUB, is_offline=True, folder="/hf/m", missing="only 3 of 4")}),
        ("failed", "there is no token", {"weights": GATED}),
        ("failed", "your token may not", {"weights": replace(GATED, has_token=True)}),
        ("failed", "RepoNotFound", {"weights": replace(HUB, hub_status=401, hub_error="RepoNotFound")}),
        ("warning", "fetches them first", {"weights": replace(HUB, hub_status=403)}),  # a proxy that refuses
        ("warning", "fetches them first", {"weights": replace(HUB, hub_status=404, hub_error="EntryNotFound")}),
        ("warning", "does not answer", {"weights": replace(HUB, hub_status=0)}),
        ("warning", "fetches them first", {"weights": replace(HUB, hub_status=302)}),
    ],
    "memory": [
        ("warning", "cgroup allows 64.0 GiB, Slurm says that this job has 512.0", {"memory.limit_bytes": 64 * GIB}),
        ("failed", "--cpu-offload-gb keeps 800.0 GiB", {"needs.offload_bytes": 100 * GIB}),
        ("warning", "the node has 8.0 GiB for 8 ranks", {**NO_LIMIT, "memory.total_bytes": 8 * GIB}),
        ("failed", "512.0 GiB, and the copy of the model takes 600.0 GiB of it", staged(600, IN_MEMORY)),
        ("ok", "", staged(600, SCRATCH)),  # a copy on a disk
        (
            "warning",
            "521 are needed, 505 of them for files in memory (/dev/shm, /tmp/c)",
            staged(500, IN_MEMORY, CACHES_IN_MEMORY),
        ),
    ],
    "shm": [
        ("failed", "not writable", {"memory.shm_is_writable": False}),
        ("failed", "0.0 of 64 MiB free", {**LITTLE_SHM, "memory.shm_free_bytes": 0}),
        ("warning", "ranks of one node share memory", LITTLE_SHM),
        ("ok", "GiB free", {**LITTLE_SHM, "needs": ON_CPUS}),
    ],
    "staging": [
        ("failed", "140.0 GiB of the model are copied to /scratch/c, which has 100.0 GiB free", staged(140, SCRATCH)),
        ("ok", "", staged(140, replace(SCRATCH, free_bytes=141 * GIB))),
        ("ok", "another run on this node has copied", staged(140)),
    ],
    "disk": [
        ("failed", "(caches) has 0.0 MiB free", {"folders": (FOLDER, FULL_CACHES)}),
        ("failed", "no file free", {"folders": (replace(FOLDER, free_files=0),)}),
        ("failed", "cannot be written to", {"folders": (replace(FOLDER, is_writable=False),)}),
        ("warning", "(logs) cannot be written to", {"folders": (replace(FOLDER, purpose="logs", is_writable=False),)}),
        ("warning", "1.0 GiB free", {"folders": (replace(FOLDER, free_bytes=GIB),)}),
    ],
    "limits": [
        ("warning", "memlock is 65,536", limits("memlock", 65536)),
        ("ok", "no limit", {**limits("memlock", 65536), "needs.num_nodes": 1}),
        ("warning", "nofile is 1,024", limits("nofile", 1024)),
        ("warning", "nproc is 512 (hard 1,024)", limits("nproc", 512, 1024)),
        (
            "failed",
            "150 (ulimit -u), and you have 20 processes and threads there before the engine",
            limits("nproc", 150, used=20),
        ),
        ("warning", "nproc is 150", {**limits("nproc", 150, used=20), "needs": ON_CPUS}),
        (
            "failed",
            "(hard 8,192) (ulimit -u), and you have 4,050",
            {**limits("nproc", 4096, 8192, used=4050), "needs": ON_CPUS},
        ),
        ("warning", "address space", limits("as", 64 * GIB, -1)),
        ("warning", "room for 900 of 1000 tasks", limits("tasks", 1000, used=100)),
        ("failed", "room for 10 of 100 tasks", limits("tasks", 100, used=90)),
    ],
    "commands": [
        ("ok", ", ".join(f"{name} {version}" for name, version in VERSIONS.items()), {}),
        ("failed", "no command vllm and ray", {"software.missing_commands": ("vllm", "ray")}),
        ("failed", "vLLM 0.32.0 has no option --monokernel", NEW_OPTION),
        ("ok", "", {**NEW_OPTION, "software.versions": {**VERSIONS, "vllm": "0.33.0+cu130"}}),
        ("warning", "no data of vLLM 0.41.0: plan and options are those of 0.33.0, the nearest", UNKNOWN_VLLM),
    ],
    "paths": [
        ("failed", "116 characters, 107 are allowed", {"software.socket_folder": "/scratch/" + "x" * 70}),
    ],
}


@pytest.mark.parametrize(
    ("check", "level", "words", "changes"), [(check, *case) for check, cases in CASES.items() for case in cases]
)
def test_a_check_names_what_it_saw_and_what_to_do(check, level, words, changes):
    seen = judged(check, changes)
    assert seen.level == level, seen
    assert words in seen.seen
    assert not seen.seen.endswith(".")
    assert bool(seen.cure) == (level in ("warning", "failed"))
    assert not seen.cure or seen.cure.endswith((".", ")"))


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
