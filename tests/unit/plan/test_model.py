"""What models are made of: published counts, vLLM's own allocation, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan import model_from_config, resolve
from hpc_serve.plan.catalog import models
from hpc_serve.plan.memory.loaded import pipeline_stages
from hpc_serve.plan.model.scheme import FP8_BLOCK, FP8_CHANNEL
from hpc_serve.units import GIB
from tests.support.configs import EXCEPTIONS, VLLM_BYTES, built, config_of, schemes_of, with_value
from tests.support.plans import changed, estimate, spec

KNOWN_DIFFERENCES = {name: more for name, (more, _) in EXCEPTIONS["published"].items()}


def test_parameters_are_the_published_ones() -> None:
    checked = 0
    for name, entry in models().items():
        if entry.published_parameters:
            difference = entry.published_parameters - spec(name).parameters
            assert difference == KNOWN_DIFFERENCES.get(name, 0), name
            checked += 1
    assert checked >= 80


def test_layers_for_prediction_are_what_the_files_hold_beyond_the_config() -> None:
    """GLM-4.6 has one such layer in its files, GLM-4.5 with it a copy of embedding and head."""
    glm = spec("zai-org/GLM-4.6")
    assert glm.prediction_layers == 1
    assert glm.prediction_layer_parameters == KNOWN_DIFFERENCES["zai-org/GLM-4.6"]
    copies = 2 * glm.embedding.parameters
    assert glm.prediction_layer_parameters + copies == KNOWN_DIFFERENCES["zai-org/GLM-4.5"]
    assert spec("8b").prediction_layers == 0


def test_what_a_config_of_gemma_3_leaves_out_is_what_transformers_takes() -> None:
    """google/gemma-3-4b-it as published: heads, vocabulary and context are missing."""
    model = built("gemma-3-4b-as-published")
    known = spec("google/gemma-3-4b-it")
    assert (model.parameters, model.max_model_len) == (known.parameters, 131_072)


@pytest.mark.parametrize("name", sorted({case["model"] for case in VLLM_BYTES["cases"]}))
def test_bytes_of_a_rank_are_those_vllm_allocates(name: str) -> None:
    config = {key: value for key, value in config_of(name).items() if key != "quantization_config"}
    model = model_from_config(config, name=name, dtype="bfloat16")
    cases = {
        (case["tp"], case["pp"], case["rank"]): case["bytes"] for case in VLLM_BYTES["cases"] if case["model"] == name
    }
    counted = {(tp, pp, rank): pipeline_stages(model, tp, pp)[rank].weight_bytes for tp, pp, rank in cases}
    assert counted == cases


def test_active_parameters_of_a_mixture() -> None:
    """Mixtral 8x7B: 12.9 B active of 46.7 B (arxiv.org/abs/2401.04088)."""
    model = spec("mixtral-8x7b")
    assert round(model.active_parameters / 1e9, 1) == 12.9
    assert spec("70b").active_parameters == spec("70b").parameters


def test_fp8_of_405b_is_in_the_middle_layers_alone() -> None:
    model = spec("405b-fp8")
    schemes = schemes_of(model)
    assert schemes[60]["mlp.up_proj"] is FP8_CHANNEL
    assert schemes[60]["self_attn.q_proj"] is model.quantization.plain
    assert schemes[0]["mlp.up_proj"] is schemes[125]["mlp.up_proj"] is model.quantization.plain
    # vLLM on MI300X, TP=8: "Loading model weights took 56.7677 GB"
    assert pipeline_stages(model, 8, 1)[0].weight_bytes / GIB == pytest.approx(56.77, abs=0.05)


def test_block_scales_of_deepseek() -> None:
    model = spec("v3")
    assert model.quantization.linear is FP8_BLOCK
    # the checkpoint: 680,571,043,840 elements in fp8 with the MTP layer, 41,555,600 in float32 (block scales)
    assert 660e9 < model.weight_bytes < 690e9


def quark(**weight: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}}


FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1}
GROUPS = {"a": {"weights": {"num_bits": 8, "type": "float"}}, "b": {"weights": {"num_bits": 4, "type": "float"}}}
UNKNOWN_QUANTIZATIONS: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "magic"}, "'magic'"),
    (quark(dtype="fp6"), "quark has weights in fp6"),
    (quark(**{**FP4, "group_size": 16}), "group_size 16: mxfp4 has groups of 32"),
    ({**quark(**FP4), "layer_quant_config": {"*.k": {"weight": {"dtype": "int8"}}}}, "weights of different kinds"),
    ({"quant_method": "modelopt", "quant_algo": "FP4_SPARSE"}, "quant_algo 'FP4_SPARSE'.*knows FP8, .*NVFP4"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "32: NVFP4 has groups of 16"),
    ({"quant_method": "compressed-tensors", "config_groups": GROUPS}, "groups of different kinds, fp8 and mxfp4"),
]


def test_quantisation_asked_for_must_be_known_too() -> None:
    alike = {**quark(**FP4), "layer_quant_config": {"*.k": {"weight": FP4}}}
    assert changed("8b", quantization_config=alike).quantization.linear.name == "mxfp4"
    with pytest.raises(InvalidRequestError, match="'magic'"):
        spec("8b", quantization="magic")


@pytest.mark.parametrize(
    ("config", "gib"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 5.33),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 5.61),
        ({"quant_method": "fp8"}, 8.46),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, 8.46),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8_PB_WO"}}, 8.46),
        ({"quant_method": "modelopt_fp4", "quant_algo": "w4a16_nvfp4", "group_size": 16}, 5.62),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, 8.66),
        ({"quant_method": "mxfp4"}, 14.96),  # mxfp4 is for experts
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, 8.46),
    ],
)
def test_sizes_of_quantised_8b(config: dict[str, Any], gib: float) -> None:
    assert changed("8b", quantization_config=config).weight_bytes / GIB == pytest.approx(gib, abs=0.01)


def test_float32_checkpoints_are_loaded_in_16_bit() -> None:
    """As vLLM's `_get_and_verify_dtype` does."""
    assert spec("allenai/OLMo-2-1124-7B").dtype == "bfloat16"
    assert built(resolve("8b").config, dtype="float32").weight_bytes == 4 * 8_030_261_248


def test_what_cannot_be_divided_is_named() -> None:
    with pytest.raises(DoesNotFitError, match=r"attention heads \(28\).*tensor parallel size \(8\)"):
        estimate("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", tp=8)
    with pytest.raises(DoesNotFitError, match="4 units of 128, which 7 ranks do not divide"):
        pipeline_stages(spec("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"), 7, 1)
    with pytest.raises(DoesNotFitError, match="200 stages"):
        estimate("8b", pp=200)
    with pytest.raises(DoesNotFitError, match=r"experts.up_proj.*192 outputs.*blocks.*128"):
        pipeline_stages(spec("Qwen/Qwen3-235B-A22B-FP8"), 8, 1)


@pytest.mark.parametrize(
    ("name", "path", "value", "says"),
    [
        ("8b", "num_attention_heads", 0, "num_attention_heads is 0: it must be a whole number of at least 1"),
        ("8b", "hidden_size", "4096", "hidden_size is '4096'"),
        ("8b", "num_hidden_layers", 10**12, "from 1 to 2,000"),
        ("8b", "vocab_size", True, "vocab_size is True"),
        ("8b", "intermediate_size", -1, "not negative"),
        ("8b", "rope_scaling", [], r"rope_scaling is \[\]: it must be an object"),
        ("8b", "architectures", "LlamaForCausalLM", "must be a list"),
        ("8b", "quantization_config", "fp8", "must be an object"),
        ("deepseek-ai/DeepSeek-V3", "moe_layer_freq", 0, "moe_layer_freq is 0"),
        ("deepseek-ai/DeepSeek-V3", "rope_scaling.factor", float("nan"), "rope_scaling.factor is nan"),
        ("google/gemma-3-4b-it", "vision_config.patch_size", 0, "vision_config.patch_size is 0"),
        ("google/gemma-3-4b-it", "vision_config.patch_size", None, "no 'vision_config.patch_size'"),
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", "block_configs", [], "block_configs names 0 of its 80 layers"),
        *(("8b", size, None, f"no {size!r}") for size in ("hidden_size", "vocab_size", "num_hidden_layers")),
        ("8b", "architectures", ["Llama9ForCausalLM"], "Llama9ForCausalLM, and this planner does not.* LlamaFor"),
        ("8b", "architectures", ["MllamaForConditionalGeneration"], r"vLLM had it until 0\.10\.2"),
        ("8b", "layer_types", ["linear_attention"] * 32, "has 'linear_attention': use full_attention or sliding"),
        ("8b", "quantization", {"bits": 4, "group_size": 64}, r"has quantization \(an object of 2 fields\)"),  # MLX's
        ("LlamaForCausalLM", "intermediate_size", [1, 2], "intermediate_size is a list: this family has one"),
        ("gemma-3n-e4b-text", "intermediate_size", [1, 2], "intermediate_size names 2 of its 35 layers"),
        ("gemma-3n-e4b", "vision_config.architecture", "mobilenetv5_base", r"architecture \(mobilenetv5_base\)"),
        ("Mistral3ForConditionalGeneration", "vision_config.image_size", 7, "the largest image becomes 0 tokens"),
        ("internvl3.5-8b-shape", "llm_config.architectures", ["RwkvForCausalLM"], "architecture RwkvForCausalLM"),
        ("Qwen/Qwen3-30B-A3B", "num_local_experts", 64, "num_experts is 128 and its num_local_experts is 64: they"),
        ("GlmMoeDsaForCausalLM", "indexer_types", [*["full"] * 3, "shared"], "topk_freq do not agree about layer 3"),
        ("falcon-h1-34b-shape", "mamba_d_ssm", 8192, "mamba_d_ssm is 8192 and its mamba_n_heads have 4096 in all"),
        ("MiMoV2FlashForCausalLM", "moe_layer_freq", [0, 2, 1, 1], "moe_layer_freq is"),
        ("MiMoV2FlashForCausalLM", "moe_layer_freq", [0], "moe_layer_freq names 1 of its 4 layers"),
        ("DeepSeek-V4-Flash", "expert_dtype", "int4", "expert_dtype is 'int4': use fp4 or fp8"),
        ("DeepSeek-V4-Flash", "compress_ratios", [3] * 43, "compress_ratios has 3 for layer 0: use 0, 1, 4 or 128"),
        ("Kimi-K3", "text_config.linear_attn_config.full_attn_layers", [4], "name each layer once: see layer 8"),
        *(("8b", "quantization_config", config, says) for config, says in UNKNOWN_QUANTIZATIONS),
    ],
)
def test_a_config_that_makes_no_sense_is_told_by_its_field(name: str, path: str, value: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        built(with_value(config_of(name), path, value))


def test_null_is_as_good_as_missing() -> None:
    config = dict(resolve("8b").config)
    assert built({**config, "head_dim": None, "rope_scaling": None}).parameters == 8_030_261_248
