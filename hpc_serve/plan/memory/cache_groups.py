"""Groups the layers that share blocks of the KV cache, and counts the blocks that one request takes of them.

kv_cache.py knows the bytes that a layer takes. Follows vLLM's v1/core/kv_cache_utils.py (`get_kv_cache_groups`,
`get_kv_cache_config_from_groups`, `get_max_concurrency_for_kv_cache_config`) and kv_cache_interface.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_serve.errors import DoesNotFitError
from hpc_serve.plan.model.spec import LayerCache


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
        return (
            "full" if self.cache.kind == "mla" else self.cache.kind,
            self.cache.window or self.cache.encoder_positions,
        )

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


def grouped(pages: Sequence[tuple[int, LayerPage]]) -> tuple[CacheGroup, ...]:
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
