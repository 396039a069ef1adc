"""One node of a run: the launcher's options, and the environment and arguments of its children that follow from them.

`Restarts` decides how often an engine that was ready is started again in place, and after how long. The launcher's role
(`head`, `worker`) decides what is started, and when.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpc_serve.errors import DoesNotFitError, InvalidRequestError, StoreError
from hpc_serve.job.cache.engine_cache import EngineCache, private_cache
from hpc_serve.job.machine.allocation import Allocation
from hpc_serve.job.machine.network import LOOPBACK, choose_port, interface_of, node_address
from hpc_serve.job.machine.process import mark_environ
from hpc_serve.job.run.parts import KILL_WAIT_S
from hpc_serve.rendezvous.files import check_folder, read_private
from hpc_serve.units import number_of, read_seconds
from hpc_serve.vllm.command import Device, ServeCommand, rank_args, ray_data_parallel_environ

if TYPE_CHECKING:
    from hpc_serve.job.weights.staging import Staging

_WAITS_S = (1.0, 5.0, 25.0)
# An engine that was ready for so long has recovered from what ended it before.
_RECOVERED_AFTER_S = 600.0


class Restarts:
    """The starts in place of one engine: `most` of them without 10 minutes of readiness in between.

    The first start of a run is none: an engine that was never ready ends its run, so that its cause is seen at once.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self._used = 0
        self._was_ready = False

    @property
    def words(self) -> str:
        """Return a phrase for people about the latest restart."""
        return f"starting the engine again ({self._used} of {self.most})"

    def after_end(self, ready_s: float | None) -> float | None:
        """Return the seconds to the next restart after an end; None if the run is to end. `ready_s`: seconds the
        engine was ready, if ever."""
        self._was_ready = self._was_ready or ready_s is not None
        if ready_s is not None and ready_s >= _RECOVERED_AFTER_S:
            self._used = 0
        if not self._was_ready or self._used >= self.most:
            return None
        self._used += 1
        self.total += 1
        return _WAITS_S[min(self._used, len(_WAITS_S)) - 1]


PreflightMode = Literal["on", "warn", "off", "only"]
"""warn: what the preflight finds is said and ends nothing. only: the run ends with the preflight."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The options that the script gives each launcher. `with_variables` changes them by variables of the environment.

    `gpus_per_node` counts the devices of a node of the kind `device`; with 0 the engine runs on CPUs. `stall_s` is how
    long the engine's start may show no progress, `join_s` how long the head waits for something that is missing.
    Another node counts as lost when it has sent nothing for `silence_s` seconds.
    `kill_wait_s` is Slurm's KillWait, between SIGTERM and SIGKILL. `canary_s` is how long a step of an engine that was
    ready may take in any case; 0: without a limit. An engine that is unresponsive for `hang_s` seconds is ended. It is
    started again in place `engine_restarts` times.
    """

    service: str
    backend: str
    gpus_per_node: int
    device: Device = "GPU"
    stall_s: float = 1_800.0
    join_s: float = 300.0
    silence_s: float = 60.0
    kill_wait_s: float = KILL_WAIT_S
    canary_s: float = 5.0
    hang_s: float = 60.0
    engine_restarts: int = 3
    preflight: PreflightMode = "on"


_CANARY_ON_CPUS_S = 30.0  # a step that reads a long prompt takes many seconds there


def with_variables(options: LaunchOptions, environ: Mapping[str, str]) -> LaunchOptions:
    """Return the options with the variables that a person has set. Raises InvalidRequestError."""
    canary_s = options.canary_s if options.gpus_per_node else _CANARY_ON_CPUS_S
    lost = "a node that sends nothing for so many seconds counts as lost; "
    silence_s = read_seconds(environ, "HPC_SERVE_SILENCE_S", options.silence_s, least=5, most=3_600, meaning=lost)
    return replace(
        options,
        stall_s=read_seconds(environ, "HPC_SERVE_STALL_S", options.stall_s),
        join_s=read_seconds(environ, "HPC_SERVE_JOIN_S", options.join_s),
        silence_s=silence_s,
        kill_wait_s=read_seconds(environ, "HPC_SERVE_KILL_WAIT_S", options.kill_wait_s),
        canary_s=read_seconds(environ, "HPC_SERVE_CANARY_S", canary_s),
        hang_s=read_seconds(environ, "HPC_SERVE_HANG_S", options.hang_s),
        preflight=_preflight(options.preflight, environ.get("HPC_SERVE_PREFLIGHT", "")),
    )


def _preflight(given: PreflightMode, text: str) -> PreflightMode:
    """Return the mode that a variable sets; "" sets none. The mode `only` stays."""
    modes: dict[str, PreflightMode] = {"": given, "on": "on", "warn": "warn", "off": "off"}
    if text not in modes:
        raise InvalidRequestError(f"HPC_SERVE_PREFLIGHT={text}: it must be on, warn (no finding ends a start) or off.")
    return given if given == "only" else modes[text]


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node's share of a run.

    `head` is the address of the head node, `token` the run's secret. `run_mark` is in the environment of every process
    of this run on this node. `staging` is the copy of the model that is loaded, if any, `loading` says how the
    weights are read, and why.
    """

    options: LaunchOptions
    allocation: Allocation
    command: ServeCommand
    backend: str
    head: str
    node_dir: Path
    cache: EngineCache
    run_mark: str
    token: str
    environ: Mapping[str, str]
    staging: Staging | None = None
    loading: str = ""

    @cached_property
    def address(self) -> str:
        """Return the address where other nodes reach this one."""
        interface = self.environ.get("HPC_SERVE_INTERFACE")
        return self.head if self.allocation.is_head else node_address(interface=interface, towards=self.head)

    @cached_property
    def internal_address(self) -> str:
        """Return the address where Ray and the engine's processes reach this node.

        On one node without Ray it is the loopback address. The ports of these processes ask for no key, so they must
        not be open to the network. Ray replaces a loopback address that it is given by another of the node's.
        """
        if self.allocation.num_nodes > 1:
            return self.address
        if self.backend == "ray":
            return self.head if self.head != LOOPBACK else node_address(interface=None, towards=None)
        return LOOPBACK

    @property
    def ray_dir(self) -> str:
        """Ray's folder. Ray opens it to everybody (0777), so it is inside the private one."""
        return ray_dir(str(self.node_dir))

    def check_gpus(self) -> None:
        """Raises DoesNotFitError if Slurm gave this node fewer GPUs than the script says."""
        given = self.allocation.num_gpus
        if self.options.device == "GPU" and given is not None and given < self.options.gpus_per_node:
            replicas = self.allocation.share.count
            whose = "of this job" if replicas == 1 else f"for each of the {replicas} replicas of this job"
            raise DoesNotFitError(
                f"{self.allocation.node_name} has {number_of(given, 'GPU')} {whose}, the launcher was "
                f"told {self.options.gpus_per_node}: make --gpus-per-node in the #SBATCH lines and here agree."
            )

    def rank_args(self) -> list[str]:
        """Return the arguments that tell vLLM on this node where its ranks are."""
        return rank_args(
            self.command,
            device=self.options.device,
            backend=self.backend,
            num_nodes=self.allocation.num_nodes,
            node_rank=self.allocation.node_rank,
            master_address=self.head,
            settings_file=str(self.settings_file),
        )

    @property
    def settings_file(self) -> Path:
        """Return the path of a file that tells this node's engine the ports where its processes meet, and nobody
        else."""
        return self.node_dir / "engine.yaml"  # vLLM asks for this ending

    def child_environ(self) -> dict[str, str]:
        """Return the engine's environment. A person's variables win over defaults."""
        ours = {
            **mark_environ(self.run_mark),
            "TMPDIR": str(self.node_dir),
            "VLLM_HOST_IP": self.internal_address,  # this node's own; vLLM refuses nodes that share one ("unique IP")
            "VLLM_PORT": str(choose_port()),  # the first that vLLM tries for itself; it counts upwards
            "PYTHONUNBUFFERED": "1",
            "VLLM_USE_RUST_FRONTEND": "0",  # it serves without middleware, so nobody would ask for the key
        }
        defaults = {
            # Our deadline extends with progress. vLLM's own, 600 s, is too short for 405B.
            "VLLM_ENGINE_READY_TIMEOUT_S": "86400",
            "PYTHONFAULTHANDLER": "1",  # a crash in compiled code says so; only SIGKILL leaves no word
            **self.cache.environ(),
        }
        if not self.options.gpus_per_node:
            # vLLM 0.32 saves code for CPUs that it cannot load ("no attribute 'finalize_loading'"), and compiles it
            # anew at each start. Without these files torch's own cache of graphs is used.
            defaults["VLLM_USE_AOT_COMPILE"] = "0"
        if interface := interface_of(self.internal_address):
            names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
            if self.internal_address == LOOPBACK:
                ours |= {**names, "VLLM_LOOPBACK_IP": LOOPBACK}
            else:
                defaults |= names
        if self.backend == "ray":
            defaults |= ray_data_parallel_environ(self.command, self.allocation.num_nodes)
        if self.options.device == "TPU" and self.backend == "ray":
            # vLLM's TPU plugin needs these to span hosts (tpu_inference/envs.py and its multi-host scripts).
            defaults |= {"TPU_MULTIHOST_BACKEND": "ray", "JAX_PLATFORMS": ""}
        given = {name: value for name, value in self.environ.items() if name != "RAY_ADDRESS"}  # of another Ray
        return {**defaults, **given, **ours}

    def without_kept_cache(self, reason: str) -> Node:
        """Return the node with caches of the engine that go with the run."""
        return replace(self, cache=private_cache(self.node_dir, reason))


def ray_dir(node_dir: str) -> str:
    """Ray's folder inside the node's private folder."""
    return f"{node_dir}/ray"


def read_token(environ: Mapping[str, str]) -> str:
    """Read the run's secret from the 0600 file that `prepare` made. Raises StoreError, or RecordError if others know
    it."""
    path = Path(environ["RAY_AUTH_TOKEN_PATH"])
    check_folder(path.parent)
    try:
        return read_private(path, secret=True).strip()
    except FileNotFoundError:
        raise StoreError(f"{path} is not there: this node does not see the run's folder in HPC_SERVE_HOME.") from None
