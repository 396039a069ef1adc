"""What a test cluster looks like, as values: its hosts, addresses, folders, and the text of Slurm's own files.

Nothing here has an effect; `hosts` makes the namespaces and `cluster` starts the daemons. Two clusters of different
names share nothing: their networks are namespaces of their own, so that even addresses and ports may be the same.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
LOGIN = "login"
INTERFACE = "eth0"
PROJECT = "project"


def _os_root() -> Path | None:
    named = os.environ.get("HPC_SERVE_CLUSTER_OS")
    return Path(named) if named else None


PROJECT = "project"


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A cluster's size and place.

    `root` holds one folder per cluster; it lies outside /tmp, which every host has for itself. `visible` are folders
    of this machine (the checkout, a virtual environment) that ordinary users of the cluster shall reach at the same
    path, wherever they are, under a private home or /tmp too. A node's CPUs, GPUs and memory are declared, not present:
    scripts made for large nodes are scheduled as they stand. `os_root` is a folder with a whole Debian, whose Slurm and
    whose commands the hosts have in place of this machine's (debian_root.sh makes one).
    """

    name: str = "hs"
    num_nodes: int = 3
    gpus_per_node: int = 8
    gpu_type: str = "h100"
    cpus_per_node: int = 64
    memory_per_node_mib: int = 524_288
    users: tuple[str, ...] = ("alice", "mallory")
    root: Path = field(
        default_factory=lambda: Path(os.environ.get("HPC_SERVE_CLUSTER_ROOT", "/var/lib/hpc-serve-cluster"))
    )
    visible: tuple[Path, ...] = (CHECKOUT,)
    os_root: Path | None = field(default_factory=_os_root)
    kill_wait_s: int = 30
    slurmd_timeout_s: int = 30

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,14}", self.name):
            raise ValueError(
                f"cluster name {self.name!r}: use up to 15 lower-case letters, digits and dashes, a letter first"
            )
        if not 1 <= self.num_nodes <= 100:
            raise ValueError(f"num_nodes is {self.num_nodes}; it must be 1 to 100")

    @property
    def state(self) -> Path:
        return self.root / self.name

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"n{i}" for i in range(1, self.num_nodes + 1))

    @property
    def hosts(self) -> tuple[str, ...]:
        return (LOGIN, *self.nodes)

    def address(self, host: str) -> str:
        """The host's only address: 10.77.0.10 for the login node, 10.77.0.11 for n1, and so on."""
        return f"10.77.0.{10 + self.hosts.index(host)}"

    def home(self, user: str) -> Path:
        """The user's home, on the filesystem that all hosts share."""
        return self.state / "home" / user

    @property
    def shared(self) -> Path:
        """A folder that root writes and everybody reads on every host, for models and the like."""
        return self.state / "shared"

    @property
    def slurm_conf(self) -> Path:
        return self.state / "etc" / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.state / "munge" / "socket"

    @property
    def munge_key(self) -> Path:
        return self.state / "munge" / "private" / "key"

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str, sort_keys=True, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ClusterConfig:
        values = json.loads(text)
        values |= {"root": Path(values["root"]), "users": tuple(values["users"])}
        values["os_root"] = Path(values["os_root"]) if values["os_root"] else None
        return cls(**values | {"visible": tuple(map(Path, values["visible"]))})


def slurm_conf_text(config: ClusterConfig) -> str:
    """slurm.conf: Slurm's defaults where they matter to a job's end (KillWait), short polling elsewhere.

    linuxproc tracks processes by their parents and misses orphans, which cgroups would catch: whoever leaves a process
    behind is seen. Preemption works as on sites with a scavenger queue: `lowprio` jobs are requeued for `gpu` ones.
    """
    state = config.state
    memory_per_cpu_mib = config.memory_per_node_mib // config.cpus_per_node
    settings = {
        "ClusterName": config.name,
        "SlurmctldHost": f"{LOGIN}({config.address(LOGIN)})",
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={config.munge_socket}",
        "StateSaveLocation": state / "slurmctld",
        "SlurmdSpoolDir": state / "slurmd" / "%n",
        "SlurmctldPidFile": state / "run" / "slurmctld.pid",
        "SlurmdPidFile": state / "run" / "slurmd-%n.pid",
        "SlurmctldLogFile": state / "log" / "slurmctld.log",
        "SlurmdLogFile": state / "log" / "slurmd-%n.log",
        "MailProg": "/bin/true",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU_Memory",
        "DefMemPerCPU": memory_per_cpu_mib,
        "GresTypes": "gpu",
        "SlurmdParameters": "config_overrides",
        "ReturnToService": "2",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=2,bf_interval=2",
        "KillWait": config.kill_wait_s,
        "SlurmdTimeout": config.slurmd_timeout_s,
        "MinJobAge": "86400",
        "TCPTimeout": "2",
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    lines += [
        f"NodeName={node} NodeAddr={config.address(node)} CPUs={config.cpus_per_node}"
        f" RealMemory={config.memory_per_node_mib} Gres=gpu:{config.gpu_type}:{config.gpus_per_node} State=UNKNOWN"
        for node in config.nodes
    ]
    all_nodes = ",".join(config.nodes)
    lines += [
        f"PartitionName=gpu Nodes={all_nodes} Default=YES MaxTime=7-0 PriorityTier=10 PreemptMode=OFF",
        f"PartitionName=lowprio Nodes={all_nodes} MaxTime=7-0 PriorityTier=1 PreemptMode=REQUEUE",
    ]
    return "\n".join(lines) + "\n"


def gres_conf_text(config: ClusterConfig) -> str:
    """gres.conf: GPUs that are declared, on device files that stand in for them."""
    files = f"{config.state}/dev/gpu[0-{config.gpus_per_node - 1}]"
    return f"AutoDetect=off\nNodeName={','.join(config.nodes)} Name=gpu Type={config.gpu_type} File={files}\n"


def cgroup_conf_text() -> str:
    """cgroup.conf: slurmd reads it even where no plugin of ours uses cgroups, and must not mount any."""
    return "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"


def plugstack_conf_text() -> str:
    """plugstack.conf: the plugins that the hosts' own system has (pyxis_root.sh)."""
    return "include /usr/share/pyxis/*.conf\n"


def hosts_text(config: ClusterConfig) -> str:
    """/etc/hosts of every host: all of the cluster, nothing of the machine."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    lines += [f"{config.address(host)} {host}" for host in config.hosts]
    return "\n".join(lines) + "\n"


def accounts_text(config: ClusterConfig, machine_text: str, first_id: int, *, group: bool) -> str:
    """/etc/passwd (or /etc/group) of every host: the machine's accounts, then one per user of the cluster.

    All these users are in the group PROJECT.
    """
    lines = []
    for number, user in enumerate(config.users, start=first_id):
        home = config.home(user)
        lines.append(f"{user}:x:{number}:" if group else f"{user}:x:{number}:{number}::{home}:/bin/bash")
    if group:
        lines.append(f"{PROJECT}:x:{first_id + len(config.users)}:{','.join(config.users)}")
    taken = {line.split(":", 1)[0] for line in lines}
    kept = [line for line in machine_text.splitlines() if line and line.split(":", 1)[0] not in taken]
    return "\n".join(kept + lines) + "\n"
