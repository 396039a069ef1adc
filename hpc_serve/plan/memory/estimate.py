"""Estimates a layout's use of the memory of its tightest GPU, in the terms that vLLM prints when it starts.

    KV cache = total × gpu_memory_utilization − weights − loading − activation peak − CUDA graphs − non-torch

vLLM computes the same from measurements: `determine_available_memory` in v1/worker/gpu_worker.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan.engine import (
    EngineConfig,
    batches_in_flight,
    gpu_memory_utilization,
    max_num_batched_tokens,
    max_num_seqs,
)
from hpc_serve.plan.hardware import AcceleratorSpec
from hpc_serve.plan.memory import overhead
from hpc_serve.plan.memory.kv_cache import CacheLayout, cache_layout
from hpc_serve.plan.memory.loaded import check_layout, offloaded_bytes, pinned_bytes, pipeline_stages
from hpc_serve.plan.memory.overhead import ProfileRun
from hpc_serve.plan.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the GPU of the tightest rank. `kv_cache_bytes` is the rest for the cache: below 0 nothing fits.

    `weight_bytes` are the checkpoint's, `model_loading_bytes` is vLLM's "Model loading took". `kv_cache_tokens` is its
    "KV cache size", `max_concurrency` its "Maximum concurrency". A request of the longest context takes
    `blocks_per_request`. If `graphs_outside` (vLLM before 0.20), the budget does not count `cuda_graph_bytes`. vLLM
    refuses fewer blocks than `least_blocks`; this is `max_num_seqs` if each sequence has a state in a block.
    `offloaded_bytes` of the rank's weights are not on the GPU. They take `pinned_bytes` of the node's memory.
    """

    total_bytes: int
    requested_bytes: int
    weight_bytes: int
    model_loading_bytes: int
    activation_bytes: int
    cuda_graph_bytes: int
    non_torch_bytes: int
    kv_cache_bytes: int
    kv_bytes_per_token: int
    block_size: int
    bytes_per_block: int
    num_blocks: int
    blocks_per_request: int
    kv_cache_tokens: int
    max_concurrency: float
    pipeline_rank: int
    max_num_seqs: int
    least_blocks: int = 0
    graphs_outside: bool = False
    offloaded_bytes: int = 0
    pinned_bytes: int = 0

    def holds(self, concurrency: int, blocks_each: int | None = None) -> bool:
        """Return whether so many requests fit at once, and one of the longest context.

        One block is vLLM's own, the null block. `blocks_each` is what one of them takes. None: what one of the longest
        context takes.
        """
        each = self.blocks_per_request if blocks_each is None else blocks_each
        needed = max(1 + concurrency * each, 1 + self.blocks_per_request, self.least_blocks)
        return self.kv_cache_bytes > 0 and self.num_blocks >= needed

    def held(self, blocks_each: int) -> int:
        """Return how many requests of so many blocks fit at once."""
        return max(0, self.num_blocks - 1) // blocks_each if blocks_each else self.max_num_seqs


def estimate_memory(
    model: ModelSpec,
    accelerator: AcceleratorSpec,
    engine: EngineConfig,
    *,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    data_parallel_size: int = 1,
    max_model_len: int,
) -> MemoryEstimate:
    """Return the memory of a layout's tightest rank: of the stage with the fewest blocks, to which vLLM limits all.

    With data parallelism, cache and sequences are those of one data-parallel rank.

    Raises DoesNotFitError where vLLM refuses the layout, InvalidRequestError for a context longer than the model's.
    """
    if max_model_len > model.max_model_len:
        raise InvalidRequestError(
            f"max_model_len is {max_model_len}, but {model.name} has at most {model.max_model_len} positions."
        )
    check_layout(model, engine, tensor_parallel_size, pipeline_parallel_size)
    layout = cache_layout(model, engine, tensor_parallel_size, kind=accelerator.kind)
    batched_tokens = max_num_batched_tokens(engine, accelerator, max_model_len)
    batches = batches_in_flight(engine, accelerator.kind, pipeline_parallel_size)
    if batched_tokens < model.encoder_positions:
        raise DoesNotFitError(
            f"vLLM refuses it: a step of {batched_tokens:,} tokens (--max-num-batched-tokens) does not hold the "
            f"{model.encoder_positions:,} positions of an audio"
        )
    if batched_tokens < (sequences := max_num_seqs(engine, accelerator)):
        raise DoesNotFitError(f"vLLM refuses it: --max-num-batched-tokens is less than --max-num-seqs {sequences:,}")
    to_start = layout.for_one_to_start(batched_tokens)
    per_request = to_start.blocks_per_request(max_model_len, batched_tokens * batches)
    sizes = tensor_parallel_size, pipeline_parallel_size, data_parallel_size
    runs = profile_runs(model, accelerator, engine, sizes, max_model_len)
    estimates = [_stage_estimate(run, layout, per_request) for run in runs]
    return min(estimates, key=lambda estimate: (estimate.num_blocks, estimate.kv_cache_bytes))


def profile_runs(
    model: ModelSpec,
    accelerator: AcceleratorSpec,
    engine: EngineConfig,
    sizes: tuple[int, int, int],
    max_model_len: int,
) -> list[ProfileRun]:
    """Return the profile run of each stage of a layout. `sizes` are those of tensor, pipeline and data parallelism.

    Raises DoesNotFitError where vLLM refuses the layout.
    """
    tensor, pipeline, data = sizes
    if engine.enable_eplb and (tensor * data == 1 or accelerator.kind != "gpu"):
        raise DoesNotFitError("vLLM refuses it: EPLB requires tensor or data parallelism, and GPUs")
    expert_parallel = engine.enable_expert_parallel and bool(model.num_experts)
    return [
        ProfileRun(
            model=model,
            stage=stage,
            ranks=tensor,
            data_ranks=data,
            expert_ranks=tensor * data if expert_parallel else 1,
            accelerator=accelerator,
            engine=engine,
            max_model_len=max_model_len,
        )
        for stage in pipeline_stages(model, tensor, pipeline, data, expert_parallel=expert_parallel)
    ]


def _stage_estimate(run: ProfileRun, layout: CacheLayout, per_request: int) -> MemoryEstimate:
    engine, stage, total = run.engine, run.stage, run.accelerator.total_bytes
    sequences = max_num_seqs(engine, run.accelerator)
    counts_blocks = run.model.has_states and overhead.needs_state_blocks(engine) and run.accelerator.kind == "gpu"
    requested = math.ceil(total * gpu_memory_utilization(engine))
    activation, graphs = overhead.activation_bytes(run), overhead.cuda_graph_bytes(run)
    non_torch, offloaded = overhead.non_torch_bytes(run), offloaded_bytes(stage, engine)
    weights = stage.weight_bytes - offloaded
    padding = overhead.row_padding_bytes(run.model, stage.layers, run.accelerator, run.ranks, run.expert_ranks)
    loading = stage.loading_bytes + padding
    taken = weights + loading + activation + non_torch
    if engine.subtracts_cuda_graphs:
        taken += graphs
    available = requested - taken
    if cache := engine.kv_cache_memory_bytes:  # vLLM takes it beside the rest, whatever share it may use
        missing = taken + cache - total
        requested, available = (taken + cache, cache) if missing <= 0 else (total, -missing)
    bytes_per_block = layout.bytes_per_block(stage.first_layer, stage.end_layer)
    blocks = max(0, available) // bytes_per_block if bytes_per_block else int(not layout.groups)
    concurrency = blocks / per_request if per_request else 0.0
    if engine.prints_request_tokens:
        tokens = int(concurrency * run.max_model_len)
    else:
        tokens = blocks // max(1, len(layout.groups)) * layout.block_size
    return MemoryEstimate(
        total_bytes=total,
        requested_bytes=requested,
        weight_bytes=weights,
        model_loading_bytes=weights + loading,
        activation_bytes=activation,
        cuda_graph_bytes=graphs,
        non_torch_bytes=non_torch,
        kv_cache_bytes=available,
        kv_bytes_per_token=layout.token_bytes(stage.first_layer, stage.end_layer),
        block_size=layout.block_size,
        bytes_per_block=bytes_per_block,
        num_blocks=blocks,
        blocks_per_request=per_request,
        kv_cache_tokens=tokens,
        max_concurrency=concurrency,
        pipeline_rank=stage.rank,
        max_num_seqs=sequences,
        least_blocks=sequences if counts_blocks else 0,
        graphs_outside=not engine.subtracts_cuda_graphs,
        offloaded_bytes=offloaded,
        pinned_bytes=pinned_bytes(stage, engine),
    )
