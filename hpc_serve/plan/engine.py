"""What the engine is asked for, in vLLM's own names, and vLLM's own defaults for what is left out.

Defaults depend on the version and on the accelerator; both are looked up here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.accelerator import GIB, AcceleratorSpec

PINNED_VERSION = "0.32.0"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of `vllm serve` that decide memory. None: vLLM's default (or, for the layout, the planner's choice)."""

    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    enforce_eager: bool = False
    enable_expert_parallel: bool = False
    vllm_version: str = PINNED_VERSION

    def __post_init__(self) -> None:
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "kv_cache_memory_bytes",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name} is {value}: it must be at least 1.")
        utilization = self.gpu_memory_utilization
        if utilization is not None and not 0 < utilization <= 1:
            raise InvalidRequestError(f"gpu_memory_utilization is {utilization}: it must be above 0 and at most 1.")

    @property
    def version(self) -> tuple[int, int]:
        """(major, minor) of the vLLM assumed."""
        parts = self.vllm_version.split(".")
        return int(parts[0]), int(parts[1])


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What the service must hold at once: `concurrency` requests of `max_model_len` tokens each.

    The defaults are vLLM's own condition for starting: one request of the longest context the model allows.
    """

    max_model_len: int | None = None
    concurrency: int = 1

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len < 1:
            raise InvalidRequestError(f"max_model_len is {self.max_model_len}: it must be at least 1.")
        if self.concurrency < 1:
            raise InvalidRequestError(f"concurrency is {self.concurrency}: it must be at least 1.")


def default_gpu_memory_utilization(engine: EngineConfig) -> float:
    """vLLM's default: 0.92 since 0.20 (config/cache.py), 0.9 before."""
    return 0.92 if engine.version >= (0, 20) else 0.9


def default_max_num_batched_tokens(accelerator: AcceleratorSpec) -> int:
    """Tokens of one step of the API server (engine/arg_utils.py, `_get_default_batched_tokens_and_seqs`)."""
    if accelerator.total_bytes >= 160 * GIB:
        return 16384
    if accelerator.total_bytes >= 70 * GIB and not accelerator.name.startswith("a100"):
        return 8192
    return 2048


def default_max_num_seqs(accelerator: AcceleratorSpec) -> int:
    """Sequences of one step of the API server, from the same table."""
    return 1024 if default_max_num_batched_tokens(accelerator) > 2048 else 256
