"""Groups the layers of models with several cache tensors of different page sizes: DeepSeek V4's compressed cache.

A block holds one page of each tensor of a group, side by side. Follows `_get_packed_kv_cache_groups` in vLLM's
v1/core/kv_cache_utils.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpc_serve.plan.memory.cache_groups import CacheGroup
from hpc_serve.plan.model.spec import LayerCache

_Pages = dict[int, list[int]]
"""The layers that have a tensor of these many bytes a page."""


def packed_groups(caches: Sequence[LayerCache | None]) -> tuple[CacheGroup, ...]:
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
