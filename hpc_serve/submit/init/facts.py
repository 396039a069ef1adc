"""The known facts of a cluster, as values. An unknown fact is None or empty. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SHARED_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "afs", "panfs", "orangefs", "fuse.sshfs")


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """`count` GPUs of a node, under Slurm's name for them; None if Slurm has no name."""

    name: str | None
    count: int


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """One node. Memory is what Slurm hands out, in MiB."""

    name: str = ""
    partitions: tuple[str, ...] = ()
    cpus: int = 0
    memory_mib: int = 0
    gpus: tuple[GpuKind, ...] = ()
    features: tuple[str, ...] = ()
    state: str = ""


@dataclass(frozen=True, kw_only=True)
class PartitionFacts:
    """One partition. None stands for everybody in its lists of users, and for no limit in `time_limit_s`."""

    name: str
    is_default: bool = False
    is_up: bool = True
    time_limit_s: float | None = None
    num_nodes: int = 0
    gives_whole_nodes: bool = False
    allow_accounts: tuple[str, ...] | None = None
    deny_accounts: tuple[str, ...] = ()
    allow_groups: tuple[str, ...] | None = None
    allow_qos: tuple[str, ...] | None = None
    submit_hosts: str | None = None
    nodes: tuple[NodeFacts, ...] = ()

    @property
    def gpu_nodes(self) -> tuple[NodeFacts, ...]:
        return tuple(node for node in self.nodes if node.gpus)


@dataclass(frozen=True, kw_only=True)
class Association:
    """An account that the user may charge, by accounting; `partition` is set if it holds for one partition alone."""

    account: str
    partition: str | None = None
    qos: tuple[str, ...] = ()
    default_qos: str | None = None


@dataclass(frozen=True, kw_only=True)
class Mount:
    """The file system that a folder is on: its device or server, where it is mounted. Sizes are in KiB, as of df."""

    folder: str
    source: str
    kind: str
    free_kib: int
    mounted_on: str

    @property
    def is_shared(self) -> bool:
        """Return whether other machines see this kind of file system."""
        return self.kind.lower().startswith(SHARED_FILE_SYSTEMS)


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """All facts. `unanswered` are the commands without a useful answer, each with the reason.

    `config` is `scontrol show config`. `quotas` are the KiB that the user's quotas leave, by file system. `interfaces`
    are the addresses ("10.1.0.7/16") of each network interface. `environ` holds the variables that say where things
    are. `environment` is the virtual environment that HPC_SERVE_ENV names, else the one that hpc-serve runs in;
    `engine` is vLLM's version in it.
    """

    host: str = ""
    groups: tuple[str, ...] = ()
    config: Mapping[str, str] = field(default_factory=dict)
    partitions: tuple[PartitionFacts, ...] = ()
    associations: tuple[Association, ...] = ()
    default_account: str | None = None
    mounts: tuple[Mount, ...] = ()
    quotas: Mapping[str, int] = field(default_factory=dict)
    interfaces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    runtimes: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    environment: str | None = None
    engine: str | None = None
    unanswered: Mapping[str, str] = field(default_factory=dict)

    @property
    def slurm_version(self) -> str | None:
        return self.config.get("SLURM_VERSION")
