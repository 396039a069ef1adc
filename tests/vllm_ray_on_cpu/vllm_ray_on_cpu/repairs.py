"""Changes to vLLM 0.32's CPU backend: without them, sixteen ranks on two hosts and two cores do not come up or answer.

Each names what happens without it. They are about the stand-in for GPUs alone: on real ones none of this code runs.
"""

from __future__ import annotations

import time

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

BUSY_S = 1.0
STEP_MS = 20


def apply() -> None:
    """Makes the changes; once or more often is the same."""
    CpuCommunicator._all_group_ranks_share_shm_group_name = _never_share_memory
    SpinCondition.wait = _wait_without_spinning
    CPUWorker.compile_or_warm_up_model = _with_pipeline_buffers


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
