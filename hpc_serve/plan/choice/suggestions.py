"""What would make a model fit where it does not: more nodes, fewer requests, a shorter context, an fp8 cache, quantised
weights. Each is tried, so that what is proposed holds.
"""

from __future__ import annotations

from dataclasses import replace

from hpc_serve.errors import DoesNotFitError
from hpc_serve.plan.choice.candidates import PlanInputs
from hpc_serve.plan.choice.layout import Layout, layouts, layouts_on
from hpc_serve.plan.hardware.cluster import ClusterSpec
from hpc_serve.plan.hardware.tpu import slice_with
from hpc_serve.plan.memory.kv_cache import kv_cache_dtype
from hpc_serve.plan.model.quantization import FP8_TENSOR, Scheme, int_groups
from hpc_serve.plan.model.spec import ModelSpec
from hpc_serve.plan.model.weights import Linear, Weight

_CONTEXT_STEP = 1024
_QUANTIZATIONS: tuple[tuple[str, Scheme], ...] = (
    ("fp8 weights (--quantization fp8)", FP8_TENSOR),
    ("a checkpoint quantised to 4 bits (AWQ, GPTQ)", int_groups(4, 128, False)),
)


def suggestions(inputs: PlanInputs, nearest: list[Layout]) -> list[str]:
    """Changes after which a layout fits, each as what to type and what it gives. Empty: none of them helps."""
    tries = (
        _fewer_sequences(inputs, nearest),
        _more_nodes(inputs) or _other_sizes(inputs),
        _fewer_requests(inputs, nearest),
        _shorter_context(inputs, nearest),
    )
    return [text for text in (*tries, _smaller_cache(inputs, nearest), _smaller_weights(inputs)) if text]


def _fewer_sequences(inputs: PlanInputs, nearest: list[Layout]) -> str | None:
    """For hybrids, where more sequences than blocks were asked for."""
    if inputs.engine.max_num_seqs is None:
        return None
    free = replace(inputs, engine=replace(inputs.engine, max_num_seqs=None))
    for layout in nearest:
        candidate = free.evaluate(layout)
        if candidate.verdict == "fits" and candidate.memory is not None and candidate.memory.least_blocks:
            return f"--max-num-seqs {candidate.memory.max_num_seqs}"
    return None


def _more_nodes(inputs: PlanInputs) -> str | None:
    cluster = inputs.cluster
    if not cluster.num_nodes:
        return None
    free = replace(inputs, cluster=_any_number_of(cluster))
    layout = _first_that_fits(free)
    if layout is None:
        return None
    sizes = f"TP={layout.tensor_parallel_size} PP={layout.pipeline_parallel_size}"
    if topology := slice_with(cluster.accelerator, layout.num_gpus):
        return f"--gpu {cluster.accelerator.name}:{topology} ({sizes})"
    return f"--nodes {layout.num_nodes} --gpus-per-node {free.cluster.node_size_of(layout.num_nodes)} ({sizes})"


def _any_number_of(cluster: ClusterSpec) -> ClusterSpec:
    """The same machines, as many as one likes; of slices, another slice."""
    if cluster.is_whole and cluster.accelerator.kind == "tpu":
        return ClusterSpec(accelerator=cluster.accelerator)
    return replace(cluster, num_nodes=None)


def _other_sizes(inputs: PlanInputs) -> str | None:
    """Sizes in place of those asked for, on as few nodes as will do the nearest."""
    engine, cluster = inputs.engine, inputs.cluster
    tensor, pipeline = engine.tensor_parallel_size, engine.pipeline_parallel_size
    if not (tensor or pipeline):
        return None
    free = replace(inputs, engine=replace(engine, tensor_parallel_size=None, pipeline_parallel_size=None))
    first = _first_that_fits(free)
    if first is None:
        return None

    def distance(layout: Layout) -> tuple[int, int, int]:
        off = abs(layout.tensor_parallel_size - tensor) if tensor else 0
        off += abs(layout.pipeline_parallel_size - pipeline) if pipeline else 0
        return off, -layout.tensor_parallel_size, layout.num_gpus

    there = layouts_on(first.num_nodes, cluster, free.engine)
    best = min((layout for layout in there if free.evaluate(layout).verdict == "fits"), key=distance, default=first)
    sizes = f"--tensor-parallel-size {best.tensor_parallel_size} --pipeline-parallel-size {best.pipeline_parallel_size}"
    return sizes if cluster.num_nodes else f"{sizes} --nodes {best.num_nodes}"


def _fewer_requests(inputs: PlanInputs, nearest: list[Layout]) -> str | None:
    if inputs.workload.concurrency == 1:
        return None
    most = 0
    for layout in nearest:
        memory = inputs.evaluate(layout).memory
        if memory is not None and memory.kv_cache_bytes > 0 and memory.blocks_per_request:
            most = max(most, (memory.num_blocks - 1) // memory.blocks_per_request)
    return f"{most} request{'s' if most > 1 else ''} of that length at once" if most else None


def _shorter_context(inputs: PlanInputs, nearest: list[Layout]) -> str | None:
    longest = max((_longest(inputs, layout) for layout in nearest), default=0)
    return f"--max-model-len {longest}" if longest else None


def _longest(inputs: PlanInputs, layout: Layout) -> int:
    """The longest context, in steps of 1,024 tokens, that fits; 0: not even one step."""
    low, high = 0, inputs.max_model_len // _CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if replace(inputs, max_model_len=middle * _CONTEXT_STEP).evaluate(layout).verdict == "fits":
            low = middle
        else:
            high = middle - 1
    return low * _CONTEXT_STEP


def _smaller_cache(inputs: PlanInputs, nearest: list[Layout]) -> str | None:
    if kv_cache_dtype(inputs.model, inputs.engine) not in ("bfloat16", "float16"):
        return None
    small = replace(inputs, engine=replace(inputs.engine, kv_cache_dtype="fp8"))
    return "--kv-cache-dtype fp8" if any(small.evaluate(layout).verdict == "fits" for layout in nearest) else None


def _smaller_weights(inputs: PlanInputs) -> str | None:
    if inputs.model.quantization.method != "none":
        return None
    for text, scheme in _QUANTIZATIONS:
        if scheme is FP8_TENSOR and inputs.cluster.accelerator.kind == "cpu":
            continue  # vLLM 0.32 has no fp8 kernels for CPUs
        layout = _first_that_fits(replace(inputs, model=_quantized(inputs.model, scheme)))
        if layout is not None:
            return f"{text}: {layout}"
    return None


def _quantized(model: ModelSpec, scheme: Scheme) -> ModelSpec:
    """The model with the linear layers of its decoder in `scheme`.

    Routers, embeddings, head and norms stay in 16 bit, as quantizers leave them.
    """

    def change(weight: Weight) -> Weight:
        if not isinstance(weight, Linear) or weight.name.endswith(("gate", "gate_proj")):
            return weight
        return replace(weight, scheme=scheme)

    return model.with_weights(lambda weights: tuple(change(weight) for weight in weights))


def _first_that_fits(inputs: PlanInputs) -> Layout | None:
    try:
        for layout in layouts(inputs.cluster, inputs.engine):
            if inputs.evaluate(layout).verdict == "fits":
                return layout
    except DoesNotFitError:
        return None
    return None
