"""A run's needs of its nodes, taken from its command and its launcher. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_serve.vllm.command import Device

_DEFAULT_UTILIZATION = 0.92  # of the pinned version


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The engine's needs of each of `num_nodes` nodes.

    `memory_bytes` is the job's memory on a node by the scheduler, None if the scheduler does not say. `offload_bytes`
    is the part of the weights that each rank keeps in the node's memory. `staged_bytes` of the model are copied to each
    node before the start. `sets_cache_bytes`: the engine was told its cache's size. `has_own_tokenizer`: the engine was
    told of another tokenizer than the model's, or to use none. `has_own_gloo_interface`: somebody chose the interface
    of torch's processes.
    """

    num_nodes: int
    gpus_per_node: int
    world_size: int
    backend: str
    device: Device = "GPU"
    memory_bytes: int | None = None
    dtype: str = "auto"
    gpu_memory_utilization: float = _DEFAULT_UTILIZATION
    sets_cache_bytes: bool = False
    offload_bytes: int = 0
    load_format: str = "auto"
    has_own_tokenizer: bool = False
    staged_bytes: int = 0
    has_own_gloo_interface: bool = False
    ignores_ray_versions: bool = False

    @property
    def gpus(self) -> int:
        """GPUs of each node that the engine needs; 0 for engines on other devices."""
        return self.gpus_per_node if self.device == "GPU" else 0

    @property
    def ranks_per_node(self) -> int:
        return max(1, -(-self.world_size // self.num_nodes))
