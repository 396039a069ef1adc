"""Counts the KV cache's share of one rank: the bytes by token and layer, and the blocks into which vLLM divides them.

Layers of one kind are a group. A model with several kinds (full attention, sliding windows, states) has several groups,
which take blocks of equal size from one pool. Where layers keep several tensors (DeepSeek V4's compressed cache), a
block holds one page of each tensor of a group, side by side. Drafted tokens have states of their own.

Follows vLLM's v1/core/kv_cache_utils.py (`get_kv_cache_groups`, `get_kv_cache_config_from_groups`,
`get_max_concurrency_for_kv_cache_config`, `_get_packed_kv_cache_groups`) and kv_cache_interface.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan.engine import EngineConfig, default_block_size
from hpc_serve.plan.hardware import AcceleratorKind
from hpc_serve.plan.model.spec import LayerCache, ModelSpec, Part, round_up


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPage:
    """One layer's part of a block: `page_bytes` for `block_size` tokens. `cache` has the heads of one rank."""

    cache: LayerCache
    block_size: int
    page_bytes: int

    @property
    def type(self) -> tuple[str, int]:
        """Kind and window, or a state's bytes: layers with the same need as many tokens (`is_uniform_type` in vLLM)."""
        if self.cache.kind == "state":
            return "state", self.page_bytes
        kind = "full" if self.cache.kind == "mla" else self.cache.kind
        return kind, self.cache.window or self.cache.encoder_positions

    def raised_to(self, page_bytes: int) -> LayerPage:
        """Return the page with so many bytes: of more tokens, or padded where the ratio is no whole number.

        A state has no tokens, so it is padded. Source: `unify_kv_cache_spec_page_size`.
        """
        ratio, rest = divmod(page_bytes, self.page_bytes)
        tokens = self.block_size if rest or self.cache.kind == "state" else self.block_size * ratio
        return replace(self, page_bytes=page_bytes, block_size=tokens)


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers that share a block table. A block takes `page_bytes` of each of `layers`."""

    kind: str
    layers: tuple[int, ...]
    page_bytes: tuple[int, ...]
    block_size: int
    window: int = 0
    encoder_positions: int = 0

    def blocks_per_request(
        self, max_model_len: int, in_flight_tokens: int, state_blocks: int, context_ranks: int = 1
    ) -> int:
        """Return the blocks that one request of `max_model_len` tokens may hold at once on one rank.

        `context_ranks` each hold an equal part of the tokens: `max_num_blocks_per_req` in vLLM.
        """
        if self.kind == "state":
            return state_blocks
        held = self.encoder_positions or max_model_len
        if self.kind == "sliding":
            held = min(self.window - 1 + in_flight_tokens, max_model_len)
        elif self.kind == "chunked":
            held = min(self.window + in_flight_tokens, max_model_len)
        return -(-held // (self.block_size * context_ranks)) + (1 if self.kind == "sliding" else 0)


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """All groups of a model at one tensor parallel size, on one rank.

    `bytes_per_token` are by layer. The state of a request takes `state_blocks`. `context_ranks` divide the tokens of a
    request among them (--decode-context-parallel-size).
    """

    groups: tuple[CacheGroup, ...]
    block_size: int
    bytes_per_token: tuple[int, ...]
    state_blocks: int
    context_ranks: int = 1

    def bytes_per_block(self, first_layer: int, end_layer: int) -> int:
        """Return the bytes of one block on a rank with these layers: those of its largest group."""
        return max(
            (
                sum(page for layer, page in zip(group.layers, group.page_bytes) if first_layer <= layer < end_layer)
                for group in self.groups
            ),
            default=0,
        )

    def token_bytes(self, first_layer: int, end_layer: int) -> int:
        """Return the bytes of the keys and values of one token in these layers."""
        return sum(self.bytes_per_token[first_layer:end_layer])

    def blocks_per_request(self, max_model_len: int, in_flight_tokens: int) -> int:
        """Return the blocks of all groups that one request of `max_model_len` tokens may hold."""
        return sum(
            group.blocks_per_request(max_model_len, in_flight_tokens, self.state_blocks, self.context_ranks)
            for group in self.groups
        )

    def for_one_to_start(self, step_tokens: int) -> CacheLayout:
        """Return the layout by which vLLM counts a request when it starts: an encoder's output fills a whole step.

        Source: `CrossAttentionSpec.max_memory_usage_bytes`. A request that runs takes no more than its positions.
        """
        groups = (replace(one, encoder_positions=step_tokens) if one.encoder_positions else one for one in self.groups)
        return replace(self, groups=tuple(groups))


def _grouped(pages: Sequence[tuple[int, LayerPage]]) -> tuple[CacheGroup, ...]:
    """Return the groups of a model's layers, each with its number, which all take blocks of equally many bytes a layer.

    A layer with attention and a state has two pages.

    Layers that need equally many tokens at all times are one group, whatever their pages. Otherwise pages are made
    equal, and a group has layers of one kind and size, about as many as each other group. Raises DoesNotFitError where
    vLLM cannot make pages equal.
    """
    if len({page.type for _, page in pages}) == 1:
        return (_group(dict(pages)),)
    largest = max((page.page_bytes for _, page in pages), default=0)
    if any(page.cache.kind == "mla" and largest % page.page_bytes for _, page in pages):
        return (_group(_all_kept(dict(pages))),)
    buckets: dict[LayerPage, list[int]] = {}
    for index, page in pages:
        buckets.setdefault(page.raised_to(largest), []).append(index)
    counts = [len(layers) for layers in buckets.values()] or [1]
    group_size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = []
    for page, layers in buckets.items():
        number = -(-len(layers) // group_size)
        groups += [_group(dict.fromkeys(layers[start::number], page)) for start in range(number)]
    return tuple(groups)


def _all_kept(pages: Mapping[int, LayerPage]) -> dict[int, LayerPage]:
    """Return pages of layers with windows as if they kept all tokens, for vLLM cannot pad pages of a latent cache.

    Source: `_try_get_full_allocation_fallback_groups`, which knows sliding windows alone.
    """
    kinds = {page.cache.kind for page in pages.values()}
    if "sliding" not in kinds or kinds & {"chunked", "state"}:
        sizes = ", ".join(f"{size:,}" for size in sorted({page.page_bytes for page in pages.values()}))
        raise DoesNotFitError(
            f"vLLM refuses it: pages of a latent cache do not divide the largest page (pages of {sizes} bytes); "
            "use another --tensor-parallel-size or --block-size"
        )
    return {
        index: replace(page, cache=replace(page.cache, kind="full", window=0)) if page.cache.window else page
        for index, page in pages.items()
    }


def _group(pages: Mapping[int, LayerPage]) -> CacheGroup:
    first = next(iter(pages.values()))
    return CacheGroup(
        kind=first.cache.kind,
        window=first.cache.window,
        encoder_positions=first.cache.encoder_positions,
        layers=tuple(pages),
        page_bytes=tuple(page.page_bytes for page in pages.values()),
        block_size=first.block_size,
    )


# -- groups of layers with several tensors

_Pages = dict[int, list[int]]
"""The layers that have a tensor of these many bytes a page."""


def _packed_groups(caches: Sequence[LayerCache | None]) -> tuple[CacheGroup, ...]:
    """Return the groups of these layers.

    A bucket holds the tensors with equal numbers of tokens in a block and equal windows. A bucket with several sizes of
    pages, and as many layers of each, stays whole. The most layers of such a bucket are the least number of layers in a
    group of another bucket.
    """
    buckets: dict[tuple[int, int], _Pages] = {}
    for index, cache in enumerate(caches):
        for tensor in cache.tensors if cache is not None else ():
            sizes = buckets.setdefault((tensor.block_tokens, tensor.window), {})
            sizes.setdefault(tensor.page_bytes, []).append(index)
    balanced = [pages for pages in buckets.values() if len({len(layers) for layers in pages.values()}) == 1]
    least = max((_layers(pages) for pages in balanced if len(pages) > 1), default=0)
    repeats = _least_padding([_layers(pages) for pages in balanced], least) if least else 0
    groups: list[CacheGroup] = []
    for (block_tokens, window), pages in buckets.items():
        number = -(-_layers(pages) // repeats) if repeats and pages in balanced else 1
        for start in range(number):
            layers = [(layer, page) for page, found in pages.items() for layer in found[start::number]]
            groups.append(
                CacheGroup(
                    kind="sliding" if window else "full",
                    window=window,
                    layers=tuple(layer for layer, _ in layers),
                    page_bytes=tuple(page for _, page in layers),
                    block_size=block_tokens,
                )
            )
    return tuple(groups)


def _layers(pages: _Pages) -> int:
    """Return the most layers with one size of page."""
    return max(len(layers) for layers in pages.values())


def _least_padding(counts: Sequence[int], least: int) -> int:
    """Return the size, at least `least`, that adds least when all counts are rounded up to its multiples.

    Among equal sizes it returns the largest: `_approximate_gcd` in vLLM.

    >>> _least_padding([43, 21, 20], 21)
    22
    """
    sizes = range(least, max(*counts, least) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))


# -- bytes of each layer, and the layout of all

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
    caches = [None if layer.cache and layer.cache.kind == "encoder" else layer.cache for layer in model.layers]
    align, different = 256 if engine.is_v0 else 1, dict.fromkeys(filter(None, caches))
    known = {cache: layer_bytes_per_token(cache, ranks, dtype, mla_align=align) for cache in different}
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
    groups = _grouped([(index, page) for index, cache in enumerate(caches) if cache for page in pages[cache]])
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
    groups = _packed_groups(caches)
    largest = max(group.block_size for group in groups)
    return CacheLayout(groups=groups, block_size=largest, bytes_per_token=per_token, state_blocks=0)


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
