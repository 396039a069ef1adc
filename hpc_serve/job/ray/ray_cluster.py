"""Ray for one run: the commands and the environment of its head and workers, and Ray's start on a node in two steps.

Each Ray runs as a `--block` child of the launcher, in a private folder and with a token. Its ports, CPUs, GPUs and
memory are all given explicitly. It is ended as a process: `ray stop` would end every Ray of the user on the node.

The child imports Ray at once (`ray_start`) and is told the rest later. The imports run while launchers find each other
and check their nodes, so they do not lengthen the start. `HeadRay` also knows the nodes that the head reports. The
launcher's role (`head`, `worker`) decides when each step is due, and what its failure means.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpc_serve.job.machine.allocation import print_line
from hpc_serve.job.machine.network import hold_port
from hpc_serve.job.machine.node_memory import shared_memory_bytes
from hpc_serve.job.machine.process import Child
from hpc_serve.job.ray.ray_nodes import RayNodes, missing_nodes, parse_line
from hpc_serve.job.run.node import Node
from hpc_serve.job.run.parts import Parts, StopOrder
from hpc_serve.job.run.record_keeper import RecordKeeper
from hpc_serve.units import GIB, MIB
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
    from hpc_serve.trust.certificates import PeerFiles

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


class HeldRay:
    """A part of the run that is called `name`. It ends the run by its end from `release` on."""

    def __init__(self, name: str, parts: Parts, *, grace_s: float, on_line: Callable[[str], None] = print_line) -> None:
        self._name, self._parts, self._grace_s, self._on_line = name, parts, grace_s, on_line
        self._child: asyncio.Future[Child] = asyncio.get_running_loop().create_future()

    async def hold(self, node: Node) -> None:
        """Start the child, which imports and waits, and make the certificate that Ray shows.

        Raises what `make_peer_files` raises.
        """
        from hpc_serve.trust.certificates import make_peer_files

        child = await self._parts.start_child(
            self._name,
            [sys.executable, "-u", "-m", "hpc_serve.job.ray.ray_start"],
            ray_environ(node),
            on_line=self._on_line,
            told=True,
        )
        self._parts.add_child(StopOrder.RAY, child, grace_s=self._grace_s)
        run_dir = Path(node.environ["HPC_SERVE_JOB_DIR"])
        await asyncio.to_thread(make_peer_files, run_dir, node.node_dir / "tls", addresses=(node.internal_address,))
        self._child.set_result(child)

    async def release(self, argv: Sequence[str], environ: Mapping[str, str], *, watch: Sequence[str] = ()) -> None:
        """Have it become `argv` with exactly `environ`, once it is held. `watch` are words for `ray_nodes`.

        Raises PartFailedError if there is no such command.
        """
        child = await self._child
        self._parts.require_command(self._name, argv[0], environ)
        order = {"argv": list(argv), "environ": dict(environ), "watch": list(watch)}
        child.tell(json.dumps(order), is_last=not watch)
        self._parts.end_with(child)


_NAME = "ray head"
_GRACE_S = 4.0


class HeadRay(HeldRay):
    """Ray of one run."""

    def __init__(self, node: Node, parts: Parts, keeper: RecordKeeper) -> None:
        super().__init__(_NAME, parts, grace_s=_GRACE_S, on_line=self.read_line)
        self._node, self._keeper = node, keeper
        self.environ: dict[str, str] = {}
        """What Ray's processes on this node have, and an engine over it, but for RAY_ADDRESS; since `start_head`."""
        self._gcs_port: int | None = None
        self._nodes: RayNodes = {}

    async def start_head(self, node: Node) -> None:
        """Start Ray's head, if there is a command `ray`; `node` is this node as all nodes have agreed on."""
        self._node = node
        self.environ = ray_environ(node)
        if shutil.which("ray", path=self.environ.get("PATH")) is None:  # the preflight says so, with the cure
            return
        self._client_port = hold_port()
        argv = head_argv(node, client_port=self._client_port.getsockname()[1])
        watch = (node.ray_dir, node.internal_address, node.options.device)
        await self.release(argv, self.environ, watch=watch)

    async def engine_environ(self) -> dict[str, str]:
        """The environment of an engine over this Ray, once its head is a node of it; RAY_ADDRESS says where it is.

        Another node that joins before that finds no head, and Ray has it look again only after two seconds.
        Raises PartFailedError.
        """
        node = self._node
        self._parts.require_command(_NAME, "ray", self.environ)
        self._keeper.set_phrase("starting Ray's head")

        def missing() -> str | None:
            if self._gcs_port is None:
                return "Ray's GCS does not listen"
            if node.internal_address not in self._nodes:
                return f"{node.allocation.node_name} ({node.internal_address}) has not joined the Ray that it started"
            return None

        await self._parts.wait_until_complete(missing, part=_NAME, within_s=node.options.join_s)
        return {**self.environ, "RAY_ADDRESS": f"{node.internal_address}:{self._gcs_port}"}

    async def wait_for_nodes(self, others: Mapping[str, str]) -> None:
        """Return once Ray has exactly this node and the `others` (names, by address), each with its devices."""
        node = self._node
        expected = {node.internal_address: node.allocation.node_name, **others}

        def missing() -> str | None:
            sentences = missing_nodes(self._nodes, expected, node.options.device, node.options.gpus_per_node)
            joined = set(expected) & set(self._nodes)
            self._keeper.set_phrase("waiting for Ray nodes", len(joined), len(expected))
            return "; ".join(sentences) or None

        await self._parts.wait_until_complete(missing, part="ray nodes", within_s=node.options.join_s)
        self._child.result().tell()  # Ray's nodes are looked at no more

    def read_line(self, line: str) -> None:
        """Take a line of Ray's head: the port of its GCS, its nodes, or a line of its log."""
        if (told := parse_line(line)) is None:
            print_line(line)
        else:
            self._gcs_port, self._nodes = told
            self._parts.note_change()
