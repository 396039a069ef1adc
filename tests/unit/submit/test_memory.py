"""A job asks for the memory of all that it keeps there: processes, offloaded weights and cache, files in tmpfs."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_serve.submit.plans.planning import plan_service
from hpc_serve.submit.request.options import JobSettings, SlurmOptions
from hpc_serve.submit.script.memory import memory_parts, small_memory_note
from hpc_serve.units import GIB
from hpc_serve.vllm.arguments import options
from tests.unit.submit.service_8b import request, script


def lines(start: str, **asked: Any) -> list[str]:
    """The lines of a script that begin so, without their beginning."""
    return [line.removeprefix(start) for line in script(**asked).splitlines() if line.startswith(start)]


def mem(**asked: Any) -> str:
    """The value of --mem in a script."""
    (found,) = lines("#SBATCH --mem=", **asked)
    return found


def files(*memory_folders: str, **settings: str) -> dict[str, Any]:
    return {"settings": JobSettings(**settings), "memory_folders": memory_folders}


OFFLOAD = '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 10737418240}}'
SIMPLE = '{"kv_connector": "SimpleCPUOffloadConnector"}'
PER_RANK = (
    '{"kv_connector": "SimpleCPUOffloadConnector", '
    '"kv_connector_extra_config": {"cpu_bytes_to_use": 1, "cpu_bytes_to_use_per_rank": 5368709120}}'
)
MULTI = f'{{"kv_connector": "MultiConnector", "kv_connector_extra_config": {{"connectors": [{OFFLOAD}, {SIMPLE}]}}}}'
SHM = {"HF_HOME": "/dev/shm/hf"}
TWO_GPUS = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}
TWO_NODES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "num_nodes": 2, "gpus_per_node": 1}
ENGINE = 16 + 16  # one GPU
MODEL = 15 + 1  # the weights, and the files beside them


def test_the_weights_of_the_model_of_these_tests():
    assert 14 * GIB < plan_service(request()).memory.weight_bytes < 15 * GIB


@pytest.mark.parametrize(
    ("asked", "engine_args", "gib"),
    [
        ({}, (), ENGINE),
        (files(stage="/dev/shm"), (), ENGINE + MODEL),
        (files(stage="/dev/shm/models"), (), ENGINE + MODEL),
        (files(stage="/local"), (), ENGINE),
        (files(stage="on"), (), ENGINE),
        (files("/tmp", stage="off"), (), ENGINE + 4),
        (files("/tmp", stage="on"), (), ENGINE + 4 + MODEL),
        (files("/tmp", stage="on", tmpdir="/local"), (), ENGINE),
        (files(cache_dir="/dev/shm/cache"), (), ENGINE + 4),
        (files("/ram", tmpdir="/ram/x"), (), ENGINE + 4),
        ({"env": SHM}, (), ENGINE + MODEL),
        ({"env": {"HF_HUB_CACHE": "/dev/shm/hub"}}, (), ENGINE + MODEL),
        ({"env": {"HF_HOME": "/scratch/hf"}}, (), ENGINE),
        ({"env": {"HF_HOME": "/ram/hf"}, "memory_folders": ("/ram",)}, (), ENGINE + MODEL),
        ({"hub_cache": "/dev/shm/hf/hub"}, (), ENGINE + MODEL),
        ({"env": SHM}, ("--load-format", "dummy"), ENGINE),
        ({"env": SHM}, ("--download-dir", "/scratch/hf"), ENGINE),
        ({}, ("--download-dir", "/dev/shm/hf"), ENGINE + MODEL),
        # vLLM makes 8 bits of 16-bit files: 8.5 GiB of weights on the GPU are twice as much in the files.
        ({"env": SHM}, ("--quantization", "fp8"), ENGINE + 17 + 1),
        # Two copies; the second may take half of what the first leaves, 16 of 32.
        ({"env": SHM, "settings": JobSettings(stage="/dev/shm")}, (), MODEL + MODEL + ENGINE),
        # torch rounds 13 GiB of layers up to 15 as it pins them: 10 * 15 / 13 = 11.54.
        ({}, ("--cpu-offload-gb", "10"), ENGINE + 12),
        # No more than the layers, 15 GiB as they are pinned and 0.0005 more. The files stay whole.
        ({"env": SHM}, ("--cpu-offload-gb", "100"), ENGINE + 16 + MODEL),
        # Each rank: 3 * 7.5 / 6.5 = 3.46.
        (TWO_GPUS, ("--cpu-offload-gb", "3"), 16 + 2 * 16 + 7),
        ({}, ("--kv-offloading-size", "64"), ENGINE + 64),
        (TWO_GPUS, ("--kv-offloading-size", "64"), 16 + 2 * 16 + 64),
        ({**TWO_NODES, "slurm": SlurmOptions(exclusive=False)}, ("--kv-offloading-size", "64"), ENGINE + 64 // 2),
        ({}, ("--kv-offloading-size", "64", "--kv-offloading-backend", "lmcache"), ENGINE),
        ({}, ("--kv-transfer-config", OFFLOAD), ENGINE + 10),
        ({}, ("--kv-transfer-config", SIMPLE), ENGINE + 8),
        (TWO_GPUS, ("--kv-transfer-config", PER_RANK), 16 + 2 * 16 + 2 * 5),
        ({}, ("--kv-transfer-config", MULTI), ENGINE + 10 + 8),
        ({}, ("--kv-transfer-config", OFFLOAD, "--kv-offloading-size", "64"), ENGINE + 64),
        ({"env": SHM, "replicas_per_job": 8}, ("--kv-offloading-size", "4"), 16 + 8 * 16 + 8 * 4 + MODEL),
        ({}, ("--api-server-count", "3"), ENGINE + 2 * 6),
        ({}, ("--api-server-count", "3", "--mm-processor-cache-gb", "5"), ENGINE + 2 * 6 + 4 * (5 - 4)),
        ({}, ("--mm-processor-cache-gb", "0"), ENGINE),
    ],
)
def test_all_that_a_job_keeps_in_memory_is_asked_for(asked, engine_args, gib):
    assert mem(**asked, engine_args=engine_args) == f"{gib}G"


def test_each_data_parallel_rank_has_an_offloaded_cache_of_its_own():
    ranks = ("--data-parallel-size", "2", "--tensor-parallel-size", "2", "--enable-expert-parallel")
    asked = request(model="gpt-oss-120b", engine_args=(*ranks, "--kv-offloading-size", "64"))
    parts = memory_parts(asked, plan_service(asked))
    assert parts == {"engine processes": 16 + 4 * 16, "cache outside the GPUs (KV offload)": 2 * 64}


def test_the_pinned_vllm_has_the_options_that_are_counted():
    named = {"--cpu-offload-gb", "--kv-offloading-size", "--kv-offloading-backend", "--kv-transfer-config"}
    named |= {"--api-server-count", "--mm-processor-cache-gb", "--download-dir"}
    assert named <= options().keys()
    assert "--swap-space" not in options()


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({}, None),
        ({"env": SHM}, "48 GiB of each node = 32 for engine processes + 16 for the model in /dev/shm/hf/hub"),
        ({"env": SHM, "slurm": SlurmOptions(mem="64G")}, None),
        ({"env": SHM, "slurm": SlurmOptions(exclusive=True)}, None),
    ],
)
def test_the_script_says_where_the_figure_comes_from(asked, line):
    assert lines("# --mem: ", **asked) == ([line] if line else [])


@pytest.mark.parametrize(
    ("mem_asked", "is_warned"),
    [
        *(("15G", True), ("16383", True), ("16000000K", True)),
        *(("16G", False), ("16384M", False), ("1T", False), ("0", False)),
    ],
)
def test_a_mem_below_what_the_job_keeps_is_warned_of(mem_asked, is_warned):
    asked = request(env=SHM, slurm=SlurmOptions(mem=mem_asked))
    note = small_memory_note(asked, plan_service(asked))
    assert (note is not None) == is_warned
    if note:
        assert f"--mem {mem_asked} is " in note
        assert "keeps 16 GiB" in note
        assert "16 for the model in /dev/shm/hf/hub" in note
        assert "ask for --mem 48G" in note


@pytest.mark.parametrize("mem_asked", ["20G", "0"])
def test_what_a_person_asks_for_wins(mem_asked):
    assert mem(slurm=SlurmOptions(mem=mem_asked), settings=JobSettings(stage="/dev/shm")) == mem_asked
