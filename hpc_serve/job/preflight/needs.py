"""What a run needs of its nodes, as its command and its launcher say it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_serve.vllm.command import Device

_DEFAULT_UTILIZATION = 0.92  # of the pinned version


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the engine takes of each of `num_nodes` nodes.

    `memory_bytes` is what the scheduler says that the job has of a node, None if it does not say. `offload_bytes` is
    what each rank keeps of the weights in the node's memory. `staged_bytes` of the model are copied to each node
    before. `sets_cache_bytes`: the engine was told its cache's size.
    `has_own_tokenizer`: the engine was told of another tokenizer than the model's, or to use none.
    `has_own_gloo_interface`: somebody chose the interface of torch's processes.
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
