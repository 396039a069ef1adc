"""The groups of layers that share blocks of the KV cache, and the blocks that one request takes of them.

Which bytes a layer takes is kv_cache.py's. Follows vLLM's v1/core/kv_cache_utils.py (`get_kv_cache_groups`,
`get_kv_cache_config_from_groups`, `get_max_concurrency_for_kv_cache_config`) and kv_cache_interface.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_serve.plan.model.spec import LayerCache


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers that share a block table. A block takes `page_bytes` of each of `layers`."""

    kind: str
    layers: tuple[int, ...]
    page_bytes: tuple[int, ...]
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

    `bytes_per_token` are by layer. The state of a request takes `state_blocks`.
    """

    groups: tuple[CacheGroup, ...]
    block_size: int
    bytes_per_token: tuple[int, ...]
    state_blocks: int

    def bytes_per_block(self, first_layer: int, end_layer: int) -> int:
        """Bytes of one block on a rank with these layers: those of its largest group."""
        return max(
            (
                sum(page for layer, page in zip(group.layers, group.page_bytes) if first_layer <= layer < end_layer)
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


def groups_by_kind(
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
        return (_group(kind, window, layers, pages, block_size),)
    buckets: dict[tuple[str, int, int], list[int]] = {}
    for (kind, window), layers in kinds.items():
        for layer in layers:
            buckets.setdefault((kind, window, pages[layer]), []).append(layer)
    counts = [len(layers) for layers in buckets.values()] or [1]
    group_size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = []
    for (kind, window, _), layers in buckets.items():
        number = -(-len(layers) // group_size)
        groups += [_group(kind, window, layers[start::number], pages, block_size) for start in range(number)]
    return tuple(groups)


def _group(kind: str, window: int, layers: Sequence[int], pages: Sequence[int], block_size: int) -> CacheGroup:
    return CacheGroup(
        kind=kind,
        window=window,
        layers=tuple(layers),
        page_bytes=tuple(pages[layer] for layer in layers),
        block_size=block_size,
    )
