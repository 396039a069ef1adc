"""The engine's options in vLLM's own names, what their values may be, and vLLM's defaults where none is given.

Defaults depend on vLLM's version and on the accelerator, and only this module looks them up. One version is pinned.
Earlier versions are known as far as published measurements need them. 0.33 is planned with the memory model of 0.32:
no default that is looked up here differs. A newer version is planned as 0.33.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.hardware import AcceleratorKind, AcceleratorSpec
from hpc_serve.plan.model.checkpoint import DEFAULT_LORA_RANK
from hpc_serve.units import GIB, at_least_one

PINNED_VERSION = "0.32.0"
LONGEST_THAT_FITS = -1
"""The context for `--max-model-len auto`, as vLLM writes it: the model's, or as long as the machines hold."""
LAYOUT_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
Arrivals = Literal["steady", "burst"]
"""How requests come: always so many in flight, or all at once and then no more."""
_DRAFTS_IN_STEP = ("ngram", "suffix", "medusa", "mlp_speculator")
"""Methods of speculation that async scheduling does not go with."""
_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_LARGEST_GIB = 1_000_000
_Rule: TypeAlias = tuple[Callable[[Any], bool], str]
_BY_TYPE: dict[str, _Rule] = {
    "int | None": (lambda value: value >= 1, "at least 1"),
    "Mapping[str, Any] | None": (lambda value: isinstance(value, Mapping), "a JSON object, as {...}"),
}
_BY_NAME: dict[str, _Rule] = {
    "speculative_config's method": (lambda value: isinstance(value, str), "a text"),
    "speculative_config's model": (lambda value: isinstance(value, str), "a text"),
    "speculative_config's num_speculative_tokens": (lambda one: _is_count(one, 1), "a whole number from 1 to 1000"),
    "eplb_config's num_redundant_experts": (lambda value: _is_count(value, 0), "a whole number from 0 to 1000"),
    "compilation_config's mode": (lambda value: type(value) in (int, str), "a number from 0 to 3, or its name"),
    "compilation_config's cudagraph_mode": (lambda value: str(value).upper() in _MODES, ", ".join(_MODES)),
    "compilation_config's cudagraph_capture_sizes": (lambda value: _are_sizes(value), "a list of sizes"),
    "compilation_config's max_cudagraph_capture_size": (lambda value: _are_sizes([value]), "a size"),
    "limit_mm_per_prompt": (lambda value: _are_limits(value), 'a JSON object of numbers from 0 on, as {"image": 2}'),
    "optimization_level": (lambda value: value in ("0", "1", "2", "3"), "from 0 to 3"),
    "cpu_offload_gb": (lambda value: 0 <= value <= _LARGEST_GIB, f"from 0 to {_LARGEST_GIB:,} GiB"),
    "kv_offloading_size": (lambda value: 0 <= value <= _LARGEST_GIB, f"from 0 to {_LARGEST_GIB:,} GiB"),
    "gpu_memory_utilization": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
}
"""What the values of options and of keys within them must be: by the option's type, and by name."""


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= 1000


def _are_limits(value: object) -> bool:
    """Return whether each kind of input has a number, or {"count": NUMBER} with sizes."""
    if not isinstance(value, Mapping):
        return False
    counts = [one.get("count", 0) if isinstance(one, Mapping) else one for one in value.values()]
    return all(isinstance(count, int) and count >= 0 for count in counts)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= 2**20 for size in value)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of `vllm serve` that decide about memory and speed.

    None: vLLM's default, or for the layout the planner's choice. `use_v1` False is the engine before V1. vLLM up to
    0.9 has both. If `takes_whole_texts`, a step has no part of a text, as with encoders. `uncounted` are further
    options that are given and may change memory or speed.
    """

    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
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
    all2all_backend: str = "allgather_reducescatter"
    async_scheduling: bool | None = None
    enable_lora: bool = False
    max_loras: int | None = None
    max_lora_rank: int | None = None
    fully_sharded_loras: bool = False
    lora_target_modules: tuple[str, ...] | None = None
    cpu_offload_gb: float | None = None
    enable_prefix_caching: bool | None = None
    language_model_only: bool = False
    limit_mm_per_prompt: Mapping[str, Any] | None = field(default=None, hash=False)
    speculative_config: Mapping[str, Any] | None = field(default=None, hash=False)
    kv_transfer_config: Mapping[str, Any] | None = field(default=None, hash=False)
    kv_offloading_size: float | None = None
    compilation_config: Mapping[str, Any] | None = field(default=None, hash=False)
    optimization_level: str | None = None
    disable_hybrid_kv_cache_manager: bool = False
    mamba_ssm_cache_dtype: str = "auto"
    enable_eplb: bool = False
    eplb_config: Mapping[str, Any] | None = field(default=None, hash=False)
    runner: str = "auto"
    hf_overrides: Mapping[str, Any] | None = field(default=None, hash=False)
    vllm_version: str = PINNED_VERSION
    use_v1: bool | None = None
    takes_whole_texts: bool = False
    uncounted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        by_type = {one.name: _BY_TYPE[str(one.type)] for one in fields(self) if str(one.type) in _BY_TYPE}
        for name, (is_right, wanted) in (by_type | _BY_NAME).items():
            option, _, key = name.partition("'s ")
            value = getattr(self, option)
            value = (value or {}).get(key) if key else value
            if value is not None and not is_right(value):
                raise InvalidRequestError(f"{name} is {str(value)[:40]}: it must be {wanted}.")
        if not re.match(r"\d+\.\d+", self.vllm_version):
            raise InvalidRequestError(f"vllm_version is {self.vllm_version!r}: write it as {PINNED_VERSION}.")

    def completed(self, options: Mapping[str, Any]) -> EngineConfig:
        """Return the same with these options, where they are not given."""
        defaults = {one.name: one.default for one in fields(self)}
        return replace(
            self, **{name: value for name, value in options.items() if getattr(self, name) == defaults[name]}
        )

    @cached_property
    def version(self) -> tuple[int, int]:
        """(major, minor) of the vLLM that is planned for."""
        return _version(self.vllm_version)

    def is_at_least(self, version: str) -> bool:
        """Return whether the vLLM that is planned for is of this version, or newer."""
        return self.version >= _version(version)

    @property
    def is_v0(self) -> bool:
        """Whether the engine is the one before V1, which is the default up to 0.7."""
        return not self.use_v1 if self.use_v1 is not None else self.version < (0, 8)

    @property
    def saves_windows(self) -> bool:
        """Whether layers with a sliding window cache only the window: V1's hybrid cache manager, on since 0.10."""
        return not self.is_v0 and self.version >= (0, 10) and not self.disable_hybrid_kv_cache_manager

    @property
    def keeps_expert_workspaces(self) -> bool:
        """Whether the workspaces of experts stay after the forward pass: v1/worker/workspace.py, since 0.13."""
        return self.version >= (0, 13)

    @property
    def caches_prefixes(self) -> bool:
        """Whether a prompt's beginning is read once: vLLM's default since V1."""
        return not self.is_v0 if self.enable_prefix_caching is None else self.enable_prefix_caching

    @property
    def caches_state_prefixes(self) -> bool:
        """Whether hybrids hold a second state per request for prefix caching: mamba_cache_mode "align".

        They cache prefixes by default since 0.26: `is_prefix_caching_supported` in vLLM's config/model.py.
        """
        default = self.version >= (0, 26) and not self.is_pooling
        return default if self.enable_prefix_caching is None else self.enable_prefix_caching

    @property
    def lora_slots(self) -> int:
        """How many adapters a step may use. The default is vLLM's (config/lora.py)."""
        return self.max_loras or 1

    @property
    def lora_rank(self) -> int:
        """The largest rank of an adapter."""
        return self.max_lora_rank or DEFAULT_LORA_RANK

    @property
    def speculative_method(self) -> str | None:
        """How tokens are drafted, in the words of --speculative-config. None: not at all."""
        asked = self.speculative_config
        if not asked:
            return None
        default = "ngram" if asked.get("prompt_lookup_max") and not asked.get("model") else "draft_model"
        return str(asked.get("method") or default)

    @property
    def speculates_with_own_layers(self) -> bool:
        """Whether the model's own layers for multi-token prediction draft: method mtp, or an older name of it."""
        method = self.speculative_method or ""
        return method == "mtp" or method.endswith("_mtp")

    @property
    def draft_model(self) -> str | None:
        """The draft model, or head of EAGLE, with weights and a cache that can be counted. None: there is none."""
        asked = self.speculative_config or {}
        named = asked.get("model") if self.speculative_method in ("draft_model", "eagle", "eagle3") else None
        return str(named) if named else None

    @property
    def speculative_tokens(self) -> int:
        """Tokens that are drafted for each step, which hybrids keep further states for. 0 without speculation."""
        asked = self.speculative_config
        return int(asked.get("num_speculative_tokens") or 1) if asked else 0

    @property
    def subtracts_cuda_graphs(self) -> bool:
        """Whether the cache leaves room for CUDA graphs: VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS, on since 0.20."""
        return self.version >= (0, 20)

    @property
    def prints_request_tokens(self) -> bool:
        """Whether vLLM prints "KV cache size" as concurrency x context. Before, it is blocks per group x block size."""
        return self.version >= (0, 21)

    @property
    def is_pooling(self) -> bool:
        """Whether the engine makes embeddings, scores or classes, and no text."""
        return self.runner == "pooling"

    @property
    def has_asked_layout(self) -> bool:
        """Whether a size of the layout was asked for."""
        return any(getattr(self, name) for name in LAYOUT_SIZES)

    @property
    def redundant_experts(self) -> int:
        """Copies of experts in each layer beside the model's own, for --enable-eplb."""
        return int((self.eplb_config or {}).get("num_redundant_experts") or 0)


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(re.match(r"\d+", minor).group())  # type: ignore[union-attr]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The load of each replica: `concurrency` requests at once, contexts of `max_model_len` tokens.

    The defaults are vLLM's own condition for starting: one request of the longest context that the model allows.
    `replicas` engines share the machines. None: one engine on as few GPUs as it needs. `request_tokens` are the tokens
    of one request. None: each may have the longest context. A context shorter than a request is of no use.
    """

    max_model_len: int | None = None
    concurrency: int = 1
    replicas: int | None = None
    request_tokens: int | None = None

    def __post_init__(self) -> None:
        length = None if self.max_model_len == LONGEST_THAT_FITS else self.max_model_len
        at_least_one(max_model_len=length, concurrency=self.concurrency, replicas=self.replicas)


def gpu_memory_utilization(engine: EngineConfig) -> float:
    """Return the option, else vLLM's default: 0.92 in 0.32 (config/cache.py), 0.9 before it subtracted CUDA graphs."""
    return engine.gpu_memory_utilization or (0.92 if engine.subtracts_cuda_graphs else 0.9)


def max_num_batched_tokens(engine: EngineConfig, accelerator: AcceleratorSpec, max_model_len: int) -> int:
    """Return the tokens of one step: what is asked for, else the API server's default.

    Source: `get_batch_defaults` in vLLM's engine/arg_utils.py. GPUs of 160 GiB or more have twice as many since pull
    request 51726 of 2026-08, which 0.26 is the first version that can have. Before V1 a step held a whole prompt,
    except with contexts above 32k, which turned on chunked prefill. An encoder's step holds a whole text.
    """
    if engine.max_num_batched_tokens:
        return engine.max_num_batched_tokens
    if engine.is_v0:
        return max(max_model_len, 2048) if max_model_len <= 32768 else 2048
    default = accelerator.default_max_num_batched_tokens or 2048
    if not accelerator.default_max_num_batched_tokens and _is_large(accelerator):
        default = 16384 if accelerator.total_bytes >= 160 * GIB and engine.version >= (0, 26) else 8192
    return max(max_model_len, default) if engine.takes_whole_texts else default


def max_num_seqs(engine: EngineConfig, accelerator: AcceleratorSpec) -> int:
    """Return the sequences of one step: the option, else the API server's default, from the same source."""
    if engine.max_num_seqs:
        return engine.max_num_seqs
    default = 128 if accelerator.kind == "cpu" else 1024 if not engine.is_v0 and _is_large(accelerator) else 256
    return min(default, engine.max_num_batched_tokens or default)


def default_block_size(engine: EngineConfig, kind: AcceleratorKind, *, is_mla: bool) -> int:
    """Return the tokens of a cache block: on GPUs 16, with latent attention 64; on CPUs 128, with latent attention 16.

    Sources: `update_block_size_for_backend` in platforms/interface.py, and platforms/cpu.py.
    """
    if kind == "cpu":
        return 16 if is_mla else 128
    return 64 if is_mla and not engine.is_v0 else 16


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


def _is_large(accelerator: AcceleratorSpec) -> bool:
    """Return whether vLLM has larger defaults for it: a GPU of 70 GiB or more that is not excepted by name."""
    is_large = accelerator.kind == "gpu" and accelerator.total_bytes >= 70 * GIB
    return is_large and not accelerator.has_small_batch_defaults
