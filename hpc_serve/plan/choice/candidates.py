"""Evaluates single layouts: whether one fits, the number that decides about it, and how much more it would hold.

First come the candidates of a plan and what a person might expect beside the chosen one. Then come limits: the longest
context that a layout holds, and the fewest GPUs on which a model starts. Last, one engine on a whole node is compared
with several engines that share it. layout.py lists the layouts, planner.py chooses among the candidates.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan.choice.layout import Layout, layouts_on, without_layout
from hpc_serve.plan.engine import EngineConfig, Workload, max_num_batched_tokens
from hpc_serve.plan.hardware import ClusterSpec
from hpc_serve.plan.memory.estimate import MemoryEstimate, estimate_memory
from hpc_serve.plan.memory.kv_cache import cache_layout, full_context_bytes
from hpc_serve.plan.model.spec import ModelSpec
from hpc_serve.units import GIB


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that was evaluated.

    `memory` is None where vLLM refuses the layout. `reason` has the number that decided.
    """

    layout: Layout
    memory: MemoryEstimate | None
    verdict: Literal["chosen", "fits", "too small", "refused"]
    reason: str


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """The inputs of a plan: the model, the machines, the engine's options, and the load that each replica must hold."""

    model: ModelSpec
    cluster: ClusterSpec
    engine: EngineConfig
    workload: Workload
    max_model_len: int

    @classmethod
    def of(cls, model: ModelSpec, cluster: ClusterSpec, engine: EngineConfig, workload: Workload) -> PlanInputs:
        """Return the inputs with the context that the load asks for, else with the model's own."""
        length = workload.max_model_len or model.max_model_len
        return cls(model=model, cluster=cluster, engine=engine, workload=workload, max_model_len=length)

    def for_one_replica(self) -> PlanInputs:
        """Return the same with the machines of one replica.

        A single replica has all machines. Several replicas have whole nodes each, or equal parts of a node. Raises
        InvalidRequestError where they cannot share the machines evenly.
        """
        replicas = self.workload.replicas or 1
        if replicas == 1:
            return self
        nodes, size = self.cluster.num_nodes or 1, self.cluster.node_size
        if nodes % replicas == 0:
            return replace(self, cluster=replace(self.cluster, num_nodes=nodes // replicas))
        share = nodes * size // replicas
        if nodes * size % replicas or size % share:
            raise InvalidRequestError(
                f"{replicas} replicas cannot share {nodes} x {size} GPUs evenly: "
                "use a number that divides the nodes, or the GPUs of a node."
            )
        return replace(self, cluster=replace(self.cluster, num_nodes=1, gpus_per_node=share))

    def evaluate(self, layout: Layout) -> Candidate:
        """Estimate a layout's memory, and decide whether it holds the load asked for."""
        engine = self.engine_for(layout)
        try:
            memory = self._estimate(layout, engine)
            if engine.max_num_seqs is None and 1 < memory.num_blocks < memory.least_blocks:
                fewer = _max_num_seqs_for(memory.num_blocks)
                memory = self._estimate(layout, replace(engine, max_num_seqs=fewer))
        except DoesNotFitError as error:
            return Candidate(layout=layout, memory=None, verdict="refused", reason=str(error))
        if memory.holds(self.requests_per_rank(layout), self.blocks_each(layout, memory)):
            return Candidate(layout=layout, memory=memory, verdict="fits", reason=cache_room_text(memory, layout))
        return Candidate(layout=layout, memory=memory, verdict="too small", reason=self._shortfall_text(layout, memory))

    def fits(self, layout: Layout) -> bool:
        """Return whether a layout holds the load asked for."""
        return self.evaluate(layout).verdict == "fits"

    def engine_for(self, layout: Layout) -> EngineConfig:
        """Return the engine's options in a layout. A data-parallel layout that nobody asked for divides whole experts.

        Without --enable-expert-parallel the ranks would each hold a slice of every expert.
        """
        if layout.data_parallel_size == 1:
            return self.engine
        whole = self.engine.enable_expert_parallel or self.engine.data_parallel_size is None
        return replace(self.engine, data_parallel_size=layout.data_parallel_size, enable_expert_parallel=whole)

    def requests_per_rank(self, layout: Layout) -> int:
        """Return the requests at once of each data-parallel rank: of a layout without them, all."""
        return -(-self.workload.concurrency // layout.data_parallel_size)

    def blocks_each(self, layout: Layout, memory: MemoryEstimate) -> int:
        """Return the blocks of the cache that one of the requests asked for takes."""
        tokens = min(self.workload.request_tokens or self.max_model_len, self.max_model_len)
        if tokens == self.max_model_len and not self.model.encoder_positions:
            return memory.blocks_per_request
        kind, ranks = self.cluster.accelerator.kind, layout.tensor_parallel_size
        step = max_num_batched_tokens(self.engine, self.cluster.accelerator, self.max_model_len)
        return cache_layout(self.model, self.engine, ranks, kind=kind).blocks_per_request(tokens, step)

    def request_text(self) -> str:
        """Say in words how long the requests asked for are."""
        tokens = self.workload.request_tokens
        return "of the longest context" if tokens is None else f"of {tokens:,} tokens"

    def _shortfall_text(self, layout: Layout, memory: MemoryEstimate) -> str:
        """Say in words what a layout lacks."""
        unit, concurrency = self.cluster.accelerator.unit, self.requests_per_rank(layout)
        if memory.kv_cache_bytes <= 0:
            needed = memory.requested_bytes - memory.kv_cache_bytes
            with_what = "with --kv-cache-memory-bytes" if self.engine.kv_cache_memory_bytes else "before any cache"
            return f"{needed / GIB:.1f} GiB per {unit} {with_what}, {memory.requested_bytes / GIB:.1f} usable"
        if memory.num_blocks < memory.least_blocks:
            return (
                f"vLLM refuses it: max_num_seqs ({memory.max_num_seqs}) exceeds available Mamba cache blocks "
                f"({memory.num_blocks})"
            )
        wanted, verb = f"{concurrency} requests {self.request_text()}", "need"
        blocks = concurrency * self.blocks_each(layout, memory)
        if blocks <= memory.blocks_per_request:
            wanted, verb, blocks = "one request of the longest context", "needs", memory.blocks_per_request
        needed = (blocks + 1) * memory.bytes_per_block
        return f"{wanted} {verb} {needed / GIB:.1f} GiB of cache per {unit}, {memory.kv_cache_bytes / GIB:.1f} left"

    def _estimate(self, layout: Layout, engine: EngineConfig) -> MemoryEstimate:
        return estimate_memory(
            self.model,
            self.cluster.accelerator,
            engine,
            tensor_parallel_size=layout.tensor_parallel_size,
            pipeline_parallel_size=layout.pipeline_parallel_size,
            data_parallel_size=layout.data_parallel_size,
            max_model_len=self.max_model_len,
        )


def _max_num_seqs_for(blocks: int) -> int:
    """Return the sequences of a step for a hybrid with so many blocks: a power of two that leaves a quarter of them
    free.

    >>> _max_num_seqs_for(856)
    512
    """
    return int(2 ** ((blocks * 3 // 4) or 1).bit_length()) // 2


def alternatives(inputs: PlanInputs, chosen: Layout, tried: Set[Layout]) -> list[Candidate]:
    """Return layouts on the same nodes that were not tried and that a person might expect, each with its reason."""
    if inputs.engine.has_asked_layout:
        return []
    found = []
    for layout in _neighbours(chosen, inputs):
        if layout in tried:
            continue
        candidate = inputs.evaluate(layout)
        if candidate.verdict == "fits":
            reason = f"{_reason_against(layout, chosen, inputs)}; {candidate.reason}"
            candidate = replace(candidate, reason=reason)
        found.append(candidate)
    return found


def next_smaller(tried: Sequence[Candidate], chosen: Layout) -> list[Candidate]:
    """Return the candidates one step smaller than the chosen one: the largest on one node fewer, and all on as many
    nodes."""
    same = [candidate for candidate in tried if candidate.layout.num_nodes == chosen.num_nodes]
    fewer = [candidate for candidate in tried if candidate.layout.num_nodes == chosen.num_nodes - 1]
    return on_most_gpus(fewer) + same


def on_most_gpus(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidate with the largest tensor parallel size among those on most GPUs. Empty if there is none."""
    most = max((candidate.layout.num_gpus for candidate in candidates), default=0)
    return [candidate for candidate in candidates if candidate.layout.num_gpus == most][:1]


def closest_to_fitting(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return the candidates that miss least, one for each reason.

    Candidates that vLLM refuses come last, the smallest first.
    """

    def distance(candidate: Candidate) -> tuple[int, int]:
        if candidate.memory is None:
            return 1, candidate.layout.num_gpus
        return 0, -candidate.memory.kv_cache_bytes

    different: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=distance):
        different.setdefault(candidate.reason, candidate)
    return list(different.values())[:count]


def that_queues(tried: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate on the fewest nodes and most GPUs when no layout holds all requests. Some requests wait.

    None if no layout holds a single request of the longest context.
    """
    able = [candidate for candidate in tried if candidate.memory is not None and candidate.memory.holds(1)]
    fewest = min((candidate.layout.num_nodes for candidate in able), default=0)
    return next(iter(on_most_gpus([candidate for candidate in able if candidate.layout.num_nodes == fewest])), None)


def cache_room_text(memory: MemoryEstimate, layout: Layout) -> str:
    """Say in words how much cache a layout leaves for requests."""
    if not memory.blocks_per_request:
        return f"{max(0, memory.kv_cache_bytes) / GIB:.1f} GiB unused, because an encoder caches nothing"
    ranks = layout.data_parallel_size
    each = f" in each of {ranks} data-parallel ranks" if ranks > 1 else ""
    return (
        f"{memory.kv_cache_tokens:,} tokens of cache, {memory.max_concurrency:.1f} requests of the longest context"
        f"{each}"
    )


def _neighbours(chosen: Layout, inputs: PlanInputs) -> Iterator[Layout]:
    """Yield layouts beside the chosen one.

    On several nodes: one tensor-parallel group over all nodes. On one node: more GPUs. On both: half the tensor
    parallel size; for a model with experts, as many GPUs as the chosen layout, with data-parallel ranks of one GPU.
    """
    cluster = inputs.cluster
    if inputs.model.num_experts and cluster.accelerator.kind == "gpu" and chosen.num_gpus > 1:
        yield replace(chosen, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=chosen.num_gpus)
    if chosen.num_nodes > 1 and chosen.pipeline_parallel_size > 1:
        yield replace(chosen, tensor_parallel_size=chosen.num_gpus, pipeline_parallel_size=1)
    for layout in layouts_on(chosen.num_nodes, cluster, EngineConfig()):
        more = layout.num_gpus > chosen.num_gpus
        is_wider = chosen.num_nodes == 1 and more and layout.pipeline_parallel_size == 1
        is_half = layout.tensor_parallel_size * 2 == chosen.tensor_parallel_size
        if is_wider or (is_half and layout.num_gpus == chosen.num_gpus):
            yield layout


def _reason_against(layout: Layout, chosen: Layout, inputs: PlanInputs) -> str:
    accelerator = inputs.cluster.accelerator
    if layout.data_parallel_size > 1:
        return (
            f"each of {layout.data_parallel_size} ranks computes its own requests alone, which is slower for few "
            "requests at once; --target throughput compares the speed"
        )
    if layout.splits_layers_across_nodes and accelerator.kind != "tpu":
        network, link = accelerator.network_bytes_per_s, accelerator.link_bytes_per_s
        speeds = f" ({network / 1e9:.0f} GB/s a GPU against {link / 1e9:.0f} in the node)" if network and link else ""
        heads, copies = inputs.model.num_key_value_heads, ""
        if not inputs.model.is_mla and layout.tensor_parallel_size > heads:
            copies = f", and each of {heads} KV heads would be held {layout.tensor_parallel_size // heads} times"
        return f"two all-reduces a layer would cross the network{speeds}{copies}"
    if layout.num_gpus > chosen.num_gpus:
        verb = "is" if chosen.num_gpus == 1 else "are"
        return f"{layout.num_gpus} {accelerator.unit}s, and {chosen.num_gpus} {verb} enough"
    return "more pipeline stages than needed, and each costs a transfer and waiting"


# -- limits

CONTEXT_STEP = 1024
"""Contexts are looked for in steps of so many tokens, and the model's own is tried too."""
_AT_ONCE = (1, 4, 16, 64)
Contexts: TypeAlias = dict[Layout, dict[int, int]]
"""The longest context of each layout, by the number of requests of that length at once. 0: none of a step fits."""


def longest_context(inputs: PlanInputs, layout: Layout) -> int:
    """Return the longest context that fits for the requests asked for, at most that of `inputs`.

    0: none of a step fits.
    """
    whole = inputs.max_model_len
    inputs = replace(inputs, workload=replace(inputs.workload, request_tokens=None))
    if inputs.fits(layout):
        return whole
    steps = range(CONTEXT_STEP, whole, CONTEXT_STEP)
    fitting = bisect_left(steps, True, key=lambda tokens: not replace(inputs, max_model_len=tokens).fits(layout))
    return fitting * CONTEXT_STEP


def contexts_of(inputs: PlanInputs, layouts: Iterable[Layout]) -> Contexts:
    """Return the longest contexts of those layouts that hold any, for several numbers of requests at once."""
    found: Contexts = {}
    for layout in layouts:
        lengths: dict[int, int] = {}
        longest = inputs.max_model_len
        for count in _AT_ONCE:
            asked = replace(inputs, workload=replace(inputs.workload, concurrency=count), max_model_len=longest)
            lengths[count] = longest = longest_context(asked, layout) if longest else 0
        if lengths[_AT_ONCE[0]]:
            found[layout] = lengths
    return found


@dataclass(frozen=True, kw_only=True)
class MinimumGpus:
    """GPUs by their label's bytes (80e9 for an H100): for the weights, and for weights and one longest request.

    `usable` is the smallest number on which vLLM starts with any sizes. None: not on as many as were tried.
    """

    weights: int
    full_context: int
    usable: int | None


def minimum_gpus(inputs: PlanInputs, *, at_most: int) -> MinimumGpus:
    """Return the three figures. The search for `usable` ends at `at_most` GPUs.

    >>> from hpc_serve.plan import ClusterSpec, EngineConfig, accelerator, model_from_config, resolve
    >>> model = model_from_config(resolve("70b").config, name="70b")
    >>> h100 = ClusterSpec(accelerator=accelerator("h100-80gb"))
    >>> asked = PlanInputs(
    ...     model=model, cluster=h100, engine=EngineConfig(), workload=Workload(), max_model_len=131072
    ... )
    >>> minimum_gpus(asked, at_most=4)
    MinimumGpus(weights=2, full_context=3, usable=3)
    """
    label = inputs.cluster.accelerator.label_bytes
    weights = inputs.model.weight_bytes
    context = full_context_bytes(inputs.model, inputs.engine, inputs.max_model_len)
    return MinimumGpus(
        weights=-(-weights // label),
        full_context=-(-(weights + context) // label),
        usable=_usable(inputs, range(max(1, weights // label), at_most + 1)),
    )


def _usable(inputs: PlanInputs, counts: range) -> int | None:
    one_request = replace(inputs, workload=Workload())
    model = inputs.model
    for gpus in counts:
        for width in range(min(gpus, inputs.cluster.node_size), 0, -1):
            if gpus % width or model.num_attention_heads % width or gpus // width > model.num_hidden_layers:
                continue
            if one_request.fits(Layout(tensor_parallel_size=width, pipeline_parallel_size=gpus // width)):
                return gpus
    return None


# -- replicas that share a node

TYPICAL_REQUEST_TOKENS = 2048
"""The length of a request for comparing options."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """A node shared by `replicas` engines of one layout, each with `memory` on its tightest GPU."""

    replicas: int
    layout: Layout
    memory: MemoryEstimate

    @property
    def total_tokens(self) -> int:
        """Tokens in the caches of all replicas."""
        return self.replicas * self.memory.kv_cache_tokens

    @property
    def typical_requests(self) -> int:
        """Requests of TYPICAL_REQUEST_TOKENS that all replicas hold at once."""
        return self.replicas * (self.memory.kv_cache_tokens // TYPICAL_REQUEST_TOKENS)


def replica_options(inputs: PlanInputs) -> list[Sharing]:
    """Return all options to fill one node evenly with replicas that can start. The fewest replicas come first.

    Replicas that cannot hold the whole context are listed too, with the context that they can hold.
    """
    size = inputs.cluster.node_size
    found = []
    free = replace(inputs, engine=without_layout(inputs.engine))
    for replicas in (count for count in range(1, size + 1) if size % count == 0):
        width = size // replicas
        layout = Layout(tensor_parallel_size=width, pipeline_parallel_size=1)
        memory = free.evaluate(layout).memory
        if memory is not None and memory.kv_cache_tokens >= TYPICAL_REQUEST_TOKENS:
            found.append(Sharing(replicas=replicas, layout=layout, memory=memory))
    return found


def compare_sharing(options: list[Sharing], max_model_len: int) -> str | None:
    """Say when the fewest and when the most replicas are better, with the numbers. None if there is one option."""
    if len(options) < 2:
        return None
    large, many = options[0], options[-1]
    of_large, of_many = (f"{one.replicas} x TP={one.layout.tensor_parallel_size}" for one in (large, many))
    text = (
        f"On a node {of_many} hold the weights {many.replicas} times and leave {many.total_tokens:,} tokens of cache "
        f"in all, against {large.total_tokens:,} of {of_large}. "
    )
    if many.typical_requests >= large.typical_requests:
        text += "The small engines hold no less and communicate less: they are the better choice."
    else:
        text += (
            f"The small engines communicate less and are the better choice up to {many.typical_requests:,} requests of "
            f"{TYPICAL_REQUEST_TOKENS:,} tokens at once. Beyond that {of_large} is, with larger batches."
        )
    if many.memory.kv_cache_tokens < max_model_len:
        text += f" In a small engine a request may have at most {many.memory.kv_cache_tokens:,} tokens."
    return text
