"""Counts what a step of the engine computes and moves: operations, bytes of weights and cache, bytes between GPUs.

Attention is counted by itself: its operations, and what it reads of the cache and of an indexer. The counts follow from
the model and the layout. step.py decides how long they take on an accelerator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.engine import EngineConfig
from hpc_serve.plan.hardware import AcceleratorSpec
from hpc_serve.plan.memory.kv_cache import kv_cache_dtype, layer_bytes_per_token
from hpc_serve.plan.memory.loaded import offloaded_bytes, pipeline_stages
from hpc_serve.plan.model.scheme import Scheme
from hpc_serve.plan.model.spec import DecoderLayer, LayerCache, Linear, ModelSpec, Vocabulary, Weight, distinct_layers


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
    decode_flops: int
    prefill_flops: int
    state_bytes: int = 0
    index_bytes: int = 0
    index_flops: int = 0

    def held(self, length: float) -> float:
        """Return the tokens that a token at that position attends to."""
        return min(length, self.window) if self.window else length


def _attention_of(
    layers: Sequence[DecoderLayer], model: ModelSpec, engine: EngineConfig, ranks: int
) -> tuple[Attention, ...]:
    """Return the attention of these layers of a model, with so many tensor-parallel ranks."""
    dtype = kv_cache_dtype(model, engine)
    heads = model.num_attention_heads / ranks
    counts: Counter[tuple[LayerCache, tuple[int, int]]] = Counter()
    for layer, alike in distinct_layers(layers):
        if layer.cache is not None:
            widths = _latent_widths(layer.block.weights) if layer.cache.kind == "mla" else (0, 0)
            counts[layer.cache, widths] += alike
    found: list[Attention] = []
    for (cache, (query_width, value_width)), count in counts.items():
        if cache.kind == "compressed":
            found += _compressed_attention(cache, count, heads)
            continue
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
                state_bytes=cache.state_bytes(ranks, model.dtype_bytes),
                decode_flops=int(decode),
                prefill_flops=int(prefill),
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

    def experts_read(self, tokens: float, data_ranks: int) -> float:
        """Return how many experts a rank reads for each that one token goes to, where every rank has so many tokens."""
        if not self.experts:
            return 0.0
        return self.experts * self.share_of_experts(tokens * data_ranks) / self.experts_per_token / data_ranks

    def cache_bytes(self, context: float) -> float:
        """Return the bytes of cache for one token that attends to `context` tokens. A state is read and written."""
        return sum(
            part.count * (part.held(context) * part.bytes_per_token + context * part.index_bytes + 2 * part.state_bytes)
            for part in self.attention
        )

    @property
    def attention_bytes_per_token(self) -> float:
        """Bytes of cache that a token adds."""
        return sum(part.count * part.bytes_per_token for part in self.attention)

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
    """All stages of a layout. Their ranks send `hidden_bytes` for each token: its activations.

    The last stage runs the draft model once in its own pass. `draft` is one of the `draft_passes` after it.
    """

    stages: tuple[StageWork, ...]
    hidden_bytes: int
    draft: StageWork | None = None
    draft_passes: int = 0


def model_work(model: ModelSpec, accelerator: AcceleratorSpec, engine: EngineConfig, layout: Layout) -> ModelWork:
    """Return the work of a layout. Raises DoesNotFitError where vLLM refuses the layout."""
    tensor, pipeline, data = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.data_parallel_size
    whole = engine.enable_expert_parallel and bool(model.num_experts)
    counting = _Counting(model, accelerator, engine, tensor, data, whole)
    found = []
    for stage in pipeline_stages(model, tensor, pipeline, data, expert_parallel=whole):
        head = model.head or model.embedding
        is_idle = stage.rank == 0 and (model.head is not None or pipeline > 1 or engine.is_pooling)
        looked_up = model.embedding.bytes_per_rank(tensor) if is_idle else 0
        one = counting.layers(model.layers[stage.first_layer : stage.end_layer])
        weight_bytes = stage.weight_bytes - looked_up - model.everywhere.bytes_per_rank(1)
        found.append(
            replace(
                one,
                dense_bytes=max(0, weight_bytes - one.expert_bytes + one.dense_bytes),
                offloaded_bytes=offloaded_bytes(stage, engine),
                head_flops=2 * head.parameters / tensor if stage.is_last and not engine.is_pooling else 0.0,
            )
        )
    draft, passes = counting.draft()
    hidden = model.hidden_size * model.dtype_bytes
    return ModelWork(stages=tuple(found), hidden_bytes=hidden, draft=draft, draft_passes=passes)


@dataclass(frozen=True)
class _Counting:
    """Counts the work of layers on one rank of a layout.

    Tensor- and data-parallel ranks divide the experts: `whole` ones, or each.
    """

    model: ModelSpec
    accelerator: AcceleratorSpec
    engine: EngineConfig
    ranks: int
    data_ranks: int
    whole: bool

    def layers(self, layers: Sequence[DecoderLayer]) -> StageWork:
        """Return the work of some layers; `dense_bytes` are those of an adapter alone.

        With LoRA all requests use one adapter: two kernels for each matrix that it changes, and one slot's weights.
        """
        model, slots_in_all = self.model, self.engine.lora_slots
        dense: Counter[str] = Counter()
        experts: Counter[str] = Counter()
        expert_bytes = expert_layers = kernels = adapter_bytes = 0
        counted = {id(layer): self._count(layer.block.weights) for layer, _ in distinct_layers(layers)}
        adapters = {id(layer): _adapters(layer) for layer, _ in distinct_layers(layers) if self.engine.enable_lora}
        for layer in layers:
            in_dense, in_experts, size = counted[id(layer)]
            dense += in_dense
            experts += in_experts
            expert_bytes += size
            expert_layers += size > 0
            kernels += LAYER_KERNELS + EXPERT_KERNELS * (size > 0)
            kernels += LATENT_KERNELS * (layer.cache is not None and layer.cache.kind == "mla")
            if slots := adapters.get(id(layer)):
                in_dense, in_experts, size = self._count(slots)
                for all_, of_slots in ((dense, in_dense), (experts, in_experts)):
                    for type_, count in of_slots.items():
                        all_[type_] += count / slots_in_all  # type: ignore[assignment]
                size += sum(one.bytes_per_rank(self.ranks) for one in slots if not one.is_expert)
                adapter_bytes += size // slots_in_all
                kernels += len(slots)
        return StageWork(
            layers=len(layers),
            expert_layers=expert_layers,
            kernels=kernels,
            dense_bytes=adapter_bytes,
            expert_bytes=expert_bytes,
            offloaded_bytes=0,
            experts=model.num_experts,
            experts_per_token=model.num_experts_per_tok,
            dense_flops=dict(dense),
            expert_flops=dict(experts),
            head_flops=0.0,
            attention=_attention_of(layers, model, self.engine, self.ranks),
        )

    def draft(self) -> tuple[StageWork | None, int]:
        """Return one pass of the draft model, and how many of them follow the one that the last stage counts.

        Of the model's own prediction layers each drafts one token, and the last one goes on.
        """
        model, count = self.model, self.model.draft_layers
        if not count:
            return None, 0
        size = 1 if self.engine.speculates_with_own_layers else count
        layers = model.layers[len(model.layers) - size :]
        weights = [weight for layer in layers for weight in layer.block.weights]
        tables = {weight.name: weight for weight in weights if isinstance(weight, Vocabulary)}
        head = tables.get("draft.lm_head") or tables.get("lm_head") or next(iter(tables.values()), model.head)
        head = head or model.embedding
        experts = [one for layer in layers for one in layer.block.experts]
        own = [one for one in weights if not isinstance(one, Vocabulary) and one not in experts]
        read = sum(weight.bytes_per_rank(self.ranks) for weight in (*own, head))
        one = self.layers(layers)
        one = replace(one, dense_bytes=one.dense_bytes + read, head_flops=2 * head.parameters / self.ranks)
        return one, max(0, self.engine.speculative_tokens - count // size)

    def _count(self, weights: Sequence[Weight]) -> tuple[Counter[str], Counter[str], int]:
        """Return (operations per token in dense matrices, the same in experts, bytes of experts) of one block.

        A data-parallel rank computes the tokens of all such ranks with its part of the experts.
        """
        dense: Counter[str] = Counter()
        experts: Counter[str] = Counter()
        expert_bytes, all_ranks = 0, self.ranks * self.data_ranks
        for weight in weights:
            if not isinstance(weight, Linear):
                continue
            type_ = compute_type(weight.scheme, self.model, self.accelerator)
            if weight.is_expert:
                chosen = weight.parameters * self.model.num_experts_per_tok / weight.copies
                experts[type_] += 2 * chosen / self.ranks  # type: ignore[assignment]
                expert_bytes += weight.bytes_per_rank(all_ranks, all_ranks if self.whole else 1)
            else:
                share = 1 if weight.split == "none" else self.ranks
                dense[type_] += 2 * weight.parameters / share  # type: ignore[assignment]
        return dense, experts, expert_bytes


def _adapters(layer: DecoderLayer) -> tuple[Linear, ...]:
    """Return the matrices of all adapters of a layer."""
    return tuple(one for one in layer.derived.weights if isinstance(one, Linear) and ".lora_" in one.name)


def compute_type(scheme: Scheme, model: ModelSpec, accelerator: AcceleratorSpec) -> str:
    """Return the type in which vLLM multiplies a matrix.

    This is the matrix's own type if the accelerator has it, else the model's 16-bit type.

    Integer groups (AWQ, GPTQ), bitsandbytes, and int8 that vLLM makes itself while loading are unpacked before the
    multiplication. MXFP4 is unpacked on hardware without 4-bit arithmetic, and multiplied with 8-bit activations on
    hardware with it. Quark's has 4-bit activations too (`QuarkOCP_MX` in vLLM's quark_ocp_mx.py).
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
        return "fp4" if model.quantization.method == "quark" else "fp8"
    return plain
