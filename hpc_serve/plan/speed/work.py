"""Counts what a step of the engine computes and moves: operations, bytes of weights and cache, bytes between GPUs.

The counts follow from the model and the layout. step.py decides how long they take on an accelerator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.engine import EngineConfig
from hpc_serve.plan.hardware.accelerator import AcceleratorSpec
from hpc_serve.plan.memory.kv_cache import kv_cache_dtype, layer_bytes_per_token
from hpc_serve.plan.memory.stages import offloaded_bytes, pipeline_stages
from hpc_serve.plan.model.scheme import Scheme
from hpc_serve.plan.model.spec import LayerCache, ModelSpec
from hpc_serve.plan.model.weights import Linear, Weight

ALL_REDUCES_PER_LAYER = 2
"""With tensor parallelism: one after attention, one after the MLP (Megatron-LM, arXiv:1909.08053)."""

LAYER_KERNELS = 10
"""Kernels of a compiled dense layer in vLLM: two norms with the residual's sum, four products, rotation, writing the
cache, attention, activation."""
EXPERT_KERNELS = 10
"""How many more a layer of experts has: 13 kernels in place of the three of a dense MLP. They are for the router, its
top k, sorting by expert, quantizing the input of each of two grouped products, the sum, and shared experts
(`fused_experts` in vLLM)."""
LATENT_KERNELS = 6
"""How many more latent attention has: 11 kernels in place of five. They are for norms and second product of the
compressed query and key, products with both halves of the expanding matrix, concatenations, merging
(`mla_attention` in vLLM)."""


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
    state_bytes: int
    decode_flops: int
    prefill_flops: int
    index_bytes: int = 0
    index_flops: int = 0

    def held(self, length: float) -> float:
        """Return the tokens that a token at that position attends to."""
        return min(length, self.window) if self.window else length


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """One rank of one pipeline stage: what it holds, and its operations per token by the type it computes in.

    `expert_layers` have routed experts. `expert_bytes` are those of all routed experts on the rank. A token goes to
    `experts_per_token` of `experts`. The embedding table counts nowhere, because only single rows of it are read.
    `offloaded_bytes` of the weights are in the node's memory. `head_flops` are per sequence. `kernels` is how many
    kernels a step starts one after the other, whatever its tokens.
    """

    layers: int
    expert_layers: int
    kernels: int
    dense_bytes: int
    expert_bytes: int
    offloaded_bytes: int
    experts: int
    experts_per_token: int
    dense_flops: Mapping[str, float]
    expert_flops: Mapping[str, float]
    head_flops: float
    attention: tuple[Attention, ...]

    def weight_bytes(self, tokens: float) -> float:
        """Return the bytes of weights that a step reads, with so many tokens of all data-parallel ranks together.

        Only experts that at least one token goes to are read.

        If the router is even, a token misses a given expert with probability 1 - k/E. Then n tokens go to E·(1 - (1 -
        k/E)^n) experts on average.
        """
        return self.dense_bytes + self.expert_bytes * self.share_of_experts(tokens)

    def share_of_experts(self, tokens: float) -> float:
        """Return the share of the experts that a step of so many tokens reads on average. 0 for a dense model."""
        if not self.experts:
            return 0.0
        return 1.0 - float((1.0 - self.experts_per_token / self.experts) ** tokens)

    def cache_bytes(self, context: float) -> float:
        """Return the bytes of cache for one token that attends to `context` tokens. A state is read and written."""
        return sum(
            part.count * (part.held(context) * part.bytes_per_token + context * part.index_bytes + 2 * part.state_bytes)
            for part in self.attention
        )

    def attention_flops(self, context: float) -> float:
        """Return the operations of attention for one generated token that attends to `context` tokens."""
        return sum(
            part.count * (part.decode_flops * part.held(context) + part.index_flops * context)
            for part in self.attention
        )

    def prompt_attention_flops(self, tokens: float) -> float:
        """Return the operations of attention over a prompt.

        Attention is causal: half of all pairs, and less with a window.
        """
        total = 0.0
        for part in self.attention:
            window = part.held(tokens)
            pairs = window * window / 2 + (tokens - window) * window
            total += part.count * (part.prefill_flops * pairs + part.index_flops * tokens * tokens / 2)
        return total


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """All stages of a layout. Their ranks send `hidden_bytes` for each token: its activations."""

    stages: tuple[StageWork, ...]
    hidden_bytes: int


def model_work(model: ModelSpec, accelerator: AcceleratorSpec, engine: EngineConfig, layout: Layout) -> ModelWork:
    """Return the work of a layout. Raises DoesNotFitError where vLLM refuses the layout."""
    tensor, pipeline, data = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.data_parallel_size
    whole = engine.enable_expert_parallel and bool(model.num_experts)
    found = []
    for stage in pipeline_stages(model, tensor, pipeline, data_parallel_size=data, expert_parallel=whole):
        dense: Counter[str] = Counter()
        experts: Counter[str] = Counter()
        expert_bytes = expert_layers = 0
        known: dict[int, tuple[Counter[str], Counter[str], int]] = {}
        for layer in stage.layers:
            key = id(layer.block)
            if key not in known:
                known[key] = _count(layer.block.weights, model, accelerator, (tensor, data), whole)
            in_dense, in_experts, size = known[key]
            dense += in_dense
            experts += in_experts
            expert_bytes += size
            expert_layers += size > 0
        head = model.head or model.embedding
        is_idle = stage.rank == 0 and (model.head is not None or pipeline > 1 or engine.is_pooling)
        looked_up = model.embedding.bytes_per_rank(tensor) if is_idle else 0
        dense_bytes = stage.weight_bytes - expert_bytes - looked_up - model.everywhere.bytes_per_rank(1)
        found.append(
            StageWork(
                layers=len(stage.layers),
                expert_layers=expert_layers,
                kernels=LAYER_KERNELS * len(stage.layers)
                + EXPERT_KERNELS * expert_layers
                + LATENT_KERNELS * sum(layer.cache is not None and layer.cache.kind == "mla" for layer in stage.layers),
                dense_bytes=max(0, dense_bytes),
                expert_bytes=expert_bytes,
                offloaded_bytes=offloaded_bytes(stage, engine),
                experts=model.num_experts,
                experts_per_token=model.num_experts_per_tok,
                dense_flops=dict(dense),
                expert_flops=dict(experts),
                head_flops=2 * head.parameters / tensor if stage.is_last and not engine.is_pooling else 0.0,
                attention=_attention(model, engine, stage.first_layer, stage.end_layer, tensor),
            )
        )
    return ModelWork(stages=tuple(found), hidden_bytes=model.hidden_size * model.dtype_bytes)


def compute_type(scheme: Scheme, model: ModelSpec, accelerator: AcceleratorSpec) -> str:
    """Return the type in which vLLM multiplies a matrix.

    This is the matrix's own type if the accelerator has it, else the model's 16-bit type.

    Integer groups (AWQ, GPTQ), bitsandbytes, and int8 that vLLM makes itself while loading are unpacked before the
    multiplication. MXFP4 is unpacked on hardware without 4-bit arithmetic, and multiplied with 8-bit activations on
    hardware with it.
    """
    rates = accelerator.dense_flops
    plain = "fp16" if model.dtype == "float16" and "fp16" in rates else "bf16" if "bf16" in rates else "fp16"
    if scheme.name.startswith("fp8") and "fp8" in rates:
        return "fp8"
    if scheme.name.startswith("int8 w8a8") and "int8" in rates and not model.quantization.is_assumed:
        return "int8"
    if scheme.name == "nvfp4" and "fp4" in rates:
        return "fp4"
    if scheme.name == "mxfp4" and "fp4" in rates and "fp8" in rates:
        return "fp8"
    return plain


def _count(
    weights: tuple[Weight, ...], model: ModelSpec, accelerator: AcceleratorSpec, sizes: tuple[int, int], whole: bool
) -> tuple[Counter[str], Counter[str], int]:
    """Return (operations per token in dense matrices, the same in experts, bytes of experts) of one block on one rank.

    `sizes` are those of tensor and data parallelism, which divide the experts: `whole` ones, or each. A data-parallel
    rank computes the tokens of all such ranks with its part.
    """
    ranks, data_ranks = sizes
    dense: Counter[str] = Counter()
    experts: Counter[str] = Counter()
    expert_bytes = 0
    for weight in weights:
        if not isinstance(weight, Linear):
            continue
        type_ = compute_type(weight.scheme, model, accelerator)
        share = 1 if weight.split == "none" else ranks
        if weight.is_expert:
            chosen = weight.parameters * model.num_experts_per_tok / weight.copies
            experts[type_] += 2 * chosen / ranks  # type: ignore[assignment]
            expert_bytes += weight.bytes_per_rank(ranks * data_ranks, ranks * data_ranks if whole else 1)
        else:
            dense[type_] += 2 * weight.parameters / share  # type: ignore[assignment]
    return dense, experts, expert_bytes


def _attention(
    model: ModelSpec, engine: EngineConfig, first_layer: int, end_layer: int, ranks: int
) -> tuple[Attention, ...]:
    dtype = kv_cache_dtype(model, engine)
    heads = model.num_attention_heads / ranks
    counts: dict[tuple[LayerCache, tuple[int, int]], int] = {}
    widths_of: dict[int, tuple[int, int]] = {}
    for layer in model.layers[first_layer:end_layer]:
        if layer.cache is None:
            continue
        key = id(layer.block)
        if key not in widths_of:
            widths_of[key] = _latent_widths(layer.block.weights) if layer.cache.kind == "mla" else (0, 0)
        counts[layer.cache, widths_of[key]] = counts.get((layer.cache, widths_of[key]), 0) + 1
    found: list[Attention] = []
    for (cache, (query_width, value_width)), count in counts.items():
        if cache.kind == "compressed":
            found += _compressed_attention(cache, count, heads)
            continue
        states = cache.state_bytes(ranks, model.dtype_bytes)
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
                state_bytes=states,
                decode_flops=0 if cache.kind == "state" else int(decode),
                prefill_flops=0 if cache.kind == "state" else int(prefill),
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
                state_bytes=0,
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
