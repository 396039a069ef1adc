"""Changes to vLLM 0.32's CPU backend: without them, sixteen ranks on two hosts and two cores do not come up or answer,
and data-parallel ranks do not share experts.

Each names what happens without it. They are about the stand-in for GPUs alone: on real ones none of this code runs.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.parallel_state import get_pp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.model_loader import base_loader
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

_log = init_logger("vllm.ray_on_cpu")
BUSY_S = 1.0
STEP_MS = 20


def apply() -> None:
    """Makes the changes; once or more often is the same."""
    CpuCommunicator._all_group_ranks_share_shm_group_name = _never_share_memory
    SpinCondition.wait = _wait_without_spinning
    CPUWorker.compile_or_warm_up_model = _with_pipeline_buffers
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv
    CPUUnquantizedExperts.apply = _with_own_experts
    base_loader.process_weights_after_loading = _with_bytes_logged


def _never_share_memory(communicator: CpuCommunicator) -> bool:
    """Ranks talk over sockets.

    vLLM takes ranks of different hosts for neighbours ("open shm in SHMManager failed"): the name by which it compares
    them holds the engine's port alone. And ranks that share memory spin while they wait, each on the others' core.
    """
    return False


_wait = SpinCondition.wait


def _wait_without_spinning(condition: SpinCondition, timeout_ms: int | None = None) -> None:
    """Waits for the writer's word: readers spin for a second after each message, which takes the core from the writer.

    The word may be lost while messages are frequent, so the wait is short then.
    """
    is_busy = time.monotonic() < condition.last_read + BUSY_S
    condition.busy_loop_s = 0
    _wait(condition, STEP_MS if is_busy else timeout_ms)


_compile_or_warm_up_model = CPUWorker.compile_or_warm_up_model


def _with_pipeline_buffers(worker: CPUWorker) -> CompilationTimes:
    """Makes the buffers that a later pipeline stage receives into.

    The warm-up alone makes them, and --enforce-eager skips it: the first request ends the engine with
    `assert self.intermediate_tensors is not None`.
    """
    times = _compile_or_warm_up_model(worker)
    runner = worker.model_runner
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=worker.model_config.dtype, device=worker.device
        )
    return times


def _all_gatherv(communicator: CpuCommunicator, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Gather tensors of `sizes` rows from all ranks, one after the other.

    vLLM's CPU communicator has no such collective: a start with data parallelism ends in NotImplementedError.
    """
    if isinstance(input_, list):
        return [_all_gatherv(communicator, one, dim, sizes) for one in input_]
    rows = sizes or [input_.shape[0]] * communicator.world_size
    padded = input_.new_zeros((max(rows), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    gathered = communicator.all_gather(padded, dim=0).split(max(rows))
    return torch.cat([one[:count] for one, count in zip(gathered, rows)])


def _reduce_scatterv(
    communicator: CpuCommunicator, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """Return this rank's rows of the sum over all ranks."""
    total = communicator.all_reduce(input_.contiguous())
    rows = sizes or [total.shape[0] // communicator.world_size] * communicator.world_size
    return total.split(rows)[communicator.rank_in_group].contiguous()


_apply = CPUUnquantizedExperts.apply


def _with_own_experts(
    experts: CPUUnquantizedExperts,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    *others: Any,
    **named: Any,
) -> None:
    """Compute the chosen experts that this rank has. Those of other ranks weigh nothing here.

    vLLM's CPU kernel takes no map of experts: with --enable-expert-parallel it reads past the rank's own weights.
    """
    if expert_map is not None:
        local = expert_map[topk_ids.long()]
        topk_weights = torch.where(local < 0, torch.zeros_like(topk_weights), topk_weights)
        topk_ids = local.clamp(min=0).to(topk_ids.dtype)
    first = output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map
    _apply(experts, *first, *others, **named)


_process_weights_after_loading = base_loader.process_weights_after_loading


def _with_bytes_logged(model: torch.nn.Module, *others: Any) -> None:
    """Log the bytes of this rank's weights, before the CPU backend replaces matrices by packed ones."""
    tensors = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    _log.info("Weights of this rank: %d bytes", sum(one.numel() * one.element_size() for one in tensors.values()))
    _process_weights_after_loading(model, *others)
