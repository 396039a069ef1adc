"""The values of the preflight: the needs of a run, the facts of each node before the engine starts, and the findings.

Facts travel to the head as JSON. A group of facts is None if it could not be gathered; `NodeFacts.problems` says why.
`checks` and `judge` decide what facts mean. They return a `CheckResult`: a level, a sentence with the number that
decided it, and what to do. Results that need somebody to act are findings: their levels, sentences and cures are data,
in `findings.ini`. Pure.
"""

from __future__ import annotations

import configparser
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from hpc_serve.rendezvous.fields import SignedInt
from hpc_serve.rendezvous.store import LEVELS, Level
from hpc_serve.units import GIB, MIB

_UNITS = {"gib": (GIB, 1), "gib0": (GIB, 0), "mib": (MIB, 1), "mib0": (MIB, 0)}  # the unit, and digits after the point


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of a check on one node. `text` is a sentence without its full stop, `cure` one or more with."""

    level: Level
    text: str
    cure: str = ""


class _Sentence(string.Formatter):
    """Formats as `str.format`, and prints bytes in a unit."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec not in _UNITS:
            return cast(str, super().format_field(value, format_spec))
        unit, digits = _UNITS[format_spec]
        return f"{value / unit:.{digits}f}"


@lru_cache(maxsize=1)
def findings() -> configparser.RawConfigParser:
    """Return the findings, by name; each has `level`, `seen` and `cure`."""
    file = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=(";",), empty_lines_in_values=False)
    file.read_string(Path(__file__).with_name("findings.ini").read_text(encoding="utf-8"))
    return file


def found(finding: str, /, *, level: Level | None = None, **values: Any) -> CheckResult:
    """Return this finding with these values in its sentences, at its own level or at `level`."""
    data = findings()[finding]
    text, cure = (_Sentence().vformat(" ".join(data[key].split()), (), values) for key in ("seen", "cure"))
    return CheckResult(level=level or cast(Level, data["level"]), text=text, cure=cure)


def ok(text: str) -> CheckResult:
    return CheckResult(level="ok", text=text)


def not_checked(text: str) -> CheckResult:
    return CheckResult(level="not checked", text=text)


def worst(results: Iterable[CheckResult]) -> CheckResult:
    """Return the first entry with the worst level."""
    return max(results, key=lambda one: LEVELS.index(one.level))


# -- needs and facts


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The engine's needs of each of `num_nodes` nodes. `gpus` are 0 for engines on other devices.

    `memory_bytes` is the job's memory on a node by the scheduler, None if the scheduler does not say. `offload_bytes`
    is the part of the weights that each rank keeps in the node's memory. `staged_bytes` of the model are copied to each
    node before the start. `sets_cache_bytes`: the engine was told its cache's size. `has_own_tokenizer`: the engine was
    told of another tokenizer than the model's, or to use none. `has_own_gloo_interface`: somebody chose the interface
    of torch's processes. `engine_words` are the engine's options.
    """

    num_nodes: int
    gpus: int
    world_size: int
    backend: str
    memory_bytes: int | None = None
    dtype: str = "auto"
    gpu_memory_utilization: float = 0.92  # the default of the pinned version
    sets_cache_bytes: bool = False
    offload_bytes: int = 0
    load_format: str = "auto"
    has_own_tokenizer: bool = False
    staged_bytes: int = 0
    has_own_gloo_interface: bool = False
    ignores_ray_versions: bool = False
    engine_words: tuple[str, ...] = ()

    def asked_bytes(self, device: CudaDevice) -> float:
        """Return how much of a GPU must be free at the engine's start."""
        return device.total_bytes * self.gpu_memory_utilization

    def is_full(self, device: CudaDevice) -> bool:
        """Return whether a GPU has less free than the engine asks for."""
        return device.free_bytes < self.asked_bytes(device)

    @property
    def ranks_per_node(self) -> int:
        return max(1, -(-self.world_size // self.num_nodes))


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """One GPU as its driver's tool lists it."""

    name: str
    total_bytes: int
    uncorrected_errors: int = 0


@dataclass(frozen=True, kw_only=True)
class CudaDevice:
    """One GPU as a process of this job sees it. `error` is that of its first allocation, "" if it works.

    `free_bytes` is what is left of it beside that process.
    """

    name: str
    capability: str
    free_bytes: int
    total_bytes: int
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class CudaFacts:
    """The answers of CUDA's driver library to a process of this job. `cuda_version` is 12080 for 12.8, 0 if unknown."""

    error: str = ""
    cuda_version: int = 0
    devices: tuple[CudaDevice, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpusFacts:
    """The GPUs of a node that this job sees. `tool` is the program that listed them, nvidia-smi, "" without it.

    `error` is what the tool said in place of a list. `gpus` are those of this job, None where that cannot
    be told (MIG). `cuda` is None where no process tried CUDA.
    """

    tool: str
    error: str = ""
    driver: str = ""
    visible: str | None = None
    gpus: tuple[GpuFacts, ...] | None = None
    cuda: CudaFacts | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """Memory of a node. The limit is that of the job's cgroup, None without one."""

    total_bytes: int
    limit_bytes: int | None
    used_of_limit_bytes: int | None
    shm_bytes: int
    shm_free_bytes: int
    shm_is_writable: bool


@dataclass(frozen=True, kw_only=True)
class FolderFacts:
    """A folder that the engine writes to. `purpose` says what for; `free_files` is None where there is no limit.

    The content of a folder that `is_in_memory` counts as memory of the job.
    """

    purpose: str
    path: str
    is_writable: bool = False
    free_bytes: int = 0
    free_files: int | None = None
    is_in_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class LimitFacts:
    """A limit of the launcher's process, as `ulimit` shows it, or of the job's cgroup; -1 is unlimited.

    `used` is what this user or the cgroup has of it, None where the limit is of each process, or holds for nobody.
    """

    soft: SignedInt
    hard: SignedInt
    used: int | None = None


@dataclass(frozen=True, kw_only=True)
class WeightsFacts:
    """The model's weights as this node sees them. `source` is a folder, or a repository of the hub.

    `folder` is where they are, "" if they are not here; `lacks_tokenizer`: it has none. `missing` says what is lacking,
    `damaged` which files cannot be loaded. `hub_status` is the HTTP status of the hub's answer, None where it was not
    asked, 0 where none came, and `hub_error` is the hub's name of what is wrong.
    """

    source: str
    is_of_hub: bool = False
    folder: str = ""
    error: str = ""
    missing: str = ""
    damaged: tuple[str, ...] = ()
    lacks_tokenizer: bool = False
    num_files: int = 0
    total_bytes: int = 0
    is_offline: bool = False
    has_token: bool = False
    hub_status: int | None = None
    hub_error: str = ""


@dataclass(frozen=True, kw_only=True)
class SoftwareFacts:
    """Versions by package, and what the engine's torch was built for. `missing_commands` are not on the PATH.

    `socket_folder` is where the engine makes its sockets.
    """

    versions: Mapping[str, str]
    torch_cuda: str = ""
    missing_commands: tuple[str, ...] = ()
    socket_folder: str = ""


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """The interface towards the other nodes. `resolved` are the addresses of the node's own name, in their order.

    `interfaces` are all interfaces of the node. `chosen` are the interfaces that the environment names, by variable.
    """

    interface: str
    speed_mbits: int | None
    mtu: int | None
    resolved: tuple[str, ...]
    resolving_s: float
    active_ib_ports: int
    interfaces: tuple[str, ...] = ()
    chosen: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """All that was seen on one node. `took_s` and `problems` are by group.

    The head adds what it alone knows. `clock_ahead_s` is how far the node's clock is ahead of the head's, as exactly as
    a message's way shows. `unreached` are the nodes that it could not connect to, with the error; None if that was not
    tried.
    """

    name: str
    address: str
    gpus: GpusFacts | None = None
    memory: MemoryFacts | None = None
    folders: tuple[FolderFacts, ...] | None = None
    limits: Mapping[str, LimitFacts] | None = None
    weights: WeightsFacts | None = None
    software: SoftwareFacts | None = None
    network: NetworkFacts | None = None
    took_s: Mapping[str, float] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    clock_ahead_s: float = 0.0
    unreached: Mapping[str, str] | None = None

    @property
    def torch_cuda(self) -> str:
        """The CUDA that the engine's torch was built for; "" for none."""
        return self.software.torch_cuda if self.software is not None else ""
