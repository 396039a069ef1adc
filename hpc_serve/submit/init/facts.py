"""The known facts of a cluster as values, and the output of commands read as such. Pure.

It reads what a login node's own commands print (df, ip, quota, `module -t avail`), and Slurm's (`scontrol show
config|partition|node`, `sacctmgr show`). Slurm 22.05 to 25.05 print the same fields in other orders, with some added;
fields are found by name. A line that is not understood is left out, and an unknown fact is None or empty: it becomes a
question in the site file. `look` runs the commands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpc_serve.submit.slurm.slurm import duration_s, scontrol_values

_SHARED_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "afs", "panfs", "orangefs", "fuse.sshfs")


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """`count` GPUs of a node, under Slurm's name for them; None if Slurm has no name."""

    name: str | None
    count: int


@dataclass(frozen=True, kw_only=True)
class SlurmNode:
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
    nodes: tuple[SlurmNode, ...] = ()

    @property
    def gpu_nodes(self) -> tuple[SlurmNode, ...]:
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
        return self.kind.lower().startswith(_SHARED_FILE_SYSTEMS)


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


# -- what the machine's commands print

_ADDRESS = re.compile(r"\d+:\s+(\S+?)(?:@\S+)?\s+inet6?\s+(\S+)(.*)")
_OF_CONTAINERS = re.compile(r"lo|docker\d*|virbr\d*|veth\w*|cni\d*|br-\w+|podman\d*|lxc\w*|tun\d+|tailscale\d+")


def parse_df(stdout: str, folders: Sequence[str]) -> tuple[Mount, ...]:
    """`df -PT FOLDER…`: a line for each folder in turn, after one of headings. None where their numbers differ."""
    lines = [line for line in stdout.splitlines()[1:] if line.strip()]
    found = []
    for folder, line in zip(folders, lines, strict=False):
        match = re.fullmatch(r"(.*\S)\s+(\S+)\s+(\d+)\s+(\d+)\s+(\d+)\s+\S+%\s+(/.*)", line)
        if match is not None:
            source, kind, _, _, free_kib, mounted_on = match.groups()
            found.append(Mount(folder=folder, source=source, kind=kind, free_kib=int(free_kib), mounted_on=mounted_on))
    return tuple(found) if len(lines) == len(folders) else ()


def parse_ip(stdout: str) -> dict[str, tuple[str, ...]]:
    """`ip -oneline address show`: the interfaces that other machines reach, with their addresses."""
    found: dict[str, tuple[str, ...]] = {}
    for line in stdout.splitlines():
        match = _ADDRESS.match(line)
        if match and "scope global" in match[3] and not _OF_CONTAINERS.fullmatch(match[1]):
            found[match[1]] = (*found.get(match[1], ()), match[2])
    return found


def parse_quota(stdout: str) -> dict[str, int]:
    """`quota --no-wrap`: file system, KiB used (with * beyond the quota), quota, limit, …

    Returns the KiB that are left, by file system.

    >>> parse_quota("nas:/home 18000000 50000000 52428800 210000 0 0")
    {'nas:/home': 34428800}
    """
    lines = (re.match(r"\s*(\S+)\s+(\d+)\*?\s+(\d+)\s+(\d+)(?:\s|$)", line) for line in stdout.splitlines())
    limits = {match: int(match[4]) or int(match[3]) for match in lines if match is not None}
    return {match[1]: limit - int(match[2]) for match, limit in limits.items() if limit}


def parse_modules(printed: str) -> tuple[str, ...]:
    """`module -t avail`, of Lmod or of Environment Modules: one name a line, under lines that name folders."""
    names = (line.strip() for line in printed.splitlines())
    names = (re.sub(r"\s*(?:<.*>|\(.*\))$", "", name) for name in names)
    return tuple(dict.fromkeys(name for name in names if re.fullmatch(r"[A-Za-z][\w.+/-]*[\w+]", name)))


# -- what Slurm's commands print

_GPUS = re.compile(r"(?:^|,)gpu:(?:([^:,()]+):)?(?:no_consume:)?(\d+)")
_NOTHING = ("", "(null)", "N/A", "NONE", "None", "n/a")
_EVERYBODY = ("ALL", *_NOTHING)
_NOT_USABLE = re.compile(r"\b(?:DOWN|DRAIN|FAIL|FUTURE|UNKNOWN)")  # but not POWERED_DOWN, which a job wakes


def parse_gres(gres: str) -> tuple[GpuKind, ...]:
    """Return the GPUs in Slurm's list of a node's generic resources.

    >>> parse_gres("gpu:h100:8(S:0-1),shard:h100:16"), parse_gres("gpu:4"), parse_gres("(null)")
    ((GpuKind(name='h100', count=8),), (GpuKind(name=None, count=4),), ())
    """
    found = [GpuKind(name=name or None, count=int(count)) for name, count in _GPUS.findall(gres)]
    return tuple(kind for kind in found if kind.count)


def parse_config(stdout: str) -> dict[str, str]:
    """`scontrol show config`: one `Name = value` a line."""
    pairs = (line.partition("=") for line in stdout.splitlines())
    return {name.strip(): value.strip() for name, equals, value in pairs if equals and " " not in name.strip()}


def parse_nodes(stdout: str) -> tuple[SlurmNode, ...]:
    """`scontrol --oneliner show node`: one node a line."""
    return tuple(_node(values) for values in map(scontrol_values, stdout.splitlines()) if "NodeName" in values)


def _node(values: dict[str, str]) -> SlurmNode:
    return SlurmNode(
        name=values["NodeName"],
        partitions=_words(values.get("Partitions", "")),
        cpus=_number(values.get("CPUTot", "")),
        memory_mib=_number(values.get("RealMemory", "")),
        gpus=parse_gres(values.get("Gres", "")),
        features=_words(values.get("ActiveFeatures", values.get("AvailableFeatures", ""))),
        state=values.get("State", ""),
    )


def parse_partitions(stdout: str) -> tuple[PartitionFacts, ...]:
    """`scontrol --oneliner show partition`: one partition a line."""
    lines = map(scontrol_values, stdout.splitlines())
    return tuple(_partition(values) for values in lines if "PartitionName" in values)


def _partition(values: dict[str, str]) -> PartitionFacts:
    hosts = values.get("AllocNodes", "ALL")
    return PartitionFacts(
        name=values["PartitionName"],
        is_default=values.get("Default") == "YES",
        is_up=values.get("State", "UP") == "UP",
        time_limit_s=duration_s(values.get("MaxTime", "")) or None,
        num_nodes=_number(values.get("TotalNodes", "")),
        gives_whole_nodes=values.get("OverSubscribe", values.get("Shared", "")) == "EXCLUSIVE",
        allow_accounts=_allowed(values.get("AllowAccounts", "ALL")),
        deny_accounts=_words(values.get("DenyAccounts", "")),
        allow_groups=_allowed(values.get("AllowGroups", "ALL")),
        allow_qos=_allowed(values.get("AllowQos", "ALL")),
        submit_hosts=None if hosts in _EVERYBODY else hosts,
    )


def with_nodes(partitions: Sequence[PartitionFacts], nodes: Sequence[SlurmNode]) -> tuple[PartitionFacts, ...]:
    """Return each partition with its nodes. Nodes that nobody can use now count only if there are no others."""
    joined = []
    for partition in partitions:
        own = [node for node in nodes if partition.name in node.partitions]
        usable = [node for node in own if not _NOT_USABLE.search(node.state.upper())]
        joined.append(replace(partition, nodes=tuple(usable or own)) if own else partition)
    return tuple(joined)


def parse_associations(stdout: str) -> tuple[Association, ...]:
    """`sacctmgr show associations`: lines of Account|Partition|QOS,QOS|DefaultQOS."""
    found = []
    for line in stdout.splitlines():
        words = line.strip().split("|")
        if len(words) == 4 and words[0]:
            account, partition, qos, default = words
            found.append(
                Association(account=account, partition=partition or None, qos=_words(qos), default_qos=default or None)
            )
    return tuple(found)


def parse_default_account(stdout: str) -> str | None:
    """sacctmgr's one word; None where there is none."""
    word = next((line.strip() for line in stdout.splitlines() if line.strip()), "")
    return None if word in _NOTHING or not re.fullmatch(r"[\w.@+-]+", word) else word


def _words(value: str) -> tuple[str, ...]:
    return () if value in _NOTHING else tuple(word for word in value.split(",") if word)


def _allowed(value: str) -> tuple[str, ...] | None:
    return None if value in _EVERYBODY else _words(value)


def _number(value: str) -> int:
    found = re.match(r"\d+", value)
    return int(found[0]) if found else 0
