"""How vLLM divides the KV cache into blocks, and how many blocks one request takes.

Layers of one kind are a group. A model with several kinds (full attention, sliding windows, states) has several groups,
which take blocks of equal size from one pool. Drafted tokens have states of their own.
Follows vLLM's v1/core/kv_cache_utils.py (`get_kv_cache_groups`,
`get_kv_cache_config_from_groups`, `get_max_concurrency_for_kv_cache_config`) and kv_cache_interface.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan.engine import EngineConfig, default_block_size
from hpc_serve.plan.hardware.accelerator import AcceleratorKind
from hpc_serve.plan.model.spec import LayerCache, ModelSpec
from hpc_serve.plan.model.weights import Part, round_up

_PER_TOKEN_HEAD_SCALE_BYTES = 4
_PACKED_LATENT_BYTES = 656
"""DeepSeek's packed format of a latent in fp8 with its scales, in which vLLM's FlashMLA keeps sparse attention's."""
_ELEMENT_BYTES = {
    "bfloat16": 2.0,
    "float16": 2.0,
    "half": 2.0,
    "float32": 4.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_inc": 1.0,
    "int8": 1.0,
    "fp8_per_token_head": 1.0,
    "int8_per_token_head": 1.0,
    "int4_per_token_head": 0.5,
    "nvfp4": 0.5 + 1 / 16,
}


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers that share a block table."""

    kind: str
    layers: tuple[int, ...]
    block_size: int
    window: int = 0

    def blocks_per_request(self, max_model_len: int, in_flight_tokens: int, state_blocks: int) -> int:
        """Blocks that one request of `max_model_len` tokens may hold at once."""
        if self.kind == "state":
            return state_blocks
        held = max_model_len
        if self.kind == "sliding":
            held = min(self.window - 1 + in_flight_tokens, max_model_len)
        elif self.kind == "chunked":
            held = min(self.window + in_flight_tokens, max_model_len)
        return -(-held // self.block_size) + (1 if self.kind == "sliding" else 0)


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """All groups of a model at one tensor parallel size, on one rank.

    `bytes_per_token` and `page_bytes` (of one block) are by layer. The state of a request takes `state_blocks`.
    """

    groups: tuple[CacheGroup, ...]
    block_size: int
    bytes_per_token: tuple[int, ...]
    page_bytes: tuple[int, ...]
    state_blocks: int

    def bytes_per_block(self, first_layer: int, end_layer: int) -> int:
        """Bytes of one block on a rank with these layers: those of its largest group."""
        return max(
            (
                sum(self.page_bytes[layer] for layer in group.layers if first_layer <= layer < end_layer)
                for group in self.groups
            ),
            default=0,
        )

    def token_bytes(self, first_layer: int, end_layer: int) -> int:
        """Bytes of the keys and values of one token in these layers."""
        return sum(self.bytes_per_token[first_layer:end_layer])

    def blocks_per_request(self, max_model_len: int, in_flight_tokens: int) -> int:
        """Blocks of all groups that one request of `max_model_len` tokens may hold."""
        return sum(
            group.blocks_per_request(max_model_len, in_flight_tokens, self.state_blocks) for group in self.groups
        )


def kv_cache_dtype(model: ModelSpec, engine: EngineConfig) -> str:
    """The type of the cache: what is asked for, else what the checkpoint says, else the model's."""
    if engine.kv_cache_dtype != "auto":
        return engine.kv_cache_dtype
    return model.quantization.kv_cache_dtype or model.dtype


def layer_bytes_per_token(cache: LayerCache, ranks: int, dtype: str, *, mla_align: int = 1) -> int:
    """Bytes of one token in one layer on one rank.

    >>> layer_bytes_per_token(LayerCache(kind="full", kv_heads=8, head_dim=128, value_dim=128), 8, "bfloat16")
    512
    """
    if cache.kind == "state":
        return 0
    element = _element_bytes(dtype)
    if cache.kind == "mla":
        packed = dtype == "fp8_ds_mla" or (cache.chosen_tokens > 0 and dtype.startswith("fp8"))
        latent = _PACKED_LATENT_BYTES if packed else round_up(int(cache.head_dim * element), mla_align)
        return latent + cache.index_bytes
    heads = Part(cache.kv_heads, 1, replicate=True).per_rank(ranks, "the KV cache")
    scales = 2 * _PER_TOKEN_HEAD_SCALE_BYTES if dtype.endswith("_per_token_head") else 0
    return heads * (int((cache.head_dim + cache.value_dim) * element) + scales)


def cache_layout(model: ModelSpec, engine: EngineConfig, ranks: int, *, kind: AcceleratorKind = "gpu") -> CacheLayout:
    """The groups that vLLM makes of a model's layers, for `ranks` tensor-parallel ranks on that kind of accelerator.

    Raises DoesNotFitError where ranks cannot divide the KV heads, InvalidRequestError for an unknown kv_cache_dtype.
    """
    dtype = kv_cache_dtype(model, engine)
    mla_align = 256 if engine.is_v0 else 1
    caches = [layer.cache for layer in model.layers]
    known: dict[LayerCache, int] = {}
    for cache in caches:
        if cache is not None and cache not in known:
            known[cache] = layer_bytes_per_token(cache, ranks, dtype, mla_align=mla_align)
    per_token = tuple(known[cache] if cache is not None else 0 for cache in caches)
    block_size = engine.block_size or default_block_size(engine, kind, is_mla=model.is_mla)
    state_dtype_bytes = 4 if kind == "cpu" else model.dtype_bytes
    states = {cache: _state_bytes(cache, ranks, state_dtype_bytes) for cache in known if cache.kind == "state"}
    if states:
        block_size = _block_size_for_states(block_size, max(states.values()), max(known.values()))
    page = block_size * max(per_token, default=0)
    pages = tuple(
        0 if cache is None else page if cache.kind == "state" else block_size * size
        for cache, size in zip(caches, per_token)
    )
    return CacheLayout(
        groups=_groups(caches, pages, block_size, windows_saved=engine.saves_windows),
        block_size=block_size,
        bytes_per_token=per_token,
        page_bytes=pages,
        state_blocks=(2 if engine.caches_state_prefixes else 1) + engine.speculative_tokens,
    )


def full_context_bytes(model: ModelSpec, engine: EngineConfig, tokens: int) -> int:
    """Bytes of the cache of one request of so many tokens, over all ranks and without blocks: the usual formula.

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
        if cache.kind == "state":
            total += _state_bytes(cache, 1, model.dtype_bytes)
        else:
            held = min(tokens, cache.window) if cache.window else tokens
            total += held * layer_bytes_per_token(cache, 1, dtype)
    return total


def _element_bytes(dtype: str) -> float:
    if dtype == "fp8_ds_mla":
        return 1.0
    if dtype not in _ELEMENT_BYTES:
        raise InvalidRequestError(f"kv_cache_dtype is {dtype!r}: use auto, {', '.join(_ELEMENT_BYTES)}.")
    return _ELEMENT_BYTES[dtype]


def _state_bytes(cache: LayerCache, ranks: int, dtype_bytes: int) -> int:
    total = 0
    for elements, element_bytes in cache.state:
        if elements % ranks:
            raise DoesNotFitError(f"{ranks} ranks do not divide a layer's state of {elements} elements")
        total += elements // ranks * (element_bytes or dtype_bytes)
    return total


def _block_size_for_states(block_size: int, state_bytes: int, token_bytes: int) -> int:
    """Tokens of a block, so that a page of attention holds a state: `_align_hybrid_block_size` in platforms/."""
    return max(block_size, block_size * -(-state_bytes // (block_size * token_bytes)))


def _groups(
    caches: Sequence[LayerCache | None], pages: Sequence[int], block_size: int, *, windows_saved: bool
) -> tuple[CacheGroup, ...]:
    """Groups of equally many layers of one kind. Where all layers are of one kind, they are one group."""
    kinds: dict[tuple[str, int], list[int]] = {}
    for index, cache in enumerate(caches):
        if cache is not None:
            is_full = not windows_saved and cache.kind in ("sliding", "chunked")
            kinds.setdefault(("full", 0) if is_full else (cache.kind, cache.window), []).append(index)
    if len(kinds) == 1:
        ((kind, window), layers) = kinds.popitem()
        return (CacheGroup(kind=kind, window=window, layers=tuple(layers), block_size=block_size),)
    buckets: dict[tuple[str, int, int], list[int]] = {}
    for (kind, window), layers in kinds.items():
        for layer in layers:
            buckets.setdefault((kind, window, pages[layer]), []).append(layer)
    counts = [len(layers) for layers in buckets.values()] or [1]
    group_size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = []
    for (kind, window, _), layers in buckets.items():
        number = -(-len(layers) // group_size)
        groups += [
            CacheGroup(kind=kind, window=window, layers=tuple(layers[start::number]), block_size=block_size)
            for start in range(number)
        ]
    return tuple(groups)
