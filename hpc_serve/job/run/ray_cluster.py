"""Ray for one run: the command lines of its head and workers, and their environment.

Each Ray runs as a `--block` child of the launcher, in a private folder and with a token. Its ports, CPUs, GPUs and
memory are all given explicitly. It is ended as a process: `ray stop` would end every Ray of the user on the options.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from hpc_serve.job.machine.node_memory import shared_memory_bytes
from hpc_serve.job.run.node import Node
from hpc_serve.sizes import GIB, MIB
from hpc_serve.vllm.command import Device

# vLLM passes small messages through the object store; tensors go by NCCL or shared memory.
_OBJECT_STORE_BYTES = GIB
_SMALLEST_OBJECT_STORE_BYTES = 80 * MIB  # Ray refuses less than 75 MiB
# Each binds port 0 and tells the others what it got: nothing to clash with. Some have fixed ports by default.
_PORTS_FROM_THE_KERNEL = (
    *("node-manager", "object-manager", "min-worker", "max-worker"),
    *("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export"),
)


def _start_argv(node: Node) -> tuple[str, ...]:
    """Return the command of every Ray of a run. Ray gets the job's CPUs, memory and devices, not the machine's."""
    allocation, options = node.allocation, node.options
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = allocation.memory_bytes or machine // allocation.share.count
    store = max(_SMALLEST_OBJECT_STORE_BYTES, min(_OBJECT_STORE_BYTES, memory // 8, shared_memory_bytes()[1] // 2))
    return (
        *("ray", "start", "--block", "--disable-usage-stats"),
        f"--node-ip-address={node.internal_address}",
        f"--temp-dir={node.ray_dir}",
        f"--num-cpus={allocation.num_cpus}",
        *_device_args(options.device, options.gpus_per_node),
        f"--memory={max(GIB, memory - store)}",
        f"--object-store-memory={store}",
        *(f"--{name}-port=0" for name in _PORTS_FROM_THE_KERNEL),
    )


def head_argv(node: Node, *, client_port: int) -> list[str]:
    """Return the command of the head. `client_port` is Ray Client's.

    No option turns Ray Client's server off, or leaves the port to the kernel.
    """
    return [
        *_start_argv(node),
        "--head",
        "--port=0",
        f"--ray-client-server-port={client_port}",
        "--include-dashboard=false",
        "--no-monitor",  # the autoscaler: nothing to scale, and its metrics answer anybody on a fixed port
    ]


def worker_argv(node: Node, *, head: str) -> list[str]:
    """Return the command of another node. `head` is "address:port" of the head's GCS."""
    return [*_start_argv(node), f"--address={head}"]


def _device_args(device: Device, num_devices: int) -> list[str]:
    """Ray has an option for GPUs alone; TPU chips are a custom resource."""
    if device == "GPU":
        return [f"--num-gpus={num_devices}"]
    return ["--num-gpus=0", f"--resources={json.dumps({device: num_devices})}"]


def ray_environ(node: Node) -> dict[str, str]:
    """Return the environment of Ray on a node, and of an engine over it.

    It names the token's file, and what `HeldRay.hold` makes.
    """
    from hpc_serve.trust.peers import PeerFiles

    peer = PeerFiles.in_folder(node.node_dir / "tls")
    return {
        **_with_hip_devices(node.child_environ()),
        "RAY_AUTH_MODE": "token",  # `ray start --address` does not turn it on by itself
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",  # its default, 30 s, is Slurm's KillWait
        "RAY_memory_monitor_refresh_ms": "0",  # it would end our workers for memory that other users of the node use
        "RAY_worker_niceness": "0",  # its default, 15, gives every other process on the node precedence
        "RAY_prestart_worker_first_driver": "0",  # else the first driver starts one idle Python per CPU
        # Metrics answer anybody who connects. -1: they have no switch of their own, and cannot start on that port.
        "RAY_enable_metrics_collection": "0",
        "DASHBOARD_METRIC_PORT": "-1",
        # Every connection of Ray's shows a certificate of this run. The token alone does not do: gcs_server and raylets
        # of Ray 2.60 end when anybody calls RaySyncer.StartSync without the metadata that they expect.
        "RAY_USE_TLS": "1",
        "RAY_TLS_CA_CERT": str(peer.authority),
        "RAY_TLS_SERVER_CERT": str(peer.certificate),
        "RAY_TLS_SERVER_KEY": str(peer.key),
    }


def _with_hip_devices(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with AMD GPUs named by HIP_VISIBLE_DEVICES.

    Slurm sets ROCR_VISIBLE_DEVICES, which Ray refuses ("Please use HIP_VISIBLE_DEVICES …"). Either variable alone
    counts the GPUs of the node, so the value can move. If both are set, HIP's numbers count within ROCm's selection;
    then both stay as they are.
    """
    found = dict(environ)
    if "HIP_VISIBLE_DEVICES" not in found and (visible := found.pop("ROCR_VISIBLE_DEVICES", None)) is not None:
        found["HIP_VISIBLE_DEVICES"] = visible
    return found
