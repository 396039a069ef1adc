"""Chooses the layout: the fewest nodes, then the fewest GPUs, that hold the weights and the requests asked for.

Sizes that were asked for are kept and checked. layout.py lists layouts, candidates.py evaluates them, advice.py
finds what would help where nothing fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpc_serve.errors import DoesNotFitError
from hpc_serve.plan.choice import candidates
from hpc_serve.plan.choice.advice import Remedy, suggestions
from hpc_serve.plan.choice.candidates import Candidate, MinimumGpus, PlanInputs, minimum_gpus
from hpc_serve.plan.choice.kernels import refusal
from hpc_serve.plan.choice.layout import Layout, assumption, is_quantized_by_vllm, layouts, vllm_args
from hpc_serve.plan.engine import EngineConfig, Workload, max_num_batched_tokens, max_num_seqs
from hpc_serve.plan.hardware import AcceleratorSpec, ClusterSpec
from hpc_serve.plan.memory.estimate import MemoryEstimate
from hpc_serve.plan.model.spec import ModelSpec
from hpc_serve.units import GIB, number_of

_MOST_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class ServePlan:
    """A layout that fits, and how to ask vLLM for it.

    `layout` is the layout of one replica, on nodes with `accelerator`. `vllm_args` are the options after the model,
    without served names, host, port and backend. `memory` is the memory of the tightest rank. If the cache does not
    hold all requests asked for at once, the options in `suggestions` make it hold them. `of_candidates` are the
    `reasons` that stand with the candidates. `quantizes_files`: vLLM makes 8 bits of 16-bit files as it loads them.
    """

    model: str
    served_model_names: tuple[str, ...]
    accelerator: AcceleratorSpec
    layout: Layout
    replicas: int
    max_model_len: int
    vllm_args: tuple[str, ...]
    memory: MemoryEstimate
    reasons: tuple[str, ...]
    minimum_gpus: MinimumGpus
    quantizes_files: bool = False
    of_candidates: frozenset[str] = frozenset()
    candidates: tuple[Candidate, ...] = ()
    suggestions: tuple[Remedy, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """The reasons that no candidate has."""
        return tuple(reason for reason in self.reasons if reason not in self.of_candidates)


class NoLayoutError(DoesNotFitError):
    """No layout fits. `candidates` are the layouts that miss least; with an option in `suggestions` a layout fits."""

    def __init__(
        self,
        text: str,
        minimum_gpus: MinimumGpus,
        *,
        candidates: tuple[Candidate, ...] = (),
        suggestions: tuple[Remedy, ...] = (),
    ) -> None:
        super().__init__(text)
        self.candidates = candidates
        self.suggestions = suggestions
        self.minimum_gpus = minimum_gpus

    def __str__(self) -> str:
        helps = "; or ".join(map(str, self.suggestions))
        return f"{self.args[0]}\nIt would with {helps}." if helps else str(self.args[0])


def plan(
    model: ModelSpec,
    cluster: ClusterSpec,
    engine: EngineConfig | None = None,
    workload: Workload | None = None,
    *,
    served_model_names: tuple[str, ...] = (),
) -> ServePlan:
    """Return the smallest layout that holds the model and the workload.

    If no layout holds all requests at once, return one that holds as many as possible: the others wait. Raises
    NoLayoutError if no layout holds a single request of the longest context, and InvalidRequestError for a context
    longer than the model's.
    """
    inputs = PlanInputs.of(model, cluster, engine or EngineConfig(), workload or Workload())
    return choose(inputs, served_model_names=served_model_names)


def choose(asked: PlanInputs, *, served_model_names: tuple[str, ...] = ()) -> ServePlan:
    """Return the plan for these inputs, as `plan` does."""
    inputs = asked.for_one_replica()
    if refused := refusal(inputs.model, inputs.engine, inputs.cluster.accelerator):
        raise NoLayoutError(f"vLLM refuses {refused}", minimum_gpus(inputs, at_most=0))
    tried: list[Candidate] = []
    try:
        for layout in layouts(inputs.cluster, inputs.engine):
            candidate = inputs.evaluate(layout)
            if candidate.verdict == "fits":
                return _plan(inputs, replace(candidate, verdict="chosen"), tried, served_model_names)
            tried.append(candidate)
        if (queues := candidates.that_queues(tried)) is not None:
            others = [candidate for candidate in tried if candidate is not queues]
            helps = tuple(suggestions(asked, [queues.layout]))
            return _plan(inputs, replace(queues, verdict="chosen"), others, served_model_names, helps)
    except DoesNotFitError as error:
        one = replace(asked, workload=replace(asked.workload, concurrency=1))
        minimum, helps = minimum_gpus(inputs, at_most=0), tuple(suggestions(one, []))
        raise NoLayoutError(str(error), minimum, suggestions=helps) from None
    raise _nothing_fits(asked, tried)


def _plan(
    inputs: PlanInputs,
    chosen: Candidate,
    tried: list[Candidate],
    served_model_names: tuple[str, ...],
    suggestions: tuple[Remedy, ...] = (),
) -> ServePlan:
    layout, memory, model, engine = chosen.layout, chosen.memory, inputs.model, inputs.engine_for(chosen.layout)
    assert memory is not None
    if memory.max_num_seqs != max_num_seqs(engine, inputs.cluster.accelerator):
        engine = replace(engine, max_num_seqs=memory.max_num_seqs)
    if inputs.cluster.accelerator.kind == "cpu" and engine.kv_cache_memory_bytes is None:
        # By default vLLM takes its share of the whole machine, even where the job has a part of it.
        engine = replace(engine, kv_cache_memory_bytes=memory.kv_cache_bytes)
    others = candidates.alternatives(inputs, layout, {candidate.layout for candidate in tried})
    minimum = minimum_gpus(inputs, at_most=layout.num_gpus)
    reasons, of_candidates = _reasons(inputs, chosen, tried, others, minimum)
    return ServePlan(
        model=model.name,
        served_model_names=served_model_names or (model.name,),
        accelerator=inputs.cluster.accelerator,
        layout=layout,
        replicas=inputs.workload.replicas or 1,
        max_model_len=inputs.max_model_len,
        vllm_args=vllm_args(layout, inputs.max_model_len, engine, model),
        memory=memory,
        reasons=(*_waiting_reasons(inputs, chosen, suggestions), *reasons),
        of_candidates=of_candidates,
        suggestions=suggestions,
        minimum_gpus=minimum,
        quantizes_files=model.quantization.is_assumed and is_quantized_by_vllm(engine, model),
        candidates=(*candidates.next_smaller(tried, layout), chosen, *others),
    )


def _reasons(
    inputs: PlanInputs, chosen: Candidate, tried: list[Candidate], others: list[Candidate], minimum: MinimumGpus
) -> tuple[list[str], frozenset[str]]:
    """Return the reasons for the plan, and those of them that stand with the candidates."""
    gpu, memory, layout = inputs.cluster.accelerator, chosen.memory, chosen.layout
    assert memory is not None
    usable = f"; vLLM can start on {minimum.usable}" if minimum.usable else ""
    reasons = [
        f"{inputs.model.weight_bytes / 1e9:.1f} GB of weights: {minimum.weights} x {gpu.name} by the label "
        f"({gpu.label_bytes / 1e9:.0f} GB), {minimum.full_context} with one request of the longest context{usable}."
    ]
    of_candidates = [f"Not {below.layout}: {below.reason}." for below in candidates.on_most_gpus(tried)]
    reasons += of_candidates
    if gpu.kind == "tpu" and layout.num_nodes > 1:
        reasons.append(f"{layout}: tensor parallelism goes over the links between chips, which span hosts.")
    elif layout.data_parallel_size > 1:
        reasons.append(_data_parallel_reason(inputs, layout))
    elif layout.num_nodes > 1 and not layout.splits_layers_across_nodes:
        reasons.append(
            f"{layout}: tensor parallelism stays within a node: its links carry two all-reduces a layer; "
            "the network between nodes carries one transfer a stage."
        )
    crossing = [f"Not {other.layout}: {other.reason}." for other in others if other.layout.splits_layers_across_nodes]
    reasons += crossing
    size = inputs.cluster.node_size_of(layout.num_nodes)
    if layout.num_nodes > 1 and layout.gpus_per_node < size:
        idle = size - layout.gpus_per_node
        reasons.append(f"{layout}: a job takes several nodes whole, so {idle} of {size} {gpu.unit}s of each stay idle.")
    leaves = f"{layout} leaves {candidates.cache_room_text(memory, layout)}."
    reasons.append(leaves)
    if memory.least_blocks and memory.max_num_seqs != max_num_seqs(inputs.engine, gpu):
        reasons.append(
            f"--max-num-seqs {memory.max_num_seqs}: each sequence of a hybrid takes a block of the cache, "
            f"and vLLM refuses to start with more sequences than blocks ({memory.num_blocks:,})."
        )
    if memory.graphs_outside and memory.cuda_graph_bytes:
        graphs = f"{memory.cuda_graph_bytes / GIB:.1f} GiB of CUDA graphs"
        reasons.append(
            f"vLLM {inputs.engine.vllm_version} does not count its {graphs}: they need free memory beside the budget."
        )
    if assumed := assumption(inputs.engine, inputs.model):
        reasons.append(assumed)
    return reasons, frozenset((*of_candidates, *crossing, leaves))


def _data_parallel_reason(inputs: PlanInputs, layout: Layout) -> str:
    """Return a sentence on what data-parallel ranks share, and on what the gathered tokens take."""
    engine, gpu, ranks = inputs.engine_for(layout), inputs.cluster.accelerator, layout.data_parallel_size
    tokens = max_num_batched_tokens(engine, gpu, inputs.max_model_len)
    return (
        f"{layout}: each of {ranks} ranks has all weights but the experts, and a cache and --max-num-seqs of its own. "
        f"The experts of a rank see the {ranks} x {tokens:,} tokens of a step of all ranks: a smaller "
        "--max-num-batched-tokens leaves more to the cache."
    )


def _waiting_reasons(inputs: PlanInputs, chosen: Candidate, suggestions: tuple[Remedy, ...]) -> list[str]:
    """Return a sentence on requests that wait, where the cache does not hold all that are asked for at once."""
    memory, concurrency = chosen.memory, inputs.workload.concurrency
    assert memory is not None
    each = inputs.blocks_each(chosen.layout, memory)
    if memory.holds(inputs.requests_per_rank(chosen.layout), each):
        return []
    held = memory.held(each) * chosen.layout.data_parallel_size
    helps = f" All run at once with {'; or '.join(map(str, suggestions))}." if suggestions else ""
    return [
        f"The cache holds {held:,} of {concurrency:,} requests {inputs.request_text()}: the others wait, "
        f"as vLLM queues them.{helps}"
    ]


def _nothing_fits(asked: PlanInputs, tried: list[Candidate]) -> NoLayoutError:
    """Return the error where no layout holds a single request of the longest context."""
    asked = replace(asked, workload=replace(asked.workload, concurrency=1))
    inputs = asked.for_one_replica()
    shown = [inputs.evaluate(candidate.layout) for candidate in candidates.closest_to_fitting(tried, _MOST_SHOWN)]
    helps = suggestions(asked, [candidate.layout for candidate in shown])
    cluster = inputs.cluster
    nodes = number_of(cluster.num_nodes, "node") if cluster.num_nodes else "any number of nodes"
    requests = f"1 request of {inputs.max_model_len:,} tokens"
    gpus = f"{cluster.node_size} {cluster.accelerator.name}"
    headline = f"{inputs.model.name} does not fit {nodes} of {gpus} with {requests}."
    if all(candidate.memory is None for candidate in tried):
        where = "so" if inputs.engine.has_asked_layout else f"on {nodes} of {gpus}"
        headline = f"{inputs.model.name} cannot be served {where}:"
        headline += "" if tried else f" no slice has so many {cluster.accelerator.unit}s."
    lines = [headline, *(f"  {candidate.layout}: {candidate.reason}" for candidate in shown)]
    minimum = minimum_gpus(inputs, at_most=0)
    return NoLayoutError("\n".join(lines), minimum, candidates=tuple(shown), suggestions=tuple(helps))
