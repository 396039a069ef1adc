"""Options of vLLM that load something beside a model, or leave a part out: counted, refused, or said by name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from hpc_serve.cli.main import run
from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan import (
    EngineConfig,
    MemoryEstimate,
    ModelSpec,
    accelerator,
    estimate_memory,
    model_from_config,
    resolve,
)
from hpc_serve.plan.memory.loaded import loaded_model, option_notes
from hpc_serve.sizes import GIB


def spec(name: str) -> ModelSpec:
    return model_from_config(resolve(name).config, name=name)


def estimate(name: str, tensor: int = 1, pipeline: int = 1, **options: Any) -> MemoryEstimate:
    engine = EngineConfig(**options)
    return estimate_memory(
        loaded_model(spec(name), engine),
        accelerator("h200-141gb"),
        engine,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        max_model_len=8192,
    )


def slots_bytes(tensor: int, **options: Any) -> int:
    """What LoRA adds to the loading of Llama 3.1 8B."""
    plain = estimate("8b", tensor)
    return estimate("8b", tensor, enable_lora=True, **options).model_loading_bytes - plain.model_loading_bytes


def test_lora_slots_are_those_of_vllms_layers() -> None:
    """By hand for Llama 3.1 8B: (in + out) x rank of q, k, v, o, gate, up and down, 32 layers; and the ends."""
    hidden, inner, kv, vocabulary = 4096, 14336, 1024, 128256
    features = (hidden + hidden) + 2 * (hidden + kv) + (hidden + hidden) + 2 * (hidden + inner) + (inner + hidden)
    assert slots_bytes(1) == (32 * features + 2 * (vocabulary + hidden)) * 16 * 2
    assert slots_bytes(1, max_loras=4, max_lora_rank=64) == pytest.approx(16 * slots_bytes(1), rel=0.02)
    assert slots_bytes(1, lora_target_modules=("q_proj", "o_proj")) < slots_bytes(1)
    assert slots_bytes(1, lora_target_modules=("down_proj",)) == 32 * (inner + hidden) * 16 * 2


def test_tensor_parallelism_divides_one_half_of_an_adapter_or_both() -> None:
    half, sharded = slots_bytes(8), slots_bytes(8, fully_sharded_loras=True)
    assert slots_bytes(1) / 8 <= sharded < half < slots_bytes(1)


def test_adapters_of_experts_are_as_many_as_experts() -> None:
    name = "Qwen/Qwen3-30B-A3B"
    plain, adapted = estimate(name), estimate(name, enable_lora=True)
    per_layer = 128 * (2 * (2048 + 768) + (768 + 2048)) * 16 * 2
    assert adapted.model_loading_bytes - plain.model_loading_bytes > 48 * per_layer
    assert adapted.cuda_graph_bytes == 2 * plain.cuda_graph_bytes


def test_offloaded_weights_are_room_for_the_cache_and_take_time(capsys: pytest.CaptureFixture[str]) -> None:
    plain, offloaded = estimate("8b"), estimate("8b", cpu_offload_gb=4)
    assert plain.weight_bytes - offloaded.weight_bytes == 4 * GIB
    assert offloaded.kv_cache_bytes - plain.kv_cache_bytes == 4 * GIB
    everything = estimate("8b", cpu_offload_gb=1000)
    assert everything.weight_bytes == pytest.approx(2 * 2 * 128256 * 4096, rel=1e-3)  # embedding and head stay

    def tpot(*words: str) -> float:
        found = planned(capsys, "8b", *words)["performance"]["by_concurrency"][0]["expected"]["tpot_s"]
        assert isinstance(found, float)
        return found

    assert tpot("--", "--cpu-offload-gb", "8") > 10 * tpot()


def test_prediction_layers_are_weights_and_cache_on_the_last_stage() -> None:
    name, speculation = "zai-org/GLM-4.6", {"method": "mtp", "num_speculative_tokens": 1}
    model = spec(name)
    plain, drafting = estimate(name, 8), estimate(name, 8, speculative_config=speculation)
    assert drafting.kv_bytes_per_token * model.num_hidden_layers == plain.kv_bytes_per_token * (
        model.num_hidden_layers + 1
    )
    added = drafting.weight_bytes - plain.weight_bytes
    assert added == pytest.approx(2 * (model.layers[-1].block.parameters / 8 + 2 * model.hidden_size**2), rel=0.02)
    with pytest.raises(InvalidRequestError, match="has none"):
        loaded_model(spec("8b"), EngineConfig(speculative_config=speculation))


def test_a_tower_without_input_is_not_loaded() -> None:
    model = spec("gemma-3-27b")
    assert model.images
    for options in ({"limit_mm_per_prompt": {"image": 0}}, {"language_model_only": True}):
        text = loaded_model(model, EngineConfig(**options))
        assert (text.images, text.everywhere.parameters) == (None, 0)
    for limit in ({"image": 2}, {"image": {"count": 1, "width": 512}}, {"audio": 0}):
        assert loaded_model(model, EngineConfig(limit_mm_per_prompt=limit)) == model


def test_without_prefix_caching_hybrids_hold_one_state_a_request() -> None:
    name = "Qwen/Qwen3-Next-80B-A3B-Instruct"
    plain, without = estimate(name, 4), estimate(name, 4, enable_prefix_caching=False)
    assert without.blocks_per_request < plain.blocks_per_request
    assert estimate("8b", enable_prefix_caching=False) == estimate("8b")
    drafting = estimate(name, 4, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert drafting.blocks_per_request > plain.blocks_per_request


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"speculative_config": {"method": "eagle3", "model": "some/draft"}}, "Not counted: .* draft model some/draft"),
        ({"speculative_config": {"model": "some/draft", "num_speculative_tokens": 3}}, "Not counted: weights"),
        ({"speculative_config": {"method": "ngram", "prompt_lookup_max": 4}}, "ngram loads no weights"),
        ({"kv_transfer_config": {"kv_connector": "NixlConnector"}}, "Not counted: .*--kv-transfer-config"),
        ({"kv_offloading_size": 32.0}, "Not counted: .*--kv-offloading-size"),
        ({"enable_lora": True, "max_loras": 2}, "2 slots of rank 16 counted"),
        ({"cpu_offload_gb": 4.0}, "stay in the node's memory"),
    ],
)
def test_what_is_counted_in_part_or_not_at_all_is_said(options: dict[str, Any], says: str) -> None:
    (note,) = option_notes(spec("8b"), EngineConfig(**options))
    assert re.search(says, note)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(["plan", "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_what_stands_after_the_dashes_is_in_the_plan_and_in_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "32", "--no-enable-prefix-caching"]
    words += ["--limit-mm-per-prompt", '{"image": 0}', "--lora-target-modules", "q_proj", "k_proj"]
    found = planned(capsys, "gemma-3-27b", "--max-model-len", "8192", "--", *words)
    assert set(words) <= set(found["vllm_args"])
    assert any("2 slots of rank 32" in reason for reason in found["reasons"])
    again = planned(capsys, "gemma-3-27b", "--", *found["vllm_args"])
    assert again["memory"] == found["memory"]


def test_data_parallelism_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "8b", "--", "--data-parallel-size", "2"]) == 2
    assert "hpc-serve plans no data parallelism yet" in " ".join(capsys.readouterr().err.split())
