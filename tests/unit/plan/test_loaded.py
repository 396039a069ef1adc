"""Options of vLLM that load something beside a model, or leave a part out: counted, refused, or said by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan import EngineConfig, MemoryEstimate, model_from_config, resolve
from hpc_serve.plan.choice.advice import plan_notes
from hpc_serve.plan.memory.loaded import loaded_model
from hpc_serve.plan.model.architectures import draft_from_config
from hpc_serve.units import GIB
from tests.support.configs import config_of
from tests.support.plans import estimate as estimate_on
from tests.support.plans import spec


def estimate(name: str, tp: int = 1, pp: int = 1, **options: Any) -> MemoryEstimate:
    return estimate_on(name, "h200-141gb", tp=tp, pp=pp, **options)


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
    fused = 32 * ((hidden + hidden) + 2 * (hidden + kv)) * 16 * 2
    assert [slots_bytes(1, lora_target_modules=(part,)) for part in ("q_proj", "k_proj", "qkv_proj")] == [fused] * 3


def test_tensor_parallelism_divides_one_half_of_an_adapter_or_both() -> None:
    half, sharded = slots_bytes(8), slots_bytes(8, fully_sharded_loras=True)
    assert slots_bytes(1) / 8 <= sharded < half < slots_bytes(1)


def test_adapters_of_experts_are_as_many_as_experts() -> None:
    name = "Qwen/Qwen3-30B-A3B"
    plain, adapted = estimate(name), estimate(name, enable_lora=True)
    per_layer = 128 * (2 * (2048 + 768) + (768 + 2048)) * 16 * 2
    assert adapted.model_loading_bytes - plain.model_loading_bytes > 48 * per_layer
    assert adapted.cuda_graph_bytes == 2 * plain.cuda_graph_bytes


def test_offloaded_weights_are_room_for_the_cache_and_take_time(plan_json) -> None:
    plain, offloaded = estimate("8b"), estimate("8b", cpu_offload_gb=4)
    assert plain.weight_bytes - offloaded.weight_bytes == 4 * GIB
    assert offloaded.kv_cache_bytes - plain.kv_cache_bytes == 4 * GIB
    everything = estimate("8b", cpu_offload_gb=1000)
    assert everything.weight_bytes == pytest.approx(2 * 2 * 128256 * 4096, rel=1e-3)  # embedding and head stay

    def tpot(*words: str) -> float:
        found = plan_json("8b", *words)["performance"]["by_concurrency"][0]["expected"]["tpot_s"]
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


@pytest.mark.parametrize("name", ["Qwen/Qwen3.8-27B", "Qwen/Qwen3-Next-80B-A3B-Instruct"])
def test_models_whose_config_counts_no_prediction_layers_have_one(name: str) -> None:
    """As vLLM takes it: `num_mtp_layers` in its models/qwen3_5_mtp.py and qwen3_next_mtp.py."""
    speculation = {"method": "mtp", "num_speculative_tokens": 1}
    config = {key: value for key, value in resolve(name).config.items() if "mtp" not in key}
    if "text_config" in config:
        config["text_config"] = {key: value for key, value in config["text_config"].items() if "mtp" not in key}
    silent = model_from_config(config, name=name)
    assert silent.prediction_layers == 0
    drafting = loaded_model(silent, EngineConfig(speculative_config=speculation))
    assert (drafting.draft_layers, len(drafting.layers)) == (1, len(silent.layers) + 1)
    assert loaded_model(spec(name), EngineConfig(speculative_config=speculation)).draft_layers == 1


BALANCED: dict[str, Any] = {"enable_eplb": True, "enable_expert_parallel": True}


def test_redundant_experts_are_weights_of_each_layer_and_a_buffer_of_one() -> None:
    name, redundant = "Qwen/Qwen3-30B-A3B", {"num_redundant_experts": 16}
    plain = estimate(name, 4, enable_expert_parallel=True)
    balanced = estimate(name, 4, **BALANCED)
    more = estimate(name, 4, **BALANCED, eplb_config=redundant)
    expert = 3 * 2048 * 768 * 2
    assert balanced.weight_bytes == plain.weight_bytes
    assert balanced.model_loading_bytes - plain.model_loading_bytes == 128 // 4 * expert
    assert more.weight_bytes - plain.weight_bytes == 48 * 16 // 4 * expert
    assert spec(name).active_parameters == loaded_model(spec(name), EngineConfig(**BALANCED)).active_parameters


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("Qwen/Qwen3-30B-A3B", {"enable_eplb": True}, "without --enable-expert-parallel: add it"),
        ("Qwen/Qwen3-30B-A3B", {"eplb_config": {"num_redundant_experts": 2}}, "without --enable-eplb: add it"),
        ("8b", BALANCED, "has no experts: leave out --enable-eplb"),
    ],
)
def test_experts_that_vllm_does_not_balance_are_refused(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        loaded_model(spec(name), EngineConfig(**options))
    with pytest.raises(DoesNotFitError, match="EPLB requires tensor or data parallelism"):
        estimate("Qwen/Qwen3-30B-A3B", 1, **BALANCED)


def test_a_pooling_model_has_no_output_head_and_samples_nothing() -> None:
    plain, pooling = estimate("8b"), estimate("8b", runner="pooling")
    assert plain.weight_bytes - pooling.weight_bytes == 128256 * 4096 * 2
    assert pooling.cuda_graph_bytes < plain.cuda_graph_bytes
    many: dict[str, Any] = {"max_num_batched_tokens": 2048, "vllm_version": "0.23.0"}
    assert estimate("8b", runner="pooling", **many).activation_bytes < estimate("8b", **many).activation_bytes / 2


def test_the_type_of_states_is_the_one_asked_for() -> None:
    name = "Qwen/Qwen3.5-27B"
    blocks = {kind: estimate(name, mamba_ssm_cache_dtype=kind).block_size for kind in ("auto", "float32", "bfloat16")}
    assert blocks["auto"] == blocks["float32"] > blocks["bfloat16"]
    assert estimate("8b", mamba_ssm_cache_dtype="bfloat16") == estimate("8b")


def test_without_the_hybrid_manager_windows_are_cached_as_a_whole() -> None:
    steps: dict[str, Any] = {"max_num_batched_tokens": 512}
    plain = estimate("gemma-3-27b", **steps)
    whole = estimate("gemma-3-27b", disable_hybrid_kv_cache_manager=True, **steps)
    assert whole.kv_cache_tokens < plain.kv_cache_tokens
    assert whole.kv_cache_tokens == whole.num_blocks * 16


EAGLE_HEAD = config_of("eagle-head")


def test_a_draft_model_is_weights_and_cache_on_the_last_stage() -> None:
    draft = spec("meta-llama/Llama-3.2-1B-Instruct")
    plain, both = estimate("8b"), estimate("8b", draft=draft)
    assert both.weight_bytes - plain.weight_bytes == draft.weight_bytes
    assert both.kv_bytes_per_token - plain.kv_bytes_per_token == 16 * 2 * 8 * 64 * 2
    assert estimate("8b", 4, draft=draft).weight_bytes < both.weight_bytes / 3
    assert estimate("8b", 1, 2, draft=draft).weight_bytes > estimate("8b", 1, 2).weight_bytes + 0.9 * draft.weight_bytes
    with pytest.raises(InvalidRequestError, match=r"vocabulary of 151,936, and \S+ one of 128,256\. vLLM refuses"):
        loaded_model(spec("8b"), EngineConfig(), spec("Qwen/Qwen3-0.6B"))


def test_a_head_of_eagle_shares_the_embedding() -> None:
    """By hand, for vLLM's llama_eagle.py and llama_eagle3.py."""
    hidden, inner, kv = 4096, 14336, 1024
    mlp, output = 3 * hidden * inner, hidden * hidden
    first = hidden * (hidden + 2 * kv) + output + mlp + 2 * hidden * hidden + hidden + hidden
    third = 2 * hidden * (hidden + 2 * kv) + output + mlp + 3 * hidden * hidden + 3 * hidden + hidden
    plain = estimate("8b")
    for method, words, parameters in (("eagle", {}, first), ("eagle3", {"draft_vocab_size": 32_000}, third)):
        head = draft_from_config({**EAGLE_HEAD, **words}, name="head", method=method)
        parameters += 32_000 * hidden if words else 0
        with_head = estimate("8b", draft=head)
        assert with_head.weight_bytes - plain.weight_bytes == 2 * parameters
        assert with_head.kv_bytes_per_token - plain.kv_bytes_per_token == 2 * kv * 2
    of_qwen = {"decoder_sparse_step": 1, "max_window_layers": 36, "sliding_window": 32768, "norm_output": True}
    head = draft_from_config({**EAGLE_HEAD, **of_qwen, "fc_norm": True}, name="head", method="eagle3")
    assert estimate("8b", draft=head).weight_bytes - plain.weight_bytes == 2 * (
        third + 3 * hidden + head.vocab_size * hidden
    )
    other = draft_from_config({**EAGLE_HEAD, "hidden_size": 2048}, name="head", method="eagle3")
    with pytest.raises(InvalidRequestError, match=r"head is for hidden states of 2,048, and \S+ has 4,096"):
        loaded_model(spec("8b"), EngineConfig(), other)
    with pytest.raises(InvalidRequestError, match="architecture Eagle3GemmaForCausalLM, and this planner does not"):
        draft_from_config({**EAGLE_HEAD, "architectures": ["GemmaForCausalLM"]}, name="head", method="eagle3")


def test_a_draft_model_is_found_by_its_name(plan_json, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**EAGLE_HEAD, "draft_vocab_size": 32_000}))
    plain = plan_json("8b")["memory"]["weight_bytes"]
    for method, draft, least in (("draft_model", "meta-llama/Llama-3.2-1B", 2.4e9), ("eagle3", str(tmp_path), 0.8e9)):
        config = json.dumps({"method": method, "model": draft, "num_speculative_tokens": 3})
        found = plan_json("8b", "--", "--speculative-config", config)
        assert least < found["memory"]["weight_bytes"] - plain < 1.2 * least
        assert any(f"of the draft model {draft} are counted" in reason for reason in found["reasons"])


def test_a_draft_models_folder_that_is_not_there_is_an_error(refused) -> None:
    config = json.dumps({"method": "eagle3", "model": "./nosuch", "num_speculative_tokens": 3})
    assert "There is no folder or file './nosuch'" in refused("8b", "--", "--speculative-config", config)


def test_a_tower_without_input_is_not_loaded() -> None:
    model = spec("gemma-3-27b")
    assert model.images
    for options in ({"limit_mm_per_prompt": {"image": 0}}, {"language_model_only": True}):
        text = loaded_model(model, EngineConfig(**options))
        assert (text.images, text.everywhere.parameters) == (None, 0)
    for limit in ({"image": 2}, {"image": {"count": 1, "width": 512}}, {"audio": 0}):
        assert loaded_model(model, EngineConfig(limit_mm_per_prompt=limit)) == model


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
        ({"runner": "pooling"}, "neither an output head nor sampling is counted"),
    ],
)
def test_what_is_counted_in_part_or_not_at_all_is_said(options: dict[str, Any], says: str) -> None:
    (note,) = plan_notes(spec("8b"), EngineConfig(**options), on_cpus=False)
    assert re.search(says, note)


def test_what_stands_after_the_dashes_is_in_the_plan_and_in_the_command(plan_json) -> None:
    words = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "32", "--no-enable-prefix-caching"]
    words += ["--limit-mm-per-prompt", '{"image": 0}', "--lora-target-modules", "q_proj", "k_proj"]
    found = plan_json("gemma-3-27b", "--max-model-len", "8192", "--", *words)
    assert set(words) <= set(found["vllm_args"])
    assert any("2 slots of rank 32" in reason for reason in found["reasons"])
    again = plan_json("gemma-3-27b", "--", *found["vllm_args"])
    assert again["memory"] == found["memory"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("8b", ("--enable-lora", "--max-loras", "4", "--max-lora-rank", "64")),
        ("8b", ("--cpu-offload-gb", "4")),
        ("8b", ("--limit-mm-per-prompt", '{"image": 0}')),
        ("8b", ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')),
        ("gpt-oss-120b", ("--data-parallel-size", "4", "--enable-expert-parallel")),
    ],
)
def test_a_plans_own_options_are_the_words_after_the_dashes(model, words, plan_json) -> None:
    plain = plan_json(model, *words)
    assert plain == plan_json(model, "--", *words)
    assert plain != plan_json(model)


def test_overrides_of_the_config_are_applied(plan_json, refused, ran) -> None:
    """Qwen2.5's card gives these words for contexts beyond 32,768 tokens."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    overrides = json.dumps({"rope_parameters": scaling, "max_position_embeddings": 131072})
    words = ["Qwen/Qwen2.5-7B-Instruct", "--max-model-len", "131072"]
    assert "has at most 32768 positions" in refused(*words)
    found = plan_json(*words, "--", "--hf-overrides", overrides)
    assert found["max_model_len"] == 131072
    assert overrides in found["vllm_args"]
    script = ran(["render", "--model", *words, "--", "--hf-overrides", overrides]).out
    assert f"--hf-overrides '{overrides}'" in script


def test_words_after_the_dashes_come_last(plan_json) -> None:
    both = plan_json("8b", "--enable-lora", "--max-loras", "4", "--", "--max-loras", "8")
    assert both == plan_json("8b", "--enable-lora", "--max-loras", "8")


def test_data_parallelism_of_a_dense_model_is_replicas(refused) -> None:
    assert "ask for --replicas" in refused("8b", "--", "--data-parallel-size", "2")
