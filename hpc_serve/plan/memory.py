"""What a layout takes on the GPU that holds most, in the terms vLLM prints when it starts.

    KV cache = total × gpu_memory_utilization − weights − non-torch − activation peak − CUDA graphs

as `determine_available_memory` in vLLM's v1/worker/gpu_worker.py computes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpc_serve.plan.accelerator import GIB, AcceleratorSpec
from hpc_serve.plan.engine import (
    EngineConfig,
    default_gpu_memory_utilization,
    default_max_num_batched_tokens,
)
from hpc_serve.plan.model import DecoderLayer, ModelSpec
from hpc_serve.plan.weights import Block


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one GPU of the tightest rank. `kv_cache_bytes` is what is left for the cache (below 0: it does not fit).

    `kv_cache_tokens` and `max_concurrency` are what vLLM logs as "GPU KV cache size" and "Maximum concurrency".
    """

    total_bytes: int
    requested_bytes: int
    weight_bytes: int
    activation_bytes: int
    cuda_graph_bytes: int
    non_torch_bytes: int
    kv_cache_bytes: int
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    kv_cache_tokens: int
    max_concurrency: float
    pipeline_rank: int


def pipeline_layers(num_hidden_layers: int, pipeline_parallel_size: int) -> list[int]:
    """Layers of each stage, as vLLM deals them (`get_pp_indices` in distributed/utils.py).

    What is left over goes to the last stages but one, never to the last.

    >>> pipeline_layers(61, 4)
    [15, 15, 16, 15]
    """
    layers = [num_hidden_layers // pipeline_parallel_size] * pipeline_parallel_size
    for index in range(2, num_hidden_layers % pipeline_parallel_size + 2):
        layers[-index] += 1
    return layers


def stage_weight_bytes(model: ModelSpec, tensor_parallel_size: int, pipeline_parallel_size: int) -> list[int]:
    """Bytes of weights on a rank of each pipeline stage. Raises DoesNotFitError where vLLM refuses the layout."""
    known: dict[int, int] = {}

    def of(block: Block) -> int:
        if id(block) not in known:
            known[id(block)] = block.bytes_per_rank(tensor_parallel_size)
        return known[id(block)]

    stages, start = [], 0
    counts = pipeline_layers(model.num_hidden_layers, pipeline_parallel_size)
    for rank, count in enumerate(counts):
        total = sum(of(layer.block) for layer in model.layers[start : start + count]) + of(model.everywhere)
        is_last = rank == len(counts) - 1
        if rank == 0 or (is_last and model.head is None):
            total += model.embedding.bytes_per_rank(tensor_parallel_size)
        if is_last:
            total += of(model.final)
            if model.head is not None:
                total += model.head.bytes_per_rank(tensor_parallel_size)
        stages.append(total)
        start += count
    return stages


def _cache_bytes_per_token(layer: DecoderLayer, tensor_parallel_size: int, element_bytes: int) -> int:
    cache = layer.cache
    if cache is None:
        return 0
    heads = max(1, cache.kv_heads // tensor_parallel_size)
    return heads * (cache.head_dim + cache.value_dim) * element_bytes


def estimate_memory(
    model: ModelSpec,
    accelerator: AcceleratorSpec,
    engine: EngineConfig,
    *,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    max_model_len: int,
) -> MemoryEstimate:
    """The memory of the tightest rank of a layout. Raises DoesNotFitError where vLLM refuses the layout."""
    utilization = engine.gpu_memory_utilization or default_gpu_memory_utilization(engine)
    requested = math.ceil(accelerator.total_bytes * utilization)
    batched_tokens = engine.max_num_batched_tokens or default_max_num_batched_tokens(accelerator)
    activation = batched_tokens * (4 * model.hidden_size + 3 * model.intermediate_size // tensor_parallel_size) * 2
    graphs = 0 if engine.enforce_eager else GIB
    non_torch = GIB // 8 if tensor_parallel_size * pipeline_parallel_size == 1 else GIB
    element_bytes = 1 if engine.kv_cache_dtype.startswith("fp8") else model.dtype_bytes
    block_size = engine.block_size or 16
    tightest: MemoryEstimate | None = None
    start = 0
    stages = stage_weight_bytes(model, tensor_parallel_size, pipeline_parallel_size)
    for rank, (weights, count) in enumerate(
        zip(stages, pipeline_layers(model.num_hidden_layers, pipeline_parallel_size))
    ):
        layers = model.layers[start : start + count]
        start += count
        per_token = sum(_cache_bytes_per_token(layer, tensor_parallel_size, element_bytes) for layer in layers)
        available = requested - weights - activation - graphs - non_torch
        blocks = max(0, available) // (per_token * block_size)
        estimate = MemoryEstimate(
            total_bytes=accelerator.total_bytes,
            requested_bytes=requested,
            weight_bytes=weights,
            activation_bytes=activation,
            cuda_graph_bytes=graphs,
            non_torch_bytes=non_torch,
            kv_cache_bytes=available,
            kv_bytes_per_token=per_token,
            block_size=block_size,
            num_blocks=blocks,
            kv_cache_tokens=blocks * block_size,
            max_concurrency=blocks / math.ceil(max_model_len / block_size),
            pipeline_rank=rank,
        )
        if tightest is None or (estimate.num_blocks, estimate.kv_cache_bytes) < (
            tightest.num_blocks,
            tightest.kv_cache_bytes,
        ):
            tightest = estimate
    assert tightest is not None
    return tightest
