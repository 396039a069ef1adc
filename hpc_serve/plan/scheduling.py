"""Whether vLLM schedules ahead of the device, and how many batches are then under way at once."""

from __future__ import annotations

from hpc_serve.plan.engine import EngineConfig
from hpc_serve.plan.hardware.accelerator import AcceleratorKind

_DRAFTS_IN_STEP = ("ngram", "suffix", "medusa", "mlp_speculator")
"""Methods of speculation that async scheduling does not go with."""


def is_async(engine: EngineConfig, kind: AcceleratorKind, pipeline_parallel_size: int) -> bool:
    """Return whether the host works on a step while the device computes the one before.

    Sources: `__post_init__` of VllmConfig in vLLM's config/vllm.py, and platforms/cpu.py. Pull request 27614 of 0.14
    left out pipeline stages, 0.32 includes them.
    """
    if kind == "cpu":
        return False
    if engine.async_scheduling is not None:
        return engine.async_scheduling
    excluded = engine.is_pooling or engine.speculative_method in _DRAFTS_IN_STEP
    return engine.version >= ((0, 14) if pipeline_parallel_size == 1 else (0, 32)) and not excluded


def batches_in_flight(engine: EngineConfig, kind: AcceleratorKind, pipeline_parallel_size: int) -> int:
    """Return the batches for which a sliding window keeps tokens until computed: `max_in_flight_tokens` in
    config/vllm.py.

    Before 0.26 it is one, however many are computed at once.
    """
    if engine.version < (0, 26):
        return 1
    return pipeline_parallel_size + is_async(engine, kind, pipeline_parallel_size)
