"""Reads what Slurm's commands print of a cluster: `scontrol show config|partition|node`, `sacctmgr show`. Pure.

Slurm 22.05 to 25.05 print the same fields in other orders, with some added; fields are found by name. A line that is
not understood is left out: what is missing becomes a question in the site file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hpc_serve.submit.init.facts import Association, GpuKind, NodeFacts, PartitionFacts
from hpc_serve.submit.slurm.slurm_answers import duration_s, scontrol_values

_GPUS = re.compile(r"(?:^|,)gpu:(?:([^:,()]+):)?(?:no_consume:)?(\d+)")
_NOTHING = ("", "(null)", "N/A", "NONE", "None", "n/a")
_EVERYBODY = ("ALL", *_NOTHING)
_NOT_USABLE = ("DOWN", "DRAIN", "FAIL", "FUTURE", "UNKNOWN")


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


def parse_nodes(stdout: str) -> tuple[NodeFacts, ...]:
    """`scontrol --oneliner show node`: one node a line."""
    return tuple(_node(values) for values in map(scontrol_values, stdout.splitlines()) if "NodeName" in values)


def _node(values: dict[str, str]) -> NodeFacts:
    return NodeFacts(
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
        time_limit_s=_limit_s(values.get("MaxTime", "")),
        num_nodes=_number(values.get("TotalNodes", "")),
        gives_whole_nodes=values.get("OverSubscribe", values.get("Shared", "")) == "EXCLUSIVE",
        allow_accounts=_allowed(values.get("AllowAccounts", "ALL")),
        deny_accounts=_words(values.get("DenyAccounts", "")),
        allow_groups=_allowed(values.get("AllowGroups", "ALL")),
        allow_qos=_allowed(values.get("AllowQos", "ALL")),
        submit_hosts=None if hosts in _EVERYBODY else hosts,
    )


def with_nodes(partitions: Sequence[PartitionFacts], nodes: Sequence[NodeFacts]) -> tuple[PartitionFacts, ...]:
    """Return each partition with its nodes. Nodes that nobody can use now count only if there are no others."""
    joined = []
    for partition in partitions:
        own = [node for node in nodes if partition.name in node.partitions]
        usable = [node for node in own if not any(word in node.state.upper() for word in _NOT_USABLE)]
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


def _limit_s(value: str) -> float | None:
    return duration_s(value) or None
