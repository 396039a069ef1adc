"""The fewest GPUs that a model needs: two rough figures that people use, and the number on which vLLM starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpc_serve.plan.choice.candidates import PlanInputs
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.engine import Workload
from hpc_serve.plan.memory.kv_cache import full_context_bytes


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
            layout = Layout(
                tensor_parallel_size=width, pipeline_parallel_size=gpus // width, num_nodes=1, gpus_per_node=gpus
            )
            if one_request.fits(layout):
                return gpus
    return None
