"""Counts a rank's memory beside weights and KV cache: activations, CUDA graphs, and memory that torch does not see.

Activations are the peak of vLLM's profile run. Torch does not see NCCL and the CUDA context. On ROCm rows of weights
are padded, too, and runtime and RCCL take other sizes. Each number that is not arithmetic has a name here, and its
source. estimate.py puts the sums together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hpc_serve.plan.engine import EngineConfig, max_num_batched_tokens, max_num_seqs
from hpc_serve.plan.hardware import AcceleratorSpec
from hpc_serve.plan.memory.loaded import PipelineStage
from hpc_serve.plan.model.scheme import MXFP4
from hpc_serve.plan.model.spec import Block, DecoderLayer, Linear, ModelSpec, distinct_layers
from hpc_serve.units import GIB, MIB

# -- ROCm

ROW_PADDING_BYTES = 256
_PADDED_ROWS_MULTIPLE = 512
"""vLLM moves rows of weights apart where they are multiples of 512 bytes: VLLM_ROCM_FP8_PADDING for matrices in fp8 per
tensor and in blocks (quantization/utils/fp8_utils.py), VLLM_ROCM_MOE_PADDING for experts in 16 bit
(fused_moe/unquantized_fused_moe_method.py). Both are on by default. Llama 3.1 405B of AMD on MI300X: 49.32 GiB at TP=8
(47.77 without, 49.23 with), 97.43 at TP=4 (95.51, 97.43)."""

_PADDED_PER_TENSOR = ("fp8", "compressed_tensors")
"""Methods whose matrices with one scale for each tensor are padded. Those of Quark and ModelOpt are not, and none that
vLLM quantises itself."""

ROCM_CONTEXT_BYTES = GIB * 66 // 100
"""How much memory outside of torch grows during the profile run: 0.66 GiB in four logs of vLLM 0.9.2 on one MI300X
(github.com/cmontemuino/amd-mi300x-ml-benchmarks), where an H100 has 0.13."""

RCCL_BYTES = GIB
"""The first communicator of RCCL takes about 1 GiB of each rank on MI250X (github.com/Lumi-supercomputer/LUMI-AI-Guide,
issue 111). Several ranks take at least that."""


def is_rocm(accelerator: AcceleratorSpec) -> bool:
    """Return whether vLLM runs on ROCm there."""
    return accelerator.kind == "gpu" and accelerator.vendor == "AMD"


def row_padding_bytes(
    model: ModelSpec, layers: Sequence[DecoderLayer], accelerator: AcceleratorSpec, ranks: int, expert_ranks: int
) -> int:
    """Return the bytes between rows of weights on one rank of a stage. 0 where vLLM does not run on ROCm."""
    if not is_rocm(accelerator):
        return 0
    return sum(
        count * _block_padding(layer.block, model, ranks, expert_ranks) for layer, count in distinct_layers(layers)
    )


def _block_padding(block: Block, model: ModelSpec, ranks: int, expert_ranks: int) -> int:
    total = 0
    for weight in block.weights:
        if not isinstance(weight, Linear) or not _is_padded(weight, model):
            continue
        divides = weight.is_expert and expert_ranks > 1
        copies = -(-weight.copies // expert_ranks) if divides else weight.copies
        outputs, inputs = weight.shard(1 if divides else ranks)
        row_bytes = int(inputs * weight.scheme.weight_bits / 8)
        if row_bytes % _PADDED_ROWS_MULTIPLE == 0:
            total += copies * sum(outputs) * ROW_PADDING_BYTES
    return total


def _is_padded(weight: Linear, model: ModelSpec) -> bool:
    scheme, quantization = weight.scheme, model.quantization
    if weight.is_expert:
        return scheme.weight_bits == 16
    if scheme.weight_bits != 8 or not scheme.name.startswith("fp8"):
        return False
    if scheme.granularity == "block":
        return True
    is_read = quantization.method in _PADDED_PER_TENSOR and not quantization.is_assumed
    return scheme.granularity == "tensor" and is_read


# -- activations, and memory that torch does not see

HIDDEN_COPIES = 4
"""Tensors of the hidden size at the peak of a layer: residual, normed input, a projection's output, one more.
Llama-3.1-8B on MI300X with steps of 131,072 tokens: 14.63 GiB measured, 14.50 by this
(github.com/cmontemuino/amd-mi300x-ml-benchmarks)."""

_SORTED_LOGITS_COPIES = 9.5
"""32-bit copies of the logits of max_num_seqs sequences while top-p sorts them: 16-bit logits ½, 32-bit logits 1,
sorted values 1, their 64-bit indices 2, the indices of the sort 2 and its double buffers 3. Seen in V0 and in V1 up to
0.16: Qwen3-0.6B on H100 5.56 GiB, gpt-oss 7.38 (github.com/llm-d-incubation/llm-d-planner, empirical results)."""

_FILTERED_LOGITS_COPIES = 3.5
"""The same with the Triton filter of 0.17 (vLLM #33538): logits ½ and 1, probabilities 1, noise 1."""

_PLAIN_LOGITS_COPIES = 0.5
"""The same in model runner V2. Its profile run samples from 16-bit logits without a filter (v1/worker/gpu/sample)."""

_FILTER_BUFFER_BYTES = 80 * MIB
"""Buffers of the Triton filter, from the same pull request."""

_CUBLAS_WORKSPACE_BYTES = 32 * MIB
"""torch's cuBLAS workspace on Hopper (aten/src/ATen/cuda/CublasHandlePool.cpp)."""

_NON_TORCH_BASE_BYTES = GIB * 13 // 100
_NON_TORCH_LATER_BASE_BYTES = GIB * 25 // 100
"""How much CUDA context and kernels grow during the profile run: 0.13 GiB on H100 (0.03-0.10 on older GPUs), 0.25 in
vLLM 0.19 (49 runs in docs/accuracy of the llm-d-planner repository) and in 0.31."""

_NCCL_PER_PEER_BYTES = GIB * 27 // 100
_HOPPER_ALL_REDUCE_BYTES = GIB * 185 // 100
"""NCCL's buffers for tensor parallelism. They grow with each further rank: with the base 2 GPUs take 0.55 GiB, 4 GPUs
0.95, 8 GPUs 2.1 (in 2026 4 GB200 take 0.95). The group of data-parallel ranks that share experts is assumed to take as
much for each peer in a node: no published log says. On Hopper they are one sum since 0.13, which sets up
all-reduces over symmetric memory there: 2 GPUs take 2.07 GiB, 4 GPUs 2.13 (the same 49 runs)."""

_NCCL_PER_PLAIN_PEER_BYTES = GIB // 100
"""The same where V1 has no all-reduce of its own, as over PCIe. With the base 8 L40S take 0.21 GiB in 0.10, and 4 L40S
about 0.15 in 0.18. Two RTX 5090 take 0.75, for which no source says why."""

_MLA_WORKSPACE_TOKENS = 64 * 1024
"""The most rows of context that latent attention expands at once: `determine_chunked_prefill_workspace_size`."""


@dataclass(frozen=True, kw_only=True)
class ProfileRun:
    """The profile run of one pipeline `stage` on one rank.

    `ranks` divide the layers. Each of `data_ranks` such groups profiles a full step at the same time, and the experts
    see the tokens of all of them.
    """

    model: ModelSpec
    stage: PipelineStage
    ranks: int
    expert_ranks: int
    accelerator: AcceleratorSpec
    engine: EngineConfig
    max_model_len: int
    data_ranks: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of the step that is profiled."""
        return max_num_batched_tokens(self.engine, self.accelerator, self.max_model_len)

    @cached_property
    def distinct_layers(self) -> list[tuple[DecoderLayer, int]]:
        """Each different layer once, and how often the stage has it."""
        return distinct_layers(self.stage.layers)


def activation_bytes(run: ProfileRun) -> int:
    """Return the most that torch allocates during the profile run.

    Either images pass through the tower, or the decoder runs. The decoder's peak is that of forward pass or sampling,
    plus the hidden state and the residual that go to the next pipeline stage. The tokens of the images stay throughout.
    """
    is_whole = run.stage.rank == 0 and run.stage.is_last
    to_next_stage = 0 if is_whole else 2 * run.tokens * _row_bytes(run)
    decoder = to_next_stage + max(forward_bytes(run), sampling_bytes(run) if run.stage.is_last else 0)
    encoder, outputs = image_bytes(run)
    return outputs + max(encoder, decoder)


def image_bytes(run: ProfileRun) -> tuple[int, int]:
    """Return (bytes at the peak of the vision tower, bytes of its outputs).

    A step holds as many of the largest images or videos as fit, and at least one (`MultiModalBudget` in vLLM's
    multimodal/encoder_budget.py). Model runner V2 encodes images on the first stage only.
    """
    images = run.model.images
    if images is None or (_has_new_runner(run) and run.stage.rank):
        return 0, 0
    element, tokens = run.model.dtype_bytes, visual_tokens(run)
    patch = images.patch_elements + images.split_patch_elements // run.ranks
    kept = max(tokens, images.kept_tokens_0_11 if run.engine.version == (0, 11) else 0)
    rows = kept * images.output_rows + run.tokens * (images.output_rows - 1)
    return tokens * images.patches_per_token * patch * element, rows * _row_bytes(run)


def visual_tokens(run: ProfileRun) -> int:
    """Return the tokens of the images, or of the video, that the profile run encodes at once. 0 without a tower."""
    images = run.model.images
    if images is None:
        return 0
    largest = max(images.image_tokens, images.largest_video(run.max_model_len))
    return max(1, run.tokens // largest) * largest


def _row_bytes(run: ProfileRun) -> int:
    return run.model.hidden_size * run.model.dtype_bytes


def forward_bytes(run: ProfileRun) -> int:
    """Return the peak of the forward pass over a full step."""
    element = run.model.dtype_bytes
    return run.tokens * elements_per_token(run) * element + _latent_expansion_bytes(run)


def elements_per_token(run: ProfileRun) -> int:
    """Return the elements that one token needs at the peak of the widest layer."""
    widest = max((_layer_elements_per_token(layer, run) for layer, _ in run.distinct_layers), default=0)
    return HIDDEN_COPIES * run.model.hidden_size + widest


def _layer_elements_per_token(layer: DecoderLayer, run: ProfileRun) -> int:
    """Return the elements that a token needs at once in a layer, in the widest of its parts.

    An MLP and experts need the outputs of gate and up and their product. Attention needs q, k, v and the output.
    """
    widest, experts = 0, 0
    for weight in layer.block.weights:
        if not isinstance(weight, Linear):
            continue
        if weight.is_expert:
            experts = max(experts, _expert_elements_per_token(weight, run))
        elif weight.split == "column":
            outputs, _ = weight.shard(run.ranks)
            widest = max(widest, sum(outputs) + outputs[0])
    return max(widest, experts)


def _expert_elements_per_token(weight: Linear, run: ProfileRun) -> int:
    """Return the elements per token of the two workspaces of vLLM's fused experts: `workspace_shapes` in
    layers/fused_moe/experts.

    One is for the first output or the result. The other is for the activation, and where workspaces are kept also large
    enough for the result. Data-parallel ranks gather the tokens of all ranks before the experts: vLLM's default
    `--all2all-backend allgather_reducescatter` (fused_moe/prepare_finalize/naive_dp_ep.py).
    """
    if weight.split != "column":
        return 0
    outputs, hidden = weight.shard(run.ranks * run.data_ranks if run.expert_ranks == 1 else 1)
    chosen = max(1, run.model.num_experts_per_tok) * run.data_ranks
    activation = max(outputs[0], hidden) if run.engine.keeps_expert_workspaces else outputs[0]
    return chosen * (max(sum(outputs), hidden) + activation)


def _kept_workspace_bytes(run: ProfileRun) -> int:
    """Return the bytes of the experts' workspaces that remain while sampling. Kernels for mxfp4 need no workspace."""
    if not run.engine.keeps_expert_workspaces or run.model.quantization.experts is MXFP4:
        return 0
    experts = (
        _expert_elements_per_token(weight, run) for layer, _ in run.distinct_layers for weight in layer.block.experts
    )
    return run.tokens * max(experts, default=0) * run.model.dtype_bytes


def _latent_expansion_bytes(run: ProfileRun) -> int:
    if not run.model.is_mla or run.engine.is_v0:
        return 0
    rows = min(8 * run.max_model_len, _MLA_WORKSPACE_TOKENS)
    for layer, _ in run.distinct_layers:
        for weight in layer.block.weights:
            if isinstance(weight, Linear) and weight.name.endswith("kv_b_proj"):
                outputs, _ = weight.shard(run.ranks)
                return rows * sum(outputs) * run.model.dtype_bytes
    return 0


def sampling_bytes(run: ProfileRun) -> int:
    """Return the peak of sampling for as many sequences as a step may hold. A pooling model does not sample."""
    if run.engine.is_pooling:
        return 0
    sequences = min(max_num_seqs(run.engine, run.accelerator), run.tokens)
    hidden = (run.tokens + sequences) * _row_bytes(run)
    logits = sequences * run.model.vocab_size * 4
    copies, buffers = logits_copies(run)
    return int(copies * logits) + buffers + hidden + _CUBLAS_WORKSPACE_BYTES + _kept_workspace_bytes(run)


def logits_copies(run: ProfileRun) -> tuple[float, int]:
    """Return (32-bit copies of the logits at once, bytes of buffers) in the sampler of this version of vLLM."""
    version = run.engine.version
    if run.engine.is_v0 or version < (0, 17):
        return _SORTED_LOGITS_COPIES, 0
    gathered = _PLAIN_LOGITS_COPIES if run.ranks > 1 else 0.0
    if _has_new_runner(run):
        return _PLAIN_LOGITS_COPIES + gathered, 0
    return _FILTERED_LOGITS_COPIES, _FILTER_BUFFER_BYTES


def _has_new_runner(run: ProfileRun) -> bool:
    """Return whether vLLM uses model runner V2: for dense models since 0.25, for all models since 0.30."""
    version = run.engine.version
    return version >= (0, 30) or (version >= (0, 25) and not run.model.num_experts)


def non_torch_bytes(run: ProfileRun) -> int:
    """Return the memory that torch does not see: CUDA context and kernels, and NCCL's buffers."""
    return context_bytes(run) + nccl_bytes(run)


def context_bytes(run: ProfileRun) -> int:
    """Return how much the CUDA context grows during the profile run. vLLM 0.1 does not count it."""
    if run.accelerator.kind != "gpu" or run.engine.version < (0, 2):
        return 0
    if is_rocm(run.accelerator):
        return ROCM_CONTEXT_BYTES
    return _NON_TORCH_BASE_BYTES if run.engine.version < (0, 13) else _NON_TORCH_LATER_BASE_BYTES


def nccl_bytes(run: ProfileRun) -> int:
    """Return NCCL's buffers: of tensor parallelism, and of the group that shares experts.

    The buffers for pipeline stages are too small to measure.
    """
    if run.accelerator.kind != "gpu" or run.engine.version < (0, 2):
        return 0
    peers = min(run.ranks * run.data_ranks, run.accelerator.gpus_per_node) - 1
    shared = peers * _NCCL_PER_PEER_BYTES if run.data_ranks > 1 else 0
    return shared + (_tensor_parallel_bytes(run) if run.ranks > 1 else 0)


def _tensor_parallel_bytes(run: ProfileRun) -> int:
    if run.engine.version >= (0, 13) and run.accelerator.has_symmetric_memory:
        return _HOPPER_ALL_REDUCE_BYTES
    is_custom = run.engine.is_v0 or run.accelerator.has_custom_all_reduce(run.ranks)
    buffers = (run.ranks - 1) * (_NCCL_PER_PEER_BYTES if is_custom else _NCCL_PER_PLAIN_PEER_BYTES)
    return max(RCCL_BYTES, buffers) if is_rocm(run.accelerator) else buffers


# -- CUDA graphs

_GRAPH_BYTES_PER_DENSE_LAYER = MIB * 26 // 100
_GRAPH_BYTES_PER_EXPERT_LAYER = MIB * 4 // 10
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


def _capture_sizes(limit: int, *, step_above_256: int = 16) -> list[int]:
    """Return vLLM's batch sizes for CUDA graphs, up to `limit`: `_set_cudagraph_sizes` in config/vllm.py.

    >>> len(_capture_sizes(512))
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
        return len(_capture_sizes(min(sequences, 256)))
    sizes = _graph_sizes(run, sequences)
    mixed = 0 if mode == "FULL_DECODE_ONLY" else len(sizes)
    decoding = sum(size <= sequences for size in sizes) if mode in _DECODE_APART else 0
    return (2 if run.engine.enable_lora else 1) * (mixed + decoding)


def _graph_sizes(run: ProfileRun, sequences: int) -> list[int]:
    """Return the batch sizes of graphs: the sizes in --compilation-config, else vLLM's up to the largest."""
    asked = run.engine.compilation_config or {}
    named, largest = asked.get("cudagraph_capture_sizes"), asked.get("max_cudagraph_capture_size")
    if named:
        return [size for size in sorted(set(named)) if size <= run.tokens]
    step = 16 if run.engine.version >= (0, 12) else 8
    usual = min(2 * sequences, run.accelerator.max_cuda_graph_batch)
    return _capture_sizes(min(usual if largest is None else largest, run.tokens), step_above_256=step)


def cuda_graph_bytes(run: ProfileRun) -> int:
    """Return the memory of all CUDA graphs."""
    per_graph = sum(
        count * (_GRAPH_BYTES_PER_EXPERT_LAYER if layer.block.experts else _GRAPH_BYTES_PER_DENSE_LAYER)
        for layer, count in run.distinct_layers
    )
    return graph_count(run) * per_graph
