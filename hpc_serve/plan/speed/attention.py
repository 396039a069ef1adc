"""Counts what attention computes and reads in a step: operations, bytes of the cache, and of an indexer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_serve.plan.engine import EngineConfig
from hpc_serve.plan.memory.kv_cache import kv_cache_dtype, layer_bytes_per_token
from hpc_serve.plan.model.spec import DecoderLayer, LayerCache, ModelSpec, distinct_layers
from hpc_serve.plan.model.weights import Linear, Weight


@dataclass(frozen=True, kw_only=True)
class Attention:
    """`count` layers of a stage with equal caches, on one rank.

    The cache has `bytes_per_token`. `state_bytes` are read and written whatever the length. A generated token takes
    `decode_flops` operations for each token of its context, a token of a prompt takes `prefill_flops`, because a latent
    is expanded there. An encoder's tokens attend in both directions, which is twice as many. `window` 0: attention to
    all tokens. An indexer reads `index_bytes` of every token of the context and takes `index_flops` for it, whatever
    the window.
    """

    count: int
    window: int
    bytes_per_token: float
    decode_flops: int
    prefill_flops: int
    state_bytes: int = 0
    index_bytes: int = 0
    index_flops: int = 0

    def held(self, length: float) -> float:
        """Return the tokens that a token at that position attends to."""
        return min(length, self.window) if self.window else length


def attention_of(
    layers: Sequence[DecoderLayer], model: ModelSpec, engine: EngineConfig, ranks: int
) -> tuple[Attention, ...]:
    """Return the attention of these layers of a model, with so many tensor-parallel ranks."""
    dtype = kv_cache_dtype(model, engine)
    heads = model.num_attention_heads / ranks
    counts: Counter[tuple[LayerCache, tuple[int, int]]] = Counter()
    for layer, alike in distinct_layers(layers):
        if layer.cache is not None:
            widths = _latent_widths(layer.block.weights) if layer.cache.kind == "mla" else (0, 0)
            counts[layer.cache, widths] += alike
    found: list[Attention] = []
    for (cache, (query_width, value_width)), count in counts.items():
        if cache.kind == "compressed":
            found += _compressed_attention(cache, count, heads)
            continue
        decode = prefill = 2 * heads * (cache.head_dim + cache.value_dim)
        if cache.kind == "mla":
            rotary = query_width - value_width
            decode = 2 * heads * (2 * cache.head_dim - rotary)
            prefill = 2 * heads * (query_width + value_width)
        if cache.kind == "encoder":
            decode, prefill = 0, 2 * prefill
        found.append(
            Attention(
                count=count,
                window=cache.window or cache.chosen_tokens,
                bytes_per_token=layer_bytes_per_token(cache, ranks, dtype) - cache.index_bytes,
                state_bytes=cache.state_bytes(ranks, model.dtype_bytes),
                decode_flops=int(decode),
                prefill_flops=int(prefill),
                index_bytes=cache.index_bytes,
                index_flops=cache.index_flops,
            )
        )
    return tuple(found)


def _compressed_attention(cache: LayerCache, count: int, heads: float) -> Iterator[Attention]:
    """Yield attention to each tensor that is attended to.

    An entry of several tokens counts in part for each of them.
    """
    for tensor in cache.tensors:
        if tensor.is_attended:
            flops = int(4 * heads * cache.head_dim / tensor.tokens_per_entry)
            yield Attention(
                count=count,
                window=tensor.window or cache.chosen_tokens,
                bytes_per_token=tensor.entry_bytes / tensor.tokens_per_entry,
                decode_flops=flops,
                prefill_flops=flops,
                index_bytes=0 if tensor.window else cache.index_bytes,
                index_flops=0 if tensor.window else cache.index_flops,
            )


def _latent_widths(weights: tuple[Weight, ...]) -> tuple[int, int]:
    """Return (query, value) features of a head with latent attention, read from its projections."""
    query = value = 0
    for weight in weights:
        if isinstance(weight, Linear) and weight.name.endswith(("q_b_proj", "q_proj")):
            query = weight.outputs[0].width
        elif isinstance(weight, Linear) and weight.name.endswith("o_proj"):
            value = weight.inputs.width
    return query, value
