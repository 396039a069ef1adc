"""Families whose layers differ: sparse attention and its indexer, windows with other heads, short convolutions.

And hybrids: the states of fixed size that some of their layers keep, alone or beside keys and values.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan import EngineConfig, ModelSpec, accelerator
from hpc_serve.plan.catalog import architectures, load_data
from hpc_serve.plan.memory.kv_cache import cache_layout, full_context_bytes
from hpc_serve.plan.memory.loaded import loaded_model, pipeline_stages
from hpc_serve.plan.speed.work import model_work
from hpc_serve.units import GIB
from tests.support.configs import built, config_of, made, schemes_of
from tests.support.plans import estimate, layout, spec


def token_bytes(model: ModelSpec, **options: Any) -> list[int]:
    return list(cache_layout(model, EngineConfig(**options), 1).bytes_per_token)


@pytest.mark.parametrize(("dtype", "latent"), [("auto", 576 * 2), ("fp8", 656)])
def test_an_indexer_caches_a_key_in_fp8_with_its_scale(dtype: str, latent: int) -> None:
    for architecture in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"):
        assert token_bytes(made(architecture), kv_cache_dtype=dtype) == [latent + 128 + 4] * 4


def test_layers_that_take_the_tokens_of_the_one_before_have_no_indexer() -> None:
    """GLM-5.2: each fourth layer from the third on has one, and those before it."""
    kinds = ["full", "full", "full", "shared"]
    model = made("GlmMoeDsaForCausalLM", indexer_types=kinds, index_topk_freq=4, index_skip_topk_offset=3)
    assert token_bytes(model) == [1284, 1284, 1284, 1152]
    indexer = 2048 * 32 * 128 + 6144 * (128 + 32) + 2 * 128
    assert made("GlmMoeDsaForCausalLM").parameters - model.parameters == indexer


def test_sparse_attention_reads_the_chosen_tokens_and_every_key_of_the_indexer() -> None:
    model = made("DeepseekV32ForCausalLM")
    (stage,) = model_work(model, accelerator("h200"), EngineConfig(), layout()).stages
    short, long = 1_000, 100_000
    assert stage.cache_bytes(short) == 4 * short * (1152 + 132)
    assert stage.cache_bytes(long) == 4 * (2048 * 1152 + long * 132)
    index_flops = 4 * 2 * 64 * 128
    assert stage.attention_flops(long + 1) - stage.attention_flops(long) == index_flops
    assert stage.attention_flops(short + 1) - stage.attention_flops(short) > index_flops


def test_a_window_may_have_other_heads_and_narrower_values() -> None:
    """MiMo-V2 by the names of its own config, which are not those of transformers."""
    config = {key: value for key, value in config_of("MiMoV2FlashForCausalLM").items() if "_types" not in key}
    own = {"hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "swa_num_key_value_heads": 8}
    model = built({**config, **own})
    assert token_bytes(model) == [2 * 4 * 320, 2 * 8 * 320, 2 * 8 * 320, 2 * 4 * 320]
    assert [layer.cache.window for layer in model.layers if layer.cache] == [0, 128, 128, 0]


@pytest.mark.parametrize(
    ("name", "field", "of_first_layers"),
    [
        ("Lfm2ForCausalLM", "kind", ["state", "state", "full", "state"]),
        ("Lfm2ForCausalLM", "state", [((2 * 2560, 0),)] * 2),  # of a short convolution
        ("command-r7b", "window", [4097, 4097, 4097, 0]),  # vLLM keeps a token more
        ("gemma-3n-e4b", "window", [512, 512, 512, 512, 0] * 4),
        ("MiniMax-M3", "chosen_tokens", [0, 0, 0, 16 * 128]),
        ("Kimi-K3", "kind", ["state", "state", "state", "mla"]),
        ("Kimi-K3", "state", [((3 * 12_288 * 3, 0), (96 * 128 * 128, 4))] * 3),
    ],
)
def test_what_layers_keep(name: str, field: str, of_first_layers: list[Any]) -> None:
    caches = [layer.cache for layer in made(name).layers]
    assert [getattr(cache, field) for cache in caches[: len(of_first_layers)]] == of_first_layers


def test_gates_are_for_each_head_or_each_of_its_elements() -> None:
    none, heads, elements = (made("LagunaForCausalLM", gating=kind) for kind in (False, "per-head", "per-element"))
    assert heads.parameters - none.parameters == 2048 * (48 + 64 + 48 + 64)
    assert elements.parameters - none.parameters == 128 * (heads.parameters - none.parameters)


def test_gemma_3n_has_a_cache_in_its_first_layers_and_one_stage() -> None:
    model = made("gemma-3n-e4b")
    assert sum(layer.cache is not None for layer in model.layers) == 20
    with pytest.raises(DoesNotFitError, match="Pipeline parallelism is not supported for this model"):
        estimate(model, pp=2)
    small, large = (made("gemma-3n-e4b-text", intermediate_size=size) for size in (8192, [16384] * 35))
    mixed = made("gemma-3n-text-of-two-sizes")
    assert (small.intermediate_size, mixed.intermediate_size) == (8192, 16384)
    assert 35 * (large.parameters - mixed.parameters) == 10 * (large.parameters - small.parameters)


def test_text_alone_leaves_out_gemma_3ns_towers_and_keeps_the_layers_embeddings() -> None:
    model = made("gemma-3n-e4b")
    text = loaded_model(model, EngineConfig(language_model_only=True))
    assert text.parameters == made("gemma-3n-e4b-text").parameters
    assert loaded_model(model, EngineConfig(limit_mm_per_prompt={"image": 0, "audio": 0})) == text
    assert loaded_model(model, EngineConfig(limit_mm_per_prompt={"image": 0})) == model


def test_the_decoder_of_internvl_is_of_the_architecture_that_its_config_names() -> None:
    config = config_of("internvl3.5-8b-shape")
    inner = config["llm_config"]
    model = built(config)
    assert model.images is not None
    assert model.images.image_tokens == 13 * 256
    decoder = built(inner)
    assert model.parameters - model.everywhere.parameters == decoder.parameters
    other = {**config, "llm_config": {**inner, "architectures": ["Qwen2ForCausalLM"]}}
    biases = (32 + 2 * 8) * 128 - 2 * 128  # in place of norms over queries and keys
    assert built(other).parameters - model.parameters == 36 * biases


GEMMA = config_of("gemma-4-of-three-layers")


def gemma(**changes: Any) -> ModelSpec:
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": {**GEMMA, **changes}}
    return built(config)


def test_values_that_are_keys_are_not_in_the_files_and_yet_in_memory() -> None:
    """vLLM loads the keys' projection into the values' place too (model_executor/models/gemma4.py)."""
    one, both = gemma(), gemma(attention_k_eq_v=False, num_global_key_value_heads=None)
    assert token_bytes(one) == [2 * 2 * 2 * 32, 2 * 2 * 64, 2 * 2 * 64]
    assert [layer.derived.parameters for layer in one.layers] == [0, 256 * 64, 256 * 64]
    assert [layer.derived.parameters for layer in both.layers] == [0, 0, 0]
    # two KV heads in place of one, for keys and for values
    assert both.parameters - one.parameters == 2 * 256 * 64 * (2 * 2 - 1)


def test_layers_may_share_the_cache_of_a_layer_before() -> None:
    model = gemma(num_kv_shared_layers=1, use_double_wide_mlp=True, hidden_size_per_layer_input=8)
    assert [layer.cache is None for layer in model.layers] == [False, False, True]
    plain = gemma()
    wider, less = 3 * 256 * 512, 256 * 64 + 64
    own = 3 * (2 * 256 * 8 + 256) + 1024 * 24 + 256 * 24 + 8
    assert model.parameters - plain.parameters == wider - less + own


def test_per_layer_config_is_read_or_refused() -> None:
    named = {key: value for key, value in GEMMA.items() if "global" not in key}
    outer = {"architectures": ["Gemma4ForConditionalGeneration"]}
    each = {"1": {"head_dim": 64, "num_key_value_heads": 1}, "02": {"head_dim": 64, "num_key_value_heads": 1}}
    found = built({**outer, "text_config": {**named, "per_layer_config": each}})
    assert found.parameters == gemma().parameters
    for wrong in ({"1": {"heads": 64}}, {"1": {"head_dim": "64"}}, {"1": 64}):
        with pytest.raises(InvalidRequestError, match="per_layer_config"):
            built({**outer, "text_config": {**named, "per_layer_config": wrong}})


def test_mixed_precision_names_the_scheme_of_each_module() -> None:
    layers = {
        "model.language_model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
        "model.language_model.layers.1.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1.mlp.experts.0.up_proj": {"quant_algo": "NVFP4"},
        "model.layers.1.mlp.experts.7.up_proj": {"quant_algo": "NVFP4"},
        "lm_head": {"quant_algo": "FP8"},
    }
    quantized = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    config = config_of("Qwen3ForCausalLM", quantization_config=quantized)
    model = built(config)
    of_layers = [schemes["mlp.up_proj"].name for schemes in schemes_of(model)]
    assert of_layers[0] != of_layers[1]
    assert of_layers[2:] == [model.quantization.plain.name] * 2
    assert model.head is not None
    assert model.head.scheme.name == of_layers[0]
    assert model.quantization.scheme_of("model.layers.1.mlp.experts.up_proj", is_expert=True).name == of_layers[1]
    layers["model.layers.1.mlp.experts.7.up_proj"] = {"quant_algo": "FP8"}
    with pytest.raises(InvalidRequestError, match=r"experts of different kinds in layers\.1\.mlp\.experts"):
        built(config)
    with pytest.raises(InvalidRequestError, match="MIXED_PRECISION has no quantized_layers"):
        built({**config, "quantization_config": {**quantized, "quantized_layers": {}}})


def test_step_names_its_sizes_in_its_own_way() -> None:
    model = made("step-3.5-of-three-layers")
    full = 256 * 64 * (4 + 2 + 2 + 4) + 256 * 4 + 2 * 64 + 2 * 256
    slides = 256 * 64 * (6 + 3 + 3 + 6) + 256 * 6 + 2 * 64 + 2 * 256
    experts = 256 * 8 + 8 + 8 * 3 * 256 * 128 + 3 * 256 * 64
    assert [layer.block.parameters for layer in model.layers] == [full + 3 * 256 * 512, *[slides + experts] * 2]
    assert (model.num_experts, model.num_experts_per_tok) == (8, 2)
    assert token_bytes(model) == [2 * 2 * 2 * 64, 2 * 2 * 3 * 64, 2 * 2 * 3 * 64]


def test_kimi_k2_5_is_k2_with_a_tower() -> None:
    text = config_of("DeepseekV3ForCausalLM", architectures=["DeepseekV3ForCausalLM"])
    tower = {"vt_hidden_size": 64, "vt_intermediate_size": 128, "vt_num_hidden_layers": 2, "patch_size": 14}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    with_tower = built({**outer, "vision_config": tower})
    layer = 64 * 192 + 192 + 64 * 64 + 64 + 2 * 64 * 128 + 128 + 64 + 4 * 64
    ends = 588 * 64 + 64 + 64 * 64 * 64 + 2 * 64 + 2 * 64 + 256 * 256 + 256 + 256 * 7168 + 7168
    assert with_tower.everywhere.parameters == 2 * layer + ends
    assert with_tower.parameters - with_tower.everywhere.parameters == made("DeepseekV3ForCausalLM").parameters


def test_mistral_small_4_has_latent_attention() -> None:
    """119B: transformers' Mistral4Config has these sizes, and 118,972,826,624 parameters."""
    text = config_of("mistral-small-4-text")
    model = built({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text})
    assert model.parameters == 118_972_826_624
    assert model.is_mla
    assert model.images is None


@pytest.mark.parametrize(
    ("name", "groups", "block", "request_blocks"),
    [
        (
            "DeepSeek-V4-Flash",
            [(4, 42, 870_912), (8, 20, 656_640), (64, 21, 786_240), (64, 22, 823_680), (256, 62, 1_002_240)],
            1_002_240,
            7194,
        ),
        (
            "DeepSeek-V4-Pro",
            [(4, 60, 1_244_160), (8, 31, 1_017_792), (64, 30, 1_123_200), (64, 31, 1_160_640), (256, 91, 1_435_968)],
            1_435_968,
            7194,
        ),
    ],
)
def test_tensors_of_a_compressed_cache_share_blocks_as_in_vllm(name, groups, block, request_blocks):
    """The numbers are those of vLLM 0.32's `_get_packed_kv_cache_groups` for the specs of these layers."""
    layout = cache_layout(made(name), EngineConfig(), 8)
    assert sorted((one.block_size, len(one.layers), sum(one.page_bytes)) for one in layout.groups) == groups
    assert layout.bytes_per_block(0, 100) == block
    assert layout.blocks_per_request(131_072, 16_384) == request_blocks
    with pytest.raises(InvalidRequestError, match="kv_cache_dtype is 'bfloat16': vLLM keeps this cache in fp8"):
        cache_layout(made(name), EngineConfig(kv_cache_dtype="bfloat16"), 8)


def test_a_compressed_entry_is_read_once_for_all_its_tokens() -> None:
    model = made("DeepSeek-V4-Flash")
    (stage,) = model_work(model, accelerator("b200"), EngineConfig(), layout()).stages
    length = 100_000
    window, fours, hundreds = 43 * 128 * 584, 21 * (4 * 512 * 584 / 4 + length * 33), 20 * length * 584 / 128
    assert stage.cache_bytes(length) == window + fours + hundreds
    assert full_context_bytes(model, EngineConfig(), length) > 21 * length * (584 + 132) / 4


def test_experts_of_deepseek_v4_are_of_the_type_that_its_config_says() -> None:
    config = config_of("DeepSeek-V4-Flash")
    four = built(config).quantization
    assert (four.linear.name, four.experts.name) == ("fp8 (blocks)", "mxfp4")
    assert built({**config, "expert_dtype": "fp8"}).quantization.experts.name == "fp8 (blocks)"


def test_minimax_m3_chooses_blocks_of_tokens() -> None:
    model = made("MiniMax-M3")
    per_token = cache_layout(model, EngineConfig(), 1).bytes_per_token
    assert per_token[:4] == (2048, 2048, 2048, 2048 + 256)
    # the indexer's key is on every rank
    assert cache_layout(model, EngineConfig(), 8).bytes_per_token[:4] == (512, 512, 512, 512 + 256)


def test_biases_of_ling_are_in_the_dense_mlp_and_in_shared_experts_too() -> None:
    with_bias, without = (made("bailing-moe-v2", use_bias=has_bias) for has_bias in (True, False))
    mlps = (2 * 5120 + 2048) + 19 * (2 * 512 + 2048)
    assert with_bias.parameters - without.parameters == 20 * 2048 + mlps


def test_every_tower_is_of_an_architecture() -> None:
    towers = load_data("towers.json")["towers"]
    assert set(towers) == {about["tower"] for about in architectures().values() if "tower" in about}


def test_a_plan_loads_the_files_of_its_family_alone() -> None:
    program = (
        "import sys; from hpc_serve.plan import model_from_config, resolve; "
        "model_from_config(resolve('8b').config, name='x'); "
        "print(*sorted(one.rsplit('.')[-1] for one in sys.modules if one.startswith('hpc_serve.plan.model.')))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "ordinary" in loaded
    assert not {"special", "latent", "hybrid", "kimi", "compressed", "vision"} & set(loaded)


# -- hybrids


@pytest.mark.parametrize(
    ("name", "ranks", "shapes"),
    [
        ("granite-4-h-10-layers", 1, [(3 * 8448, 2), (128 * 64 * 128, 2)]),
        ("granite-4-h-10-layers", 2, [(3 * 4352, 2), (64 * 64 * 128, 2)]),
        ("granite-4-h-10-layers", 8, [(3 * 1280, 2), (16 * 64 * 128, 2)]),
        ("jamba-16-layers", 1, [(3 * 8192, 2), (8192 * 16, 2)]),
        ("jamba-16-layers", 8, [(3 * 1024, 2), (1024 * 16, 2)]),
    ],
)
def test_states_of_mamba_are_vllms_and_one_group_is_on_every_rank(name, ranks, shapes):
    """The shapes and types are those that vLLM 0.32's model classes return on GPUs. On some CPUs the state is wider."""
    model = made(name)
    (state,) = {layer.cache for layer in model.layers if layer.cache and layer.cache.kind == "state"}
    assert state.state_bytes(ranks, model.dtype_bytes) == sum(elements * size for elements, size in shapes)


@pytest.mark.parametrize(
    ("name", "ranks", "elements"),
    [
        ("falcon-h1-7b", 1, 3 * 3584 + 24 * 128 * 256),
        ("falcon-h1-7b", 4, 3 * 1280 + 6 * 128 * 256),
        ("falcon-h1-34b-shape", 2, 3 * 2560 + 16 * 128 * 256),
    ],
)
def test_a_layer_of_falcon_h1_keeps_keys_and_a_state(name: str, ranks: int, elements: int) -> None:
    """The shapes of the states are those that vLLM 0.32's model class returns, in the model's type."""
    model = made(name)
    count = model.num_hidden_layers
    (cache,) = {layer.cache for layer in model.layers if layer.cache}
    assert cache.state_bytes(ranks, 2) == 2 * elements
    layout = cache_layout(model, EngineConfig(), ranks)
    keys, states = layout.groups
    assert [(group.kind, len(group.layers)) for group in layout.groups] == [("full", count), ("state", count)]
    assert keys.page_bytes == states.page_bytes
    token = 2 * 2 * 128 * max(1, model.num_key_value_heads // ranks)
    assert layout.bytes_per_token == (token,) * count
    page = keys.block_size * token
    assert 2 * elements <= page < 2 * elements + 16 * token
    assert layout.bytes_per_block(0, count // 2) == count // 2 * page
    assert layout.blocks_per_request(10_000, 8192) == -(-10_000 // keys.block_size) + layout.state_blocks


def test_falcon_h1_is_read_as_a_whole_at_each_token() -> None:
    model = made("falcon-h1-7b")
    (stage,) = model_work(model, accelerator("h100"), EngineConfig(), layout()).stages
    state = 2 * (3 * 3584 + 24 * 128 * 256)
    assert stage.cache_bytes(1000) == 44 * (1000 * 1024 + 2 * state)
    assert full_context_bytes(model, EngineConfig(), 1000) == 44 * (1000 * 1024 + state)


def test_vllm_refuses_ranks_that_do_not_divide_falcon_h1s_groups_or_its_cache() -> None:
    model = made("falcon-h1-34b-shape")
    with pytest.raises(DoesNotFitError, match="2 units of 256, which 4 ranks do not divide"):
        pipeline_stages(model, 4, 1)
    with pytest.raises(DoesNotFitError, match="layers with windows, states or a compressed cache"):
        estimate(made("falcon-h1-7b"), tp=4, decode_context_parallel_size=2)


def test_groups_of_a_hybrid_as_vllm_printed_them() -> None:
    """Qwen3-Next on two H200, vLLM 0.10.2: block size 544; 44.59 GiB are 973,760 tokens, 14.77 x 262,144."""
    options: dict[str, Any] = {"vllm_version": "0.10.2", "kv_cache_memory_bytes": int(44.59 * GIB)}
    found = estimate("Qwen/Qwen3-Next-80B-A3B-Instruct", "h200", tp=2, length=262144, **options)
    assert found.block_size == 544
    assert found.kv_cache_tokens == 973_760
    assert round(found.max_concurrency, 2) == 14.77


NEMOTRON = "nvidia/Nemotron-H-56B-Base-8K"


def test_states_of_nemotron_are_in_32_bit_where_the_config_is_silent() -> None:
    """NemotronHForCausalLMConfig in vLLM's models/config.py."""
    (state,) = {layer.cache for layer in spec(NEMOTRON).layers if layer.cache and layer.cache.kind == "state"}
    assert state.state_bytes(1, 2) == (256 * 64 + 2 * 8 * 256) * 3 * 2 + 256 * 64 * 256 * 4
    assert state.state_bytes(8, 2) == state.state_bytes(1, 2) // 8


@pytest.mark.parametrize(
    ("blocks", "options"),
    [
        (2, {}),
        (1, {"enable_prefix_caching": False}),
        (1, {"vllm_version": "0.23.0"}),
        (2, {"vllm_version": "0.23.0", "enable_prefix_caching": True}),
        (1, {"runner": "pooling"}),
    ],
)
def test_state_blocks_of_a_request(blocks: int, options: dict[str, Any]) -> None:
    """Hybrids cache prefixes by default since 0.26: `is_prefix_caching_supported` in vLLM's config/model.py."""
    assert cache_layout(spec(NEMOTRON), EngineConfig(**options), 8).state_blocks == blocks
