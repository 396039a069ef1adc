"""No size in a config is passed over: each key is read, known to change nothing, or refused by its name.

config_key_effects.json has, for each architecture that transformers can build, its default config, its parameters, and
the parameters after a change of each key. `python -m tests.support.config_keys` writes it.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.accuracy import published_configs
from benchmarks.accuracy.memory_cases import load_cases, load_later_cases
from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan import EngineConfig, model_from_config, resolve
from hpc_serve.plan.catalog import architectures, models
from tests.support.config_keys import NOT_MEASURED
from tests.support.configs import EXCEPTIONS, MEASURED, built, config_of, made, with_value
from tests.support.plans import made_plan

PUBLISHED = published_configs()


def test_every_family_was_measured_or_is_not_in_transformers() -> None:
    whole = {name for name, about in architectures().items() if not about.get("is_draft_head")}
    assert set(MEASURED) == whole - set(EXCEPTIONS["not_in_transformers"]) - set(NOT_MEASURED)


@pytest.mark.parametrize("name", MEASURED)
def test_default_configs_of_transformers_are_known_and_counted_alike(name: str) -> None:
    measured = MEASURED[name]
    assert built(measured["config"]).parameters == measured["parameters"] + EXCEPTIONS["buffers"].get(name, 0)


@pytest.mark.parametrize("name", MEASURED)
def test_a_key_that_changes_transformers_model_changes_ours_alike_or_is_refused(name: str) -> None:
    measured = MEASURED[name]
    base, checked, refusals = built(measured["config"]), 0, {}
    for path, (value, parameters, changes) in measured["effects"].items():
        if parameters is None or path in EXCEPTIONS["differs"].get(name, ()):
            continue
        try:
            after = built(with_value(measured["config"], path, value))
        except InvalidRequestError as error:
            refusals[path] = str(error)
            continue
        assert after.parameters - base.parameters == parameters - measured["parameters"], path
        checked += changes
    assert checked >= 4
    # without a layer that has experts, nobody reads their sizes
    assert "moe_intermediate_size" in refusals.pop("first_k_dense_replace", "moe_intermediate_size")
    assert [path for path, error in refusals.items() if path.split(".")[-1] not in error] == []


def test_published_configs_are_known_as_a_whole() -> None:
    configs = [entry.config for entry in models().values()]
    configs += [about["config"] for _, about in (*load_cases(), *load_later_cases()) if about.get("config")]
    assert len(configs) >= 100
    assert [built(config).unknown_keys for config in configs] == [()] * len(configs)


@pytest.mark.parametrize("entry", PUBLISHED, ids=lambda entry: entry["name"])
def test_counts_are_the_publishers(entry: dict[str, Any]) -> None:
    model = model_from_config(entry["config"], name=entry["name"])
    least, most = entry["parameters"]
    assert least <= model.parameters <= most
    least, most = entry.get("active", (0, model.parameters))
    assert least <= model.active_parameters <= most


@pytest.mark.parametrize(
    ("name", "path", "value", "says"),
    [
        ("8b", "moe_latent_size", 1024, r"moe_latent_size \(1024\)"),
        ("8b", "widths", [1, 2], r"widths \(a list of 2\)"),
        ("8b", "audio_config", {"hidden_size": 1280}, r"audio_config \(an object of 1 fields\)"),
        ("8b", "num_experts", 8, r"num_experts \(8\)"),
        ("8b", "ffn_scale", 4096.0, r"ffn_scale \(4096.0\)"),
        ("8b", "use_post_norm", True, r"use_post_norm \(True\)"),
        ("8b", "expand_ratio", 0.5, r"expand_ratio \(0.5\)"),
        ("8b", "layer_pattern", "MLA", r"layer_pattern \(MLA\)"),
        ("deepseek-ai/DeepSeek-V3", "layer_types", ["full_attention"] * 60 + ["linear_attention"], "layer_types"),
        ("google/gemma-3-4b-it", "text_config.extra_layers", 2, r"text_config.extra_layers \(2\)"),
        ("google/gemma-3-4b-it", "vision_config.extra_layers", 2, r"vision_config.extra_layers \(2\)"),
        ("gpt-oss-20b", "attention_bias", False, r"attention_bias \(False\)"),
        ("Qwen/Qwen3-32B-FP8", "quantization_config.rank", 32, r"quantization_config.rank \(32\)"),
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", "mamba_heads", 8, r"mamba_heads \(8\)"),
    ],
)
def test_a_size_that_nobody_reads_is_refused_by_its_name(name: str, path: str, value: Any, says: str) -> None:
    config = resolve(name).config
    with pytest.raises(InvalidRequestError, match=rf"{says}.*does not know.*--allow-unknown-config-keys"):
        built(with_value(config, path, value))
    assert len(built(with_value(config, path, value), allow_unknown_keys=True).unknown_keys) == 1


def test_many_unknown_keys_are_counted() -> None:
    config = {**resolve("8b").config, **{f"size_{number}": 64 for number in range(5)}}
    with pytest.raises(InvalidRequestError, match=r"size_0 \(64\), size_1 \(64\), size_2 \(64\) and 2 more"):
        built(config)


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("8b", {"eos_token_id": [1, 2], "rope_theta": 500_000, "max_length": 20, "attention_dropout": 1}),
        ("8b", {"use_cache": True, "hidden_act": "silu", "use_new_norm": False, "id2label": {"0": "a"}}),
        ("8b", {"new_size": 0, "new_sizes": [], "newer_size": None}),
        ("8b", {"layer_types": ["full_attention"] * 32}),
        # what published configs have beside transformers' fields
        ("microsoft/phi-4", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "embd_pdrop": 0.0}),
        ("tiiuae/falcon-180B", {"ff_factor": 4, "num_ln_in_parallel_attn": 2}),
        ("allenai/OLMo-2-1124-7B", {"clip_qkv": 8.0}),
        ("Qwen/Qwen3-30B-A3B", {"num_local_experts": 128}),
        ("8b", {"tokenizer_model_max_length": 4096, "unsloth_fixed": True, "max_sequence_length": 200_000}),
        ("8b", {"auto_map": {"AutoConfig": "x.Y"}, "num_labels": 2, "task_specific_params": None}),
        ("lfm2-1.2b", {"block_dim": 2048, "conv_dim": 2048, "conv_dim_out": 2048, "num_heads": 32, "theta": 1e6}),
        ("lfm2-1.2b", {"block_out_init_scale": 1.0}),
    ],
)
def test_what_changes_no_size_is_passed_over(name: str, extra: dict[str, Any]) -> None:
    assert made(name, **extra) == made(name)


def test_the_shortest_context_counts_as_in_vllm() -> None:
    assert made("8b", max_sequence_length=2048).max_model_len == 2048
    assert made("8b", max_sequence_length=2048, model_max_length=4096).max_model_len == 4096


def test_quantization_by_an_older_name() -> None:
    """As compressed-tensors wrote it, and vLLM's `_parse_quant_hf_config` reads it."""
    groups = {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "targets": ["Linear"]}}
    config = config_of("8b", compression_config={"quant_method": "compressed-tensors", "config_groups": groups})
    assert built(config).quantization.linear.name == "fp8 (per channel)"
    assert built(config, quantization="fp8").quantization.is_assumed


NO_DATA = "no data of vLLM {}: the plan and its options are those of 0.33.0, the nearest"
TOO_OLD = "moonshotai/Kimi-K3 needs vLLM 0.27.1 by vLLM's recipe, and this plan is for {}"


@pytest.mark.parametrize(
    ("name", "version", "says", "notes"),
    [
        *(("8b", version, NO_DATA, 0) for version in ("0.20.0", "0.32.1", "0.33")),
        ("8b", "0.34.0", NO_DATA, 1),
        ("moonshotai/Kimi-K3", "0.20.0", TOO_OLD, 1),
        *(("moonshotai/Kimi-K3", version, TOO_OLD, 0) for version in ("0.27.0", "0.32.0")),
    ],
)
def test_a_version_without_data_or_too_old_for_a_model_is_named(name: str, version: str, says: str, notes: int) -> None:
    reasons = made_plan(made(name), "b200", engine=EngineConfig(vllm_version=version)).chosen.reasons
    assert sum(says.format(version) in reason for reason in reasons) == notes


def test_layers_of_transformers_5_are_those_of_the_pattern() -> None:
    entry = next(entry for entry in PUBLISHED if "Nemotron-3-Super" in entry["name"])
    config = {key: value for key, value in entry["config"].items() if key != "num_hidden_layers"}
    pattern = config.pop("hybrid_override_pattern")
    kinds = [{"M": "mamba", "E": "moe", "*": "attention"}[letter] for letter in pattern]
    assert built({**config, "layers_block_type": kinds}) == built(entry["config"])
    with pytest.raises(InvalidRequestError, match="name different layers"):
        built({**entry["config"], "layers_block_type": kinds[1:]})
    with pytest.raises(InvalidRequestError, match="layers_block_type has 'rwkv': use mamba"):
        built({**config, "layers_block_type": ["rwkv"]})


def test_an_architecture_that_is_not_known_is_the_cause_that_is_named() -> None:
    """A list in moe_layer_freq is no fault: MiniMax-M3 and MiMo-V2 have one."""
    config = {"architectures": ["MiMoV9ForCausalLM"], "moe_layer_freq": [0, 1, 1], "n_layer": 3}
    with pytest.raises(InvalidRequestError, match="architecture MiMoV9ForCausalLM, and this planner does not"):
        built(config)
