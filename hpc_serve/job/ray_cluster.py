"""Ray for one run: the command lines of its head and workers, and the wait for exactly the nodes and devices asked for.

Each Ray runs as a `--block` child of the Slurm step, with every port, its CPUs, GPUs and memory said aloud, in a
private folder and with a token. It is ended as a process, never by `ray stop`: that takes down all Rays of the user.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_serve.job.allocation import Allocation
from hpc_serve.job.network import PortBlock
from hpc_serve.vllm.arguments import Device

_GIB = 1024**3
# vLLM passes small messages through the object store; tensors go by NCCL or shared memory.
_OBJECT_STORE_BYTES = 1 * _GIB
_SMALLEST_OBJECT_STORE_BYTES = 80 * 1024**2  # Ray refuses less than 75 MiB


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """What one `ray start` is told."""

    address: str
    ports: PortBlock
    temp_dir: str
    num_cpus: int
    device: Device
    num_devices: int
    memory_bytes: int
    object_store_bytes: int


def ray_node(
    allocation: Allocation, *, address: str, ports: PortBlock, temp_dir: str, device: Device, num_devices: int
) -> RayNode:
    """The share of this node that Ray may use: what the job has, not what the machine has."""
    memory = allocation.memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    store = max(_SMALLEST_OBJECT_STORE_BYTES, min(_OBJECT_STORE_BYTES, memory // 8, _shared_memory_bytes() // 2))
    return RayNode(
        address=address,
        ports=ports,
        temp_dir=temp_dir,
        num_cpus=allocation.num_cpus,
        device=device,
        num_devices=num_devices,
        memory_bytes=max(_GIB, memory - store),
        object_store_bytes=store,
    )


def head_argv(node: RayNode) -> list[str]:
    return [
        *_start_argv(node),
        "--head",
        f"--port={node.ports.gcs}",
        f"--ray-client-server-port={node.ports.ray_client_server}",
        "--include-dashboard=false",
    ]


def worker_argv(node: RayNode, *, head: str) -> list[str]:
    """`head` is "address:port" of the head's GCS."""
    return [*_start_argv(node), f"--address={head}"]


def _start_argv(node: RayNode) -> list[str]:
    first, last = node.ports.workers
    return [
        "ray",
        "start",
        "--block",
        "--disable-usage-stats",
        f"--node-ip-address={node.address}",
        f"--temp-dir={node.temp_dir}",
        f"--num-cpus={node.num_cpus}",
        *_devices(node),
        f"--memory={node.memory_bytes}",
        f"--object-store-memory={node.object_store_bytes}",
        f"--node-manager-port={node.ports.node_manager}",
        f"--object-manager-port={node.ports.object_manager}",
        f"--dashboard-agent-listen-port={node.ports.dashboard_agent_listen}",
        f"--dashboard-agent-grpc-port={node.ports.dashboard_agent_grpc}",
        f"--runtime-env-agent-port={node.ports.runtime_env_agent}",
        f"--metrics-export-port={node.ports.metrics_export}",
        f"--min-worker-port={first}",
        f"--max-worker-port={last}",
    ]


def _devices(node: RayNode) -> list[str]:
    """Ray has a word of its own for GPUs alone; chips of TPUs are a resource like any other."""
    if node.device == "GPU":
        return [f"--num-gpus={node.num_devices}"]
    return ["--num-gpus=0", f"--resources={json.dumps({node.device: node.num_devices})}"]


def ray_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What every Ray process of a run needs beside `environ`, which has the token's place."""
    return {
        **_as_ray_names_devices(environ),
        "RAY_AUTH_MODE": "token",  # `ray start --address` does not turn it on by itself
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",  # its default, 30 s, is Slurm's KillWait
        "RAY_memory_monitor_refresh_ms": "0",  # it would end our workers for what other users of the node take
        "RAY_worker_niceness": "0",  # its default, 15, lets every other user of the node go first
        "RAY_prestart_worker_first_driver": "0",  # else one idle Python per CPU of the job, with the first driver
    }


def _as_ray_names_devices(environ: Mapping[str, str]) -> dict[str, str]:
    """AMD GPUs by HIP's variable: Slurm sets ROCm's, and Ray refuses that one ("Please use HIP_VISIBLE_DEVICES …").

    Both number the GPUs that the node has, unless both are set: then HIP's number those that ROCm's leave, and stay.
    """
    found = dict(environ)
    if "HIP_VISIBLE_DEVICES" not in found and (visible := found.pop("ROCR_VISIBLE_DEVICES", None)) is not None:
        found["HIP_VISIBLE_DEVICES"] = visible
    return found


@dataclass(frozen=True)
class RayNodes:
    """Ray's own view: devices of the kind that was asked for, by the address of each node that is alive."""

    devices: Mapping[str, int]

    def missing(self, expected: Mapping[str, str], device: Device, per_node: int) -> list[str]:
        """A sentence for each node that is not there as asked; `expected` maps addresses to node names."""
        sentences = []
        for address, name in expected.items():
            if address not in self.devices:
                sentences.append(f"{name} ({address}) has not joined")
            elif self.devices[address] != per_node:
                sentences.append(f"{name} ({address}) has {self.devices[address]} {device}s instead of {per_node}")
        strangers = sorted(set(self.devices) - set(expected))
        return [*sentences, *(f"{address} joined but is not of this job" for address in strangers)]


def watch_nodes_argv(device: Device) -> Sequence[str]:
    """The child that asks Ray for its nodes; it needs RAY_ADDRESS and prints a JSON object whenever they change."""
    return [sys.executable, "-u", "-m", "hpc_serve.job.ray_nodes", device]


def parse_nodes(line: str) -> RayNodes | None:
    """One line of the child, or None if it is a log line of Ray's."""
    try:
        found = json.loads(line)
        return RayNodes({str(address): int(count) for address, count in found["hpc_serve_nodes"].items()})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _shared_memory_bytes() -> int:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return 2 * _SMALLEST_OBJECT_STORE_BYTES
    return status.f_bavail * status.f_frsize
