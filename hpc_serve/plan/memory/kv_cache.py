"""Counts the KV cache's share of one rank: bytes by token and layer, and how vLLM divides it into blocks.

Layers of one kind are a group. A model with several kinds (full attention, sliding windows, states) has several groups,
which take blocks of equal size from one pool (cache_groups.py). Drafted tokens have states of their own. Layers that
keep several tensors are in packed_cache.py.
"""

from __future__ import annotations

from dataclasses import replace

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.engine import EngineConfig, default_block_size
from hpc_serve.plan.hardware.accelerator import AcceleratorKind
from hpc_serve.plan.memory.cache_groups import CacheLayout, LayerPage, grouped
from hpc_serve.plan.memory.packed_cache import packed_groups
from hpc_serve.plan.model.spec import LayerCache, ModelSpec
from hpc_serve.plan.model.weights import Part, round_up

_PER_TOKEN_HEAD_SCALE_BYTES = 4
_PACKED_LATENT_BYTES = 656
"""DeepSeek's packed format of a latent in fp8 with its scales, in which vLLM's FlashMLA keeps sparse attention's."""
_LATENT_HYBRID_TOKENS = 128
"""The multiple that vLLM's blocks of a latent cache beside states are: `_align_hybrid_block_size` in platforms/."""
_ELEMENT_BYTES = {
    **dict.fromkeys(("bfloat16", "float16", "half"), 2.0),
    "float32": 4.0,
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "int8"), 1.0),
    **dict.fromkeys(("fp8_per_token_head", "int8_per_token_head"), 1.0),
    "int4_per_token_head": 0.5,
    "nvfp4": 0.5 + 1 / 16,
}


def kv_cache_dtype(model: ModelSpec, engine: EngineConfig) -> str:
    """Return the type of the cache: what is asked for, else what the checkpoint says, else the model's."""
    if engine.kv_cache_dtype != "auto":
        return engine.kv_cache_dtype
    return model.quantization.kv_cache_dtype or model.dtype


def layer_bytes_per_token(cache: LayerCache, ranks: int, dtype: str, *, mla_align: int = 1) -> int:
    """Return the bytes of one token in one layer on one rank.

    >>> layer_bytes_per_token(LayerCache(kind="full", kv_heads=8, head_dim=128, value_dim=128), 8, "bfloat16")
    512
    """
    if cache.kind in ("state", "encoder"):
        return 0
    if cache.kind == "compressed":
        return sum(tensor.page_bytes // tensor.block_tokens for tensor in cache.tensors if not tensor.window)
    element = _element_bytes(dtype)
    if cache.kind == "mla":
        packed = dtype == "fp8_ds_mla" or (cache.chosen_tokens > 0 and dtype.startswith("fp8"))
        latent = _PACKED_LATENT_BYTES if packed else round_up(int(cache.head_dim * element), mla_align)
        return latent + cache.index_bytes
    heads = Part(cache.kv_heads, 1, replicate=True).per_rank(ranks, "the KV cache")
    scales = 2 * _PER_TOKEN_HEAD_SCALE_BYTES if dtype.endswith("_per_token_head") else 0
    return heads * (int((cache.head_dim + cache.value_dim) * element) + scales) + cache.index_bytes


def cache_layout(model: ModelSpec, engine: EngineConfig, ranks: int, *, kind: AcceleratorKind = "gpu") -> CacheLayout:
    """Return the groups that vLLM makes of a model's layers, for `ranks` tensor-parallel ranks on that kind of
    accelerator.

    Raises DoesNotFitError where ranks cannot divide the KV heads, InvalidRequestError for an unknown kv_cache_dtype and
    for a model without attention.
    """
    dtype = kv_cache_dtype(model, engine)
    mla_align = 256 if engine.is_v0 else 1
    caches = [None if layer.cache and layer.cache.kind == "encoder" else layer.cache for layer in model.layers]
    known: dict[LayerCache, int] = {}
    for cache in caches:
        if cache is not None and cache not in known:
            known[cache] = layer_bytes_per_token(cache, ranks, dtype, mla_align=mla_align)
    per_token = tuple(known[cache] if cache is not None else 0 for cache in caches)
    if any(cache.kind == "compressed" for cache in known):
        return _compressed_layout(caches, per_token, engine.kv_cache_dtype)
    block_size = engine.block_size or default_block_size(engine, kind, is_mla=model.is_mla)
    state_dtype_bytes = 4 if kind == "cpu" else model.dtype_bytes
    states = {cache: cache.state_bytes(ranks, state_dtype_bytes) for cache in known if cache.state}
    own = max(per_token[: len(per_token) - model.draft_layers], default=0)
    if states:
        if not own:
            raise InvalidRequestError(
                f"{model.name} has layers with a state and none with attention: vLLM's cache for that is not known."
            )
        unit = max(block_size, _LATENT_HYBRID_TOKENS) if model.is_mla else block_size
        block_size = unit * -(-max(states.values()) // (unit * own))
    pages = {
        cache: [
            LayerPage(
                cache=_on_rank(part, model, engine, ranks),
                block_size=block_size,
                page_bytes=block_size * (own if part.kind == "state" else size),
            )
            for part in cache.parts
        ]
        for cache, size in known.items()
    }
    groups = grouped([(index, page) for index, cache in enumerate(caches) if cache for page in pages[cache]])
    return CacheLayout(
        groups=groups,
        block_size=min((group.block_size for group in groups), default=block_size),
        bytes_per_token=per_token,
        state_blocks=(2 if engine.caches_state_prefixes else 1) + engine.speculative_tokens,
        context_ranks=engine.decode_context_parallel_size or 1,
    )


def _on_rank(cache: LayerCache, model: ModelSpec, engine: EngineConfig, ranks: int) -> LayerCache:
    """Return what one rank keeps of a layer: its heads, and all tokens where the engine does not save windows.

    Several layers for multi-token prediction keep as many tokens before a window as they read ahead:
    `extra_retained_tokens` in vLLM.
    """
    kind, window = cache.kind, cache.window
    if not engine.saves_windows and kind in ("sliding", "chunked"):
        kind, window = "full", 0
    if kind == "sliding" and engine.speculates_with_own_layers and model.draft_layers > 1:
        window += engine.speculative_tokens - 1
    heads = cache.kv_heads and Part(cache.kv_heads, 1, replicate=True).per_rank(ranks, "the KV cache")
    return replace(cache, kind=kind, window=window, kv_heads=heads)


def _compressed_layout(caches: list[LayerCache | None], per_token: tuple[int, ...], asked: str) -> CacheLayout:
    """Return the groups of layers with compressed caches, which vLLM keeps in a packed form of fp8.

    Source: `_resolve_dsv4_kv_cache_dtype` in its models/deepseek_v4/attention.py.
    """
    if asked != "auto" and not asked.startswith("fp8"):
        raise InvalidRequestError(f"kv_cache_dtype is {asked!r}: vLLM keeps this cache in fp8, use auto or fp8.")
    groups = packed_groups(caches)
    return CacheLayout(
        groups=groups,
        block_size=max(group.block_size for group in groups),
        bytes_per_token=per_token,
        state_blocks=0,
    )


def full_context_bytes(model: ModelSpec, engine: EngineConfig, tokens: int) -> int:
    """Return the bytes of the cache of one request of so many tokens, over all ranks and without blocks: the usual
    formula.

    >>> from hpc_serve.plan import resolve, model_from_config
    >>> model = model_from_config(resolve("70b").config, name="70b")
    >>> round(full_context_bytes(model, EngineConfig(), 128_000) / 2**30, 2)
    39.06
    """
    dtype = kv_cache_dtype(model, engine)
    total = 0
    for layer in model.layers:
        cache = layer.cache
        if cache is None:
            continue
        total += cache.state_bytes(1, model.dtype_bytes)
        if cache.kind == "compressed":
            for tensor in cache.tensors:
                held = min(tokens, tensor.window) if tensor.window else tokens
                total += held // tensor.tokens_per_entry * tensor.entry_bytes
        else:
            held = min(tokens, cache.window) if cache.window else tokens
            total += (held + cache.encoder_positions) * layer_bytes_per_token(cache, 1, dtype)
    return total


def _element_bytes(dtype: str) -> float:
    if dtype == "fp8_ds_mla":
        return 1.0
    if dtype not in _ELEMENT_BYTES:
        raise InvalidRequestError(f"kv_cache_dtype is {dtype!r}: use auto, {', '.join(_ELEMENT_BYTES)}.")
    return _ELEMENT_BYTES[dtype]
