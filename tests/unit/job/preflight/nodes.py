"""Facts of healthy nodes, for tests to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_serve.job.preflight.facts import (
    CudaDevice,
    CudaFacts,
    FolderFacts,
    GpuFacts,
    GpusFacts,
    LimitFacts,
    MemoryFacts,
    Needs,
    NetworkFacts,
    NodeFacts,
    SoftwareFacts,
    WeightsFacts,
)
from hpc_serve.units import GIB

NEEDS = Needs(num_nodes=2, gpus=8, world_size=16, backend="ray", memory_bytes=512 * GIB)
DEVICE = CudaDevice(name="NVIDIA H100 80GB HBM3", capability="9.0", free_bytes=78 * GIB, total_bytes=79 * GIB)
CUDA = CudaFacts(cuda_version=12080, devices=(DEVICE,) * 8)
GPU = GpuFacts(name=DEVICE.name, total_bytes=80 * GIB)
GPUS = GpusFacts(tool="nvidia-smi", driver="570.86.15", gpus=(GPU,) * 8, cuda=CUDA)
MEMORY = MemoryFacts(
    total_bytes=1024 * GIB,
    limit_bytes=512 * GIB,
    used_of_limit_bytes=GIB,
    shm_bytes=512 * GIB,
    shm_free_bytes=512 * GIB,
    shm_is_writable=True,
)
FOLDER = FolderFacts(purpose="temporary files", path="/tmp/hs-1", is_writable=True, free_bytes=100 * GIB)
UNLIMITED = LimitFacts(soft=-1, hard=-1)
LIMITS = {
    "tasks": UNLIMITED,
    "memlock": UNLIMITED,
    "nofile": LimitFacts(soft=1024, hard=1048576),
    "nproc": UNLIMITED,
    "as": UNLIMITED,
}
WEIGHTS = WeightsFacts(source="/models/m", folder="/models/m", num_files=4, total_bytes=15 * GIB)
VERSIONS = {"python": "3.12.3", "hpc-serve": "0.1.0", "vllm": "0.32.0", "ray": "2.60.0", "torch": "2.13.0"}
SOFTWARE = SoftwareFacts(versions=VERSIONS, torch_cuda="12.8", socket_folder="/tmp/hs-1")
NETWORK = NetworkFacts(
    interface="ib0", speed_mbits=400_000, mtu=2044, resolved=("10.0.0.1",), resolving_s=0.01, active_ib_ports=4
)
FACTS = NodeFacts(
    name="n1",
    address="10.0.0.1",
    gpus=GPUS,
    memory=MEMORY,
    folders=(FOLDER,),
    limits=LIMITS,
    weights=WEIGHTS,
    software=SOFTWARE,
    network=NETWORK,
    took_s={"gpus": 0.5},
)


def changed(value: Any, changes: Mapping[str, Any]) -> Any:
    """Return facts with other values at these paths, as `{"gpus.cuda.error": "…"}`."""
    for path, new in changes.items():
        name, _, rest = path.partition(".")
        if isinstance(value, Mapping):
            value = {**value, name: new}
        else:
            value = replace(value, **{name: changed(getattr(value, name), {rest: new}) if rest else new})
    return value


def changed_run(facts: NodeFacts, changes: Mapping[str, Any]) -> tuple[NodeFacts, Needs]:
    """Return a node and the needs of its run, with other values at these paths. Those of the needs begin with needs."""
    of_run = {path.removeprefix("needs."): new for path, new in changes.items() if path.startswith("needs.")}
    of_node = {path: new for path, new in changes.items() if not path.startswith("needs")}
    return changed(facts, of_node), changed(changes.get("needs", NEEDS), of_run)


def report(name: str = "n1", **changes: Any) -> NodeFacts:
    """A healthy node of a run; `changes` are of its facts."""
    number = int(name[1:])
    address = f"10.0.0.{number}"
    network = replace(NETWORK, resolved=(address,))
    return replace(FACTS, **{"name": name, "address": address, "network": network, "unreached": {}, **changes})
