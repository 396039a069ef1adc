"""CUDA graphs: which ones vLLM captures, and what they take of a rank's memory."""

from __future__ import annotations

from hpc_serve.plan.engine import EngineConfig, max_num_seqs
from hpc_serve.plan.memory.overhead import ProfileRun
from hpc_serve.sizes import MIB

GRAPH_BYTES_PER_DENSE_LAYER = MIB * 26 // 100
GRAPH_BYTES_PER_EXPERT_LAYER = MIB * 4 // 10
"""The driver's memory for one captured graph, per layer. Layers with experts launch more kernels. Published totals
divided by layers and graphs: Llama-3.1-8B 0.26-0.29 MiB, Qwen3-4B 0.23, with experts Qwen3-Next 0.38, GLM-5.2 0.39.
Kept out of this: vLLM's own estimate for Qwen2.5-7B is 0.25 (0.22), for Qwen3.5-9B, a hybrid, 0.29 (0.19)."""

_BY_LEVEL = {"0": "NONE", "1": "PIECEWISE"}
_COMPILED = (3, "3", "VLLM_COMPILE")
_DECODE_APART = ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_WITHOUT_PIECES = {"PIECEWISE": "NONE", "FULL_AND_PIECEWISE": "FULL_DECODE_ONLY"}
"""The mode where the model is not compiled piece by piece."""


def graph_mode(engine: EngineConfig) -> str:
    """Return which CUDA graphs there are, in vLLM's word: NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or
    FULL_AND_PIECEWISE.

    Sources: OPTIMIZATION_LEVEL_TO_CONFIG, `_normalize_piecewise_cudagraph_mode` and the override for pooling models in
    vLLM's config/vllm.py.

    >>> graph_mode(EngineConfig(optimization_level="0")), graph_mode(EngineConfig(compilation_config={"mode": 0}))
    ('NONE', 'FULL_DECODE_ONLY')
    """
    if engine.enforce_eager:
        return "NONE"
    asked, level = engine.compilation_config or {}, engine.optimization_level
    mode = str(asked.get("cudagraph_mode") or _BY_LEVEL.get(str(level), "FULL_AND_PIECEWISE")).upper()
    compiled = asked.get("mode")
    if (level == "0") if compiled is None else (compiled not in _COMPILED):
        mode = _WITHOUT_PIECES.get(mode, mode)
    return "PIECEWISE" if engine.is_pooling and mode.startswith("FULL") else mode


def needs_state_blocks(engine: EngineConfig) -> bool:
    """Return whether CUDA graphs of hybrids need a cache block for each sequence of a step: config/compilation.py."""
    return engine.version >= (0, 20) and graph_mode(engine).startswith("FULL")


def capture_sizes(limit: int, *, step_above_256: int = 16) -> list[int]:
    """Return vLLM's batch sizes for CUDA graphs, up to `limit`: `_set_cudagraph_sizes` in config/vllm.py.

    >>> len(capture_sizes(512))
    51
    """
    sizes = [size for size in (1, 2, 4) if size <= limit]
    sizes += range(8, min(limit + 1, 256), 8)
    return sizes + list(range(256, limit + 1, step_above_256))


def graph_count(run: ProfileRun) -> int:
    """Return how many CUDA graphs vLLM captures: for mixed batches, and full ones for decoding.

    Before V1 vLLM captures only full graphs. For LoRA each graph has a second one, with adapters
    (`get_lora_capture_cases` in v1/worker/gpu/lora_utils.py).
    """
    mode = graph_mode(run.engine)
    if run.model.encoder_positions and mode != "NONE":
        mode = "FULL_DECODE_ONLY"
    if mode == "NONE" or run.accelerator.kind != "gpu":
        return 0
    sequences = max_num_seqs(run.engine, run.accelerator)
    if run.engine.is_v0:
        return len(capture_sizes(min(sequences, 256)))
    sizes = _sizes(run, sequences)
    mixed = 0 if mode == "FULL_DECODE_ONLY" else len(sizes)
    decoding = sum(size <= sequences for size in sizes) if mode in _DECODE_APART else 0
    return (2 if run.engine.enable_lora else 1) * (mixed + decoding)


def _sizes(run: ProfileRun, sequences: int) -> list[int]:
    """Return the batch sizes of graphs: the sizes in --compilation-config, else vLLM's up to the largest."""
    asked = run.engine.compilation_config or {}
    named, largest = asked.get("cudagraph_capture_sizes"), asked.get("max_cudagraph_capture_size")
    if named:
        return [size for size in sorted(set(named)) if size <= run.tokens]
    step = 16 if run.engine.version >= (0, 12) else 8
    usual = min(2 * sequences, run.accelerator.max_cuda_graph_batch)
    return capture_sizes(min(usual if largest is None else largest, run.tokens), step_above_256=step)


def cuda_graph_bytes(run: ProfileRun) -> int:
    """Return the memory of all CUDA graphs."""
    per_graph = sum(
        count * (GRAPH_BYTES_PER_EXPERT_LAYER if layer.block.experts else GRAPH_BYTES_PER_DENSE_LAYER)
        for layer, count in run.distinct_layers
    )
    return graph_count(run) * per_graph
