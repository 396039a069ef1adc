"""Hybrids: the states of fixed size that some of their layers keep, alone or beside keys and values."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_serve.errors import DoesNotFitError
from hpc_serve.plan import EngineConfig, accelerator
from hpc_serve.plan.memory.kv_cache import cache_layout, full_context_bytes
from hpc_serve.plan.memory.loaded import pipeline_stages
from hpc_serve.plan.speed.work import model_work
from hpc_serve.units import GIB
from tests.support.configs import made
from tests.support.plans import estimate, layout, spec


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
def test_states_of_mamba_are_vllms_and_one_group_is_on_every_rank(
    name: str, ranks: int, shapes: list[tuple[int, int]]
) -> None:
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
