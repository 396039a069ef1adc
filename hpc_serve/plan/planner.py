"""Chooses the layout: the fewest nodes, then the fewest GPUs, that hold the weights and the requests asked for.

Tensor parallelism stays within a node, pipeline parallelism crosses nodes. What is asked for explicitly is kept, and
checked. The estimate behind each choice is memory.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpc_serve.errors import DoesNotFitError
from hpc_serve.plan.accelerator import GIB, ClusterSpec
from hpc_serve.plan.engine import EngineConfig, Workload
from hpc_serve.plan.memory import MemoryEstimate, estimate_memory
from hpc_serve.plan.model import ModelSpec

MAX_NODES = 64
"""Nodes beyond which the search for a layout stops."""


@dataclass(frozen=True, kw_only=True)
class ServePlan:
    """A layout that fits, and how to ask vLLM for it.

    `num_nodes` and `gpus_per_node` are those one replica uses; `vllm_args` are the flags after the model, without the
    served names, host, port and backend. `memory` is of the tightest rank.
    """

    model: str
    served_model_names: tuple[str, ...]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    num_nodes: int
    gpus_per_node: int
    replicas: int
    max_model_len: int
    vllm_args: tuple[str, ...]
    memory: MemoryEstimate
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks and where they are."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    num_nodes: int
    gpus_per_node: int

    @property
    def num_gpus(self) -> int:
        """Ranks in all."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''}"
        return f"TP={self.tensor_parallel_size} PP={self.pipeline_parallel_size} ({nodes} x {self.gpus_per_node})"


def plan(
    model: ModelSpec,
    cluster: ClusterSpec,
    engine: EngineConfig | None = None,
    workload: Workload | None = None,
    *,
    served_model_names: tuple[str, ...] = (),
) -> ServePlan:
    """The smallest layout that holds the model and the workload.

    Raises DoesNotFitError with the nearest candidates and what would make them fit.
    """
    engine = engine or EngineConfig()
    workload = workload or Workload()
    max_model_len = workload.max_model_len or model.max_model_len
    refused: list[str] = []
    for layout in _candidates(cluster, engine):
        try:
            memory = estimate_memory(
                model,
                cluster.accelerator,
                engine,
                tensor_parallel_size=layout.tensor_parallel_size,
                pipeline_parallel_size=layout.pipeline_parallel_size,
                max_model_len=max_model_len,
            )
        except DoesNotFitError as error:
            refused.append(f"{layout}: {error}")
            continue
        if memory.holds(workload.concurrency):
            return _plan(model, layout, memory, max_model_len, engine, served_model_names, tuple(refused))
        refused.append(f"{layout}: {_shortfall(memory, workload, max_model_len)}")
    raise DoesNotFitError(f"{model.name} does not fit. " + "; ".join(refused[-4:]))


def _shortfall(memory: MemoryEstimate, workload: Workload, max_model_len: int) -> str:
    if memory.kv_cache_bytes <= 0:
        return (
            f"needs {(memory.requested_bytes - memory.kv_cache_bytes) / GIB:.1f} GiB per GPU without any KV cache, "
            f"{memory.requested_bytes / GIB:.1f} usable"
        )
    wanted = workload.concurrency * max_model_len
    return f"holds {memory.kv_cache_tokens:,} tokens of KV cache, {wanted:,} wanted"


def _candidates(cluster: ClusterSpec, engine: EngineConfig) -> Iterator[Layout]:
    """Layouts from the smallest to the largest."""
    size = cluster.node_size
    tensor = engine.tensor_parallel_size
    pipeline = engine.pipeline_parallel_size
    if tensor and pipeline:
        nodes = cluster.num_nodes or -(-tensor * pipeline // size)
        yield Layout(
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            num_nodes=nodes,
            gpus_per_node=-(-tensor * pipeline // nodes),
        )
        return
    node_counts = [cluster.num_nodes] if cluster.num_nodes else list(range(1, MAX_NODES + 1))
    for nodes in node_counts:
        if nodes == 1:
            for width in [tensor] if tensor else [w for w in range(1, size + 1) if size % w == 0]:
                stages = pipeline or 1
                if width * stages <= size:
                    yield Layout(
                        tensor_parallel_size=width,
                        pipeline_parallel_size=stages,
                        num_nodes=1,
                        gpus_per_node=width * stages,
                    )
        else:
            width = tensor or (size if pipeline is None else nodes * size // pipeline)
            stages = pipeline or nodes * size // width
            yield Layout(
                tensor_parallel_size=width, pipeline_parallel_size=stages, num_nodes=nodes, gpus_per_node=size
            )


def _plan(
    model: ModelSpec,
    layout: Layout,
    memory: MemoryEstimate,
    max_model_len: int,
    engine: EngineConfig,
    served_model_names: tuple[str, ...],
    reasons: tuple[str, ...],
) -> ServePlan:
    args = [
        "--tensor-parallel-size",
        str(layout.tensor_parallel_size),
        "--pipeline-parallel-size",
        str(layout.pipeline_parallel_size),
        "--max-model-len",
        str(max_model_len),
    ]
    for name in (
        "gpu_memory_utilization",
        "max_num_seqs",
        "max_num_batched_tokens",
        "quantization",
        "kv_cache_memory_bytes",
        "block_size",
    ):
        value = getattr(engine, name)
        if value is not None:
            args += [f"--{name.replace('_', '-')}", str(value)]
    for name in ("dtype", "kv_cache_dtype"):
        if getattr(engine, name) != "auto":
            args += [f"--{name.replace('_', '-')}", getattr(engine, name)]
    for name in ("enforce_eager", "enable_expert_parallel"):
        if getattr(engine, name):
            args.append(f"--{name.replace('_', '-')}")
    return ServePlan(
        model=model.name,
        served_model_names=served_model_names or (model.name,),
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
        num_nodes=layout.num_nodes,
        gpus_per_node=layout.gpus_per_node,
        replicas=1,
        max_model_len=max_model_len,
        vllm_args=tuple(args),
        memory=memory,
        reasons=reasons,
    )
