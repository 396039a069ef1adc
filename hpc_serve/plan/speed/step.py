"""How long one step of a layout takes, and what the time goes to: ideally, and as expected of a real engine.

    step = operations ÷ FLOP/s + weights ÷ bandwidth + cache ÷ bandwidth + communication + the engine's own time

Ideally only the larger of the first two counts, as in "How To Scale Your Model", part 7
(jax-ml.github.io/scaling-book/inference). Published runs took the sum: a kernel loads before it multiplies, and a step
has kernels of both kinds. work.py counts what is computed and moved. This module also has the rates at which the GPUs
of a layout send to each other, and the size from which communication takes longer than arithmetic (parts 7 and 8).
estimate.py decides what follows for requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.engine import EngineConfig, is_async, max_num_batched_tokens, max_num_seqs
from hpc_serve.plan.hardware import AcceleratorSpec, slice_with, split_axes
from hpc_serve.plan.memory.overhead import is_rocm
from hpc_serve.plan.model.spec import ModelSpec
from hpc_serve.plan.speed.measured import MeasuredHere
from hpc_serve.plan.speed.work import ALL_REDUCES_PER_LAYER, ModelWork, StageWork, model_work

# -- links

ASSUMED_LINK_BYTES_PER_S = 32e9
"""PCIe 4.0 x16: assumed where no source confirms a rate between the GPUs of a node."""
_ASSUMED_NETWORK_BYTES_PER_S = 12.5e9
"""100 Gb/s for each GPU: assumed where no source confirms a network."""


def link_rate(accelerator: AcceleratorSpec, layout: Layout) -> float:
    """Return the rate at which a rank sends to its tensor-parallel group, in bytes per second."""
    if layout.splits_layers_across_nodes and accelerator.kind != "tpu":
        return _network_rate(accelerator)
    return _rate_in_node(accelerator, layout.tensor_parallel_size)


def _rate_in_node(accelerator: AcceleratorSpec, ranks: int) -> float:
    """Return the rate at which a rank sends to a group of so many in its node, in bytes per second.

    In a mesh every pair has its own link: a group smaller than the node has only the links between its members. A
    bridge of two GPUs is of no use to more.
    """
    rate = accelerator.link_bytes_per_s or ASSUMED_LINK_BYTES_PER_S
    if accelerator.link_topology == "pairs" and ranks > 2:
        return ASSUMED_LINK_BYTES_PER_S
    if accelerator.link_topology == "mesh" and 1 < ranks < accelerator.gpus_per_node:
        return rate * (ranks - 1) / (accelerator.gpus_per_node - 1)
    return rate


def _network_rate(accelerator: AcceleratorSpec) -> float:
    """Return one GPU's share of its node's network, in bytes per second, one direction."""
    return accelerator.network_bytes_per_s or _ASSUMED_NETWORK_BYTES_PER_S


# -- steps

_DRAFT_S = 0.4e-3
"""For each token that a draft model drafts, beside the roofline of its pass: starting it, choosing its token, and
preparing the next pass. Fitted on the gains in benchmarks/accuracy/data/gains.jsonl."""
_EXPERT_ROWS = 16
"""Least rows of an expert's product, however few tokens go to it: the smallest block of vLLM's kernels
(`get_default_config` in fused_moe.py, `block_size_m` in marlin_moe.py)."""
_UNTUNED_EXPERTS = 4.4
"""How many times as long experts take by the Triton kernel for int4 without a configuration for the GPU. On MI300X they
were 89 % of a step of Kimi-K2.5, and another kernel made the step 69 % shorter (rocm.blogs.amd.com, kimi-k2.5-optimize,
2026-03-24): 0.89 / (0.31 - 0.11)."""
ASYNC_KERNELS = 0.5
"""Share of `kernel_s` that is left where the host prepares a step while the device computes the last one."""
_GATHERING = ("allgather_reducescatter", "naive")


@dataclass(frozen=True, kw_only=True)
class Factors:
    """How much of the hardware's figures a real engine reaches. Shares are of the peak, times in seconds.

    `flops`, `expert_flops` and `attention_flops` are shares of the FLOP/s that a large product reaches
    (`matmul_share`): in dense matrices, in routed experts and in attention. `bandwidth` is a share of the memory's.
    `link` is a share of the links' in all-reduces and hops between stages, and each of these takes at least
    `collective_s`. Each kernel takes `kernel_s` to start and to end. For each sequence of a step the engine takes
    `sequence_s` to schedule it, to sample its token and to send the token on. For each request of a burst the API
    server takes `request_s` before the engine gets it.
    """

    flops: float
    expert_flops: float
    attention_flops: float
    bandwidth: float
    link: float
    collective_s: float
    kernel_s: float
    sequence_s: float
    request_s: float

    def times(self, ratio: float) -> Factors:
        """Return the factors of an engine that is so many times as fast: every time of a step is divided by it."""
        return Factors(**{name: getattr(self, name) * (1 / ratio if name.endswith("_s") else ratio) for name in _NAMES})


_NAMES = tuple(one.name for one in fields(Factors))
IDEAL = Factors(**{name: 0.0 if name.endswith("_s") else 1.0 for name in _NAMES})
_SHARES = {"flops": 0.77, "expert_flops": 0.30, "attention_flops": 0.60, "bandwidth": 0.80, "link": 0.40}
EXPECTED = Factors(**_SHARES, collective_s=25e-6, kernel_s=5.5e-6, sequence_s=40e-6, request_s=5.5e-3)
"""Those in `FITTED` are fitted on published measurements of vLLM 0.6 to 0.29 (`is_fitted` in
benchmarks/accuracy/speed_scores.py), and their form was revised with these in view. The others are assumed, because
such measurements cannot tell them apart: 60 % for attention (FlashAttention-2 has 50 to 73 % on A100,
arXiv:2307.08691; FlashAttention-3 has up to 75 % on H100, arXiv:2407.08608), 40 % of the links for the few MiB of a
step, 25 µs for a launch.
"""
FITTED = ("flops", "expert_flops", "bandwidth", "kernel_s", "sequence_s", "request_s")
_PARTS = ("flops_s", "weights_s", "cache_s", "communication_s", "engine_s")


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step of the whole layout, by cause. `engine_s` is starting kernels and work on the host.

    `bubble_s` is how long a batch waits for the slowest pipeline stage. `overlapped`: communication happens at the same
    time as the rest.
    """

    flops_s: float
    weights_s: float
    cache_s: float
    communication_s: float
    engine_s: float
    bubble_s: float = 0.0
    overlapped: bool = False

    @property
    def pass_s(self) -> float:
        """The time of a batch in all pipeline stages, if it waits for no other one."""
        if self.overlapped:
            return max(max(self.flops_s, self.weights_s) + self.cache_s, self.communication_s) + self.engine_s
        return self.flops_s + self.weights_s + self.cache_s + self.communication_s + self.engine_s

    @property
    def total_s(self) -> float:
        """The time from one token of a sequence to the next."""
        return self.pass_s + self.bubble_s

    def after(self, draft: StepTime, passes: int, own_s: float) -> StepTime:
        """Return this time with passes of a draft model before it, and `own_s` of the engine's own for them."""
        sums = {name: getattr(self, name) + passes * getattr(draft, name) for name in _PARTS}
        return replace(self, **{**sums, "engine_s": sums["engine_s"] + own_s})

    @property
    def causes(self) -> dict[str, float]:
        """Return seconds by cause. Ideally only the larger of weights and FLOP/s counts."""
        return {
            "weights": 0.0 if self.overlapped and self.weights_s < self.flops_s else self.weights_s,
            "FLOP/s": 0.0 if self.overlapped and self.weights_s >= self.flops_s else self.flops_s,
            "KV cache": self.cache_s,
            "communication": self.communication_s,
            "engine": self.engine_s,
            "bubbles": self.bubble_s,
        }


class Roofline:
    """How long a step of one model on one layout takes, for any batch. The work is counted once.

    With data parallelism the batch is that of one rank. The ranks step together, each with as large a batch.
    With speculation a step has `tokens_per_sequence` of each sequence: its last token, and the drafts after it.
    If scheduling is async, the host works on a step while the device computes the last one (`is_async` in
    plan/engine.py). `measured` are runs on this accelerator here. Raises InvalidRequestError if no source confirms the
    accelerator's FLOP/s or bandwidth.
    """

    def __init__(
        self,
        model: ModelSpec,
        accelerator: AcceleratorSpec,
        engine: EngineConfig,
        layout: Layout,
        measured: MeasuredHere | None = None,
    ) -> None:
        if not accelerator.dense_flops or not accelerator.bandwidth_bytes_per_s:
            raise InvalidRequestError(
                f"{accelerator.product}: no source confirms its FLOP/s and bandwidth, so no speed can be estimated."
            )
        self.model, self.accelerator, self.engine, self.layout = model, accelerator, engine, layout
        self.measured = measured
        self.async_scheduling = is_async(engine, accelerator.kind, layout.pipeline_parallel_size)
        self.work: ModelWork = model_work(model, accelerator, engine, layout)
        self.bandwidth: float = accelerator.bandwidth_bytes_per_s
        self.link_bytes_per_s = link_rate(accelerator, layout)
        self.max_num_batched_tokens = max_num_batched_tokens(engine, accelerator, model.max_model_len)
        self.max_num_seqs = max_num_seqs(engine, accelerator)
        self.tokens_per_sequence = 1 + engine.speculative_tokens
        self.hop_bytes_per_s = _network_rate(accelerator) if layout.num_nodes > 1 else self.link_bytes_per_s

    def decode(self, batch: float, context: float, factors: Factors = EXPECTED) -> StepTime:
        """Return a step that generates tokens of `batch` sequences, each with `context` tokens before them."""
        return self.step(batch, batch, context, factors)

    def step(
        self,
        tokens: float,
        sequences: float,
        context: float,
        factors: Factors,
        prompt_tokens: float = 0,
        reading: float = 1,
        cached_tokens: float = 0,
    ) -> StepTime:
        """Return a step of `tokens`: one for each of `sequences`, the others of prompts with `prompt_tokens` each.

        Drafts come to these. They are verified in the same pass, which reads the cache once for all tokens of a
        sequence. A draft model has passes of its own, one after the other.
        The prompts' tokens attend to `cached_tokens` before them, too, which were read for an earlier request.
        There are as many batches in flight as pipeline stages, or as sequences if these are fewer
        (`max_concurrent_batches` in vLLM's config/vllm.py). A batch passes the stages one after the other, and all
        batches pass the slowest stage in a step. A share of `reading` of the data-parallel ranks has prompts in the
        step, and the others wait with their own tokens: experts get the tokens of all ranks.
        """
        stages = len(self.work.stages)
        share = max(sequences / stages, min(1.0, sequences))
        prompts = max(0.0, tokens - sequences) / stages
        verified = self.tokens_per_sequence * share
        tokens = verified + prompts
        batch = tokens, tokens - (1 - reading) * prompts, share, verified
        attention = context, prompts / prompt_tokens if prompt_tokens else 0.0, prompt_tokens, cached_tokens
        times = [self._stage_time(stage, batch, attention, factors) for stage in self.work.stages]
        if (draft := self.work.draft) is not None:
            one = self._stage_time(draft, (share, share, share, share), (context, 0, 0, 0), factors)
            own_s = 0.0 if factors is IDEAL else _DRAFT_S * self.engine.speculative_tokens
            times[-1] = times[-1].after(one, self.work.draft_passes, own_s)
        sums = {name: sum(getattr(time, name) for time in times) for name in _PARTS}
        in_flight = stages if prompts else min(stages, max(1.0, sequences))
        bubble = in_flight * max(time.pass_s for time in times) - sum(time.pass_s for time in times)
        if stages > 1:
            # A rank sends its share of the activations and of the residual.
            sent = 2 * tokens * self.work.hidden_bytes / self.layout.tensor_parallel_size
            hop_s = sent / (self.hop_bytes_per_s * factors.link) + factors.collective_s
            sums["communication_s"] += (stages - 1) * hop_s
        host_s = factors.sequence_s * share
        sums["engine_s"] += max(0.0, host_s - sum(sums.values())) if self.async_scheduling else host_s
        return StepTime(**sums, bubble_s=max(0.0, bubble), overlapped=factors is IDEAL)

    def _stage_time(
        self,
        stage: StageWork,
        batch: tuple[float, float, float, float],
        attention: tuple[float, float, float, float],
        factors: Factors,
    ) -> StepTime:
        """Return the time of `batch` in one stage: (tokens of the rank, of the mean rank, sequences, their tokens).

        `attention`: (context of the sequences, prompts that are read, tokens of each, tokens of each in the cache).
        """
        tokens, mean, share, verified = batch
        context, prompts, prompt_tokens, cached = attention
        bandwidth = self.bandwidth * factors.bandwidth
        away = stage.offloaded_bytes
        weights = max(0.0, stage.weight_bytes(mean * self.layout.data_parallel_size) - away) / bandwidth
        read = share * stage.cache_bytes(context) / (self.engine.decode_context_parallel_size or 1) / bandwidth
        attended = verified * stage.attention_flops(context) / (self._plain_rate * factors.attention_flops)
        of_prompts = 0.0
        if prompts:
            of_cached = stage.prompt_attention_flops(cached) if cached else 0.0
            of_prompts = prompts * (stage.prompt_attention_flops(cached + prompt_tokens) - of_cached)
        return StepTime(
            flops_s=self._flops_s(stage, batch, of_prompts, factors),
            weights_s=weights + away / (ASSUMED_LINK_BYTES_PER_S * factors.bandwidth),
            cache_s=max(read, attended),
            communication_s=self._all_reduce_s(stage, tokens, factors) + self._gather_s(stage, mean, factors),
            engine_s=factors.kernel_s * stage.kernels * (ASYNC_KERNELS if self.async_scheduling else 1.0),
            overlapped=factors is IDEAL,
        )

    @cached_property
    def _plain_rate(self) -> float:
        rates = self.accelerator.dense_flops
        return rates.get("bf16") or rates["fp16"]

    @cached_property
    def _has_untuned_experts(self) -> bool:
        """Whether experts in int4 have no kernel that was tuned for the GPU: CDNA 4 has, since 0.17 (vLLM's #35093)."""
        tuned = "fp4" in self.accelerator.dense_flops and self.engine.version >= (0, 17)
        return is_rocm(self.accelerator) and self.model.quantization.experts.name.startswith("int4") and not tuned

    def _flops_s(
        self, stage: StageWork, batch: tuple[float, float, float, float], attention: float, factors: Factors
    ) -> float:
        """Return the time to compute `batch`: (tokens of the rank, of the mean rank, sequences, their tokens)."""
        tokens, rows, _, sampled = batch
        rates, reached = self.accelerator.dense_flops, 1.0
        if factors is not IDEAL:
            reached = self.accelerator.matmul_share
            rows = max(rows, _EXPERT_ROWS * stage.experts_read(rows, self.layout.data_parallel_size))
            rows *= _UNTUNED_EXPERTS if self._has_untuned_experts else 1.0
        dense = sum(tokens * count / rates[type_] for type_, count in stage.dense_flops.items())
        experts = sum(rows * count / rates[type_] for type_, count in stage.expert_flops.items())
        head = max(1.0, sampled) * stage.head_flops / self._plain_rate
        attending = attention / self._plain_rate
        of_matrices = (dense + head) / factors.flops + experts / factors.expert_flops
        return (of_matrices + attending / factors.attention_flops) / reached

    def _all_reduce_s(self, stage: StageWork, tokens: float, factors: Factors) -> float:
        """Return the time of a stage's all-reduces. In a ring each rank sends 2·(n - 1)/n of their bytes."""
        ranks = self.layout.tensor_parallel_size
        if ranks == 1:
            return 0.0
        count = stage.layers * ALL_REDUCES_PER_LAYER
        size = count * tokens * self.work.hidden_bytes * 2 * (ranks - 1) / ranks
        return size / (self.link_bytes_per_s * factors.link) + count * factors.collective_s

    def _gather_s(self, stage: StageWork, tokens: float, factors: Factors) -> float:
        """Return the time to send tokens to their experts on other data-parallel ranks, and to bring the sums back.

        With expert parallelism the tensor-parallel ranks of a data-parallel rank each send a part of its tokens
        (`use_sequence_parallel_moe` in vLLM's config/parallel.py). A token goes once into each other node, over the
        network, and from there from GPU to GPU.
        """
        layout, size = self.layout, 2 * stage.expert_layers * tokens * self.work.hidden_bytes
        if layout.data_parallel_size == 1:
            return 0.0
        tensor = layout.tensor_parallel_size if self.engine.enable_expert_parallel else 1
        link = _rate_in_node(self.accelerator, layout.gpus_per_node)
        link_s = self._copies(stage, tensor * layout.data_parallel_size) * size / tensor / link
        network = layout.tensor_parallel_size * _network_rate(self.accelerator)
        network_s = self._copies(stage, layout.num_nodes) * size / network
        return (link_s + network_s) / factors.link + 2 * stage.expert_layers * factors.collective_s

    def _copies(self, stage: StageWork, places: int) -> float:
        """Return to how many of the other ranks, or nodes, a token goes: all of them by vLLM's default backend, which
        gathers and reduces (fused_moe/prepare_finalize/naive_dp_ep.py), and those with its experts by others."""
        if not self.engine.enable_expert_parallel or self.engine.all2all_backend in _GATHERING:
            return places - 1
        return (places - 1) * (1 - (1 - 1 / places) ** stage.experts_per_token)


# -- limits of tensor parallelism

_LINKS_BY_DIMENSIONS = {2: 4, 3: 6}


def limit_lines(roofline: Roofline) -> Iterator[str]:
    """Yield a sentence: whether communication or FLOP/s take longer in a full step. None for one GPU."""
    gpu, model, width = roofline.accelerator, roofline.model, roofline.layout.tensor_parallel_size
    inner = model.intermediate_size or model.moe_intermediate_size
    if gpu.slices and inner and width > 1:
        topology = slice_with(gpu, width)
        used = split_axes(topology) if topology else 1
        limit = model_parallel_limit(gpu, inner, used)
        verdict = "communication takes longer" if width > limit else "FLOP/s take longer"
        yield (
            f"Full batches over {topology or width} chips: F·axes ÷ (C ÷ W_ici) = {inner:,} x {used} ÷ "
            f"{inner * used / limit:,.0f} = {limit:.0f}; at {width}, {verdict}."
        )
    elif width > 1:
        step = roofline.step(roofline.max_num_batched_tokens, 0, 1, IDEAL)
        verdict = "communication takes longer" if step.communication_s > step.flops_s else "FLOP/s take longer"
        yield (
            f"A full step of {roofline.max_num_batched_tokens:,} tokens at TP={width}, ideally: "
            f"{1000 * step.communication_s:.1f} ms of all-reduces, {1000 * step.flops_s:.1f} ms of FLOP/s: {verdict}."
        )


def axis_bytes_per_s(accelerator: AcceleratorSpec) -> float:
    """Return the bytes per second along one axis of a torus, both directions together."""
    assert accelerator.link_bytes_per_s
    dimensions = len(accelerator.slices[0].split("x"))
    return 2 * accelerator.link_bytes_per_s / _LINKS_BY_DIMENSIONS[dimensions]


def model_parallel_limit(accelerator: AcceleratorSpec, intermediate_size: int, over_axes: int) -> float:
    """Return the most chips for a large batch before the links take longer than arithmetic: F·axes ÷ (C ÷ W_ici)."""
    return intermediate_size * over_axes / (accelerator.dense_flops["bf16"] / axis_bytes_per_s(accelerator))
