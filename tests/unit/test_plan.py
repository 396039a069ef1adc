"""The layouts that the committed scripts use must come out of the planner by themselves."""

from __future__ import annotations

import pytest

from hpc_serve.plan import ClusterSpec, accelerator, model_from_config, plan, resolve


@pytest.mark.parametrize(
    ("alias", "tensor_parallel_size", "pipeline_parallel_size", "num_nodes", "gpus_per_node"),
    [("405b", 8, 2, 2, 8), ("70b", 4, 1, 1, 4), ("8b", 1, 1, 1, 1)],
)
def test_default_layout_on_h100(
    alias: str, tensor_parallel_size: int, pipeline_parallel_size: int, num_nodes: int, gpus_per_node: int
) -> None:
    entry = resolve(alias)
    model = model_from_config(entry.config, name=entry.name)
    found = plan(model, ClusterSpec(accelerator=accelerator("h100-80gb")))
    assert found.model == entry.name
    assert (found.tensor_parallel_size, found.pipeline_parallel_size) == (tensor_parallel_size, pipeline_parallel_size)
    assert (found.num_nodes, found.gpus_per_node, found.replicas) == (num_nodes, gpus_per_node, 1)
    assert found.max_model_len == 131072
