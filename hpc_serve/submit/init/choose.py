"""Makes settings of a site file out of what is known of a cluster, each with its reason or its question. Pure.

A setting is decided only if Slurm, or the machine, says it. Whatever a person must know is left as a question.
`gpus_named` finds the accelerator of the catalogue for Slurm's name of a GPU. Such a name comes from a site (`h100`) or
from the driver (`nvidia_a100-sxm4-80gb`); a feature of the node may say the memory (`a100_80g`). A part of a GPU (MIG)
is not in the catalogue.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog import accelerator_entries
from hpc_serve.submit.init.facts import ClusterFacts, PartitionFacts, SlurmNode
from hpc_serve.submit.init.places import Setting, decided, places, question
from hpc_serve.submit.request.options import SlurmOptions
from hpc_serve.units import duration, number_of

# -- Slurm's names of GPUs

_PART_OF_GPU = re.compile(r"\d+g[._]\d+g")
_VARIANT = re.compile(r"-(?:pcie|nvl|gcd|server|\d+gb).*")
_REST = re.compile(r"(?:l|x|sxm\d?|pcie|nvl|\d{2,3}gb?)*")
_MEMORY = re.compile(r"(?:(?=\d+g)|(?<=[-_.]))(\d{2,3})(?:gb?)?(?![a-z0-9])")


def gpus_named(slurm_name: str, features: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the catalogue's names that fit Slurm's words, the usual one first; none where it has none of that name.

    >>> gpus_named("nvidia_h100_80gb_hbm3"), gpus_named("a100"), gpus_named("a100", ["a100_40g"])
    (('h100-80gb',), ('a100-80gb', 'a100-40gb', 'a100-64gb'), ('a100-40gb',))
    """
    text = slurm_name.lower()
    if _PART_OF_GPU.search(text):
        return ()
    entries = {entry["name"]: entry for entry in accelerator_entries().values() if entry["kind"] == "gpu"}
    chips = {name: _VARIANT.sub("", name) for name in entries}
    chip = max((chip for chip in chips.values() if _is_named(text, chip)), key=len, default=None)
    if chip is None:
        return ()
    # A feature counts where it names the same chip: others may be of the CPUs or the local disk.
    words = [text, *(word for word in map(str.lower, features) if _is_named(word, chip))]
    names = [name for name, its_chip in chips.items() if its_chip == chip]
    for variant in ("pcie", "nvl", "server"):
        said = any(variant in word for word in words)
        matching = [n for n in names if said == any(variant in one for one in (n, *entries[n]["aliases"]))]
        names = matching or names
    memories = {f"{size}gb" for word in words for size in _MEMORY.findall(word)}
    if with_memory := [name for name in names if name.rpartition("-")[2] in memories]:
        return (with_memory[0],)
    usual = next((name for name in names if chip in entries[name]["aliases"]), names[0])
    return (usual, *(name for name in names if name != usual))


def _is_named(text: str, chip: str) -> bool:
    """Return whether a chip ("rtx-3090") is named in a text, under its last word too ("3090")."""
    tokens = [token for token in re.split(r"[^a-z0-9]+", text) if token]
    squashed = "".join(tokens)
    if "-" in chip:
        return chip.replace("-", "") in squashed or (chip.startswith("rtx-") and chip[4:] in tokens)
    return any(token.startswith(chip) and _REST.fullmatch(token.removeprefix(chip)) for token in tokens)


# -- settings

_LEAST_TIME_S = 3600.0
_USUAL_TIME_S = 12 * 3600.0
_USUAL_TIME = "12:00:00"
_SHOWN = 6


def choose_settings(facts: ClusterFacts) -> tuple[Setting, ...]:
    """Return the settings in the order of writing."""
    partition = choose_partition(facts)
    account = _account(facts, partition)
    chosen = (
        _partition(facts, partition),
        account,
        _qos(facts, partition, account.value),
        _time(partition),
        *_gpus(facts, partition),
        *_shares(partition),
        _submission(partition),
        *places(facts),
    )
    return tuple(map(_as_the_site_file_takes_it, chosen))


def _as_the_site_file_takes_it(setting: Setting) -> Setting:
    """Return the setting as a question if no `#SBATCH` line can hold its value: a site's names may be anything."""
    if setting.value is None or setting.key not in {option.name for option in fields(SlurmOptions)}:
        return setting
    asked: dict[str, Any] = {setting.key: setting.value}
    try:
        SlurmOptions(**asked)
    except InvalidRequestError as error:
        why = f"{setting.why} It is left out, since a script cannot hold it: {error}"
        return replace(setting, value=None, example=setting.example or "NAME", why=why)
    return setting


def choose_partition(facts: ClusterFacts) -> PartitionFacts | None:
    """Return the partition to use: one with GPUs that the user may use, the default one first, then the largest."""
    usable = [one for one in facts.partitions if one.is_up and _may_use(facts, one)]
    with_gpus = [one for one in usable if one.gpu_nodes] or usable

    def rank(one: PartitionFacts) -> tuple[bool, bool, int, float]:
        limit_s = one.time_limit_s or math.inf
        nodes = len(one.gpu_nodes or one.nodes) or one.num_nodes
        return (one.is_default, limit_s >= _LEAST_TIME_S, nodes, limit_s)

    return max(with_gpus, key=rank, default=None)


def _may_use(facts: ClusterFacts, partition: PartitionFacts) -> bool:
    """Return whether nothing that is known keeps the user out."""
    if partition.allow_groups is not None and facts.groups and not set(partition.allow_groups) & set(facts.groups):
        return False
    return not facts.associations or bool(_accounts(facts, partition))


def _accounts(facts: ClusterFacts, partition: PartitionFacts | None) -> list[str]:
    """Return the accounts that the user may charge in a partition."""
    found = dict.fromkeys(
        one.account for one in facts.associations if partition is None or one.partition in (None, partition.name)
    )
    if partition is None:
        return list(found)
    allowed = found if partition.allow_accounts is None else partition.allow_accounts
    return [account for account in found if account in allowed and account not in partition.deny_accounts]


def _usual_node(partition: PartitionFacts) -> SlurmNode | None:
    """Return the kind of node that most of a partition's GPU nodes are of; of all its nodes, where it has no GPUs."""
    nodes = partition.gpu_nodes or partition.nodes
    kinds = Counter(replace(node, name="", partitions=(), state="") for node in nodes)
    return max(kinds, key=kinds.__getitem__, default=None)


def describe(partition: PartitionFacts) -> str:
    """Return a partition's nodes in a few words: `3 nodes of 8 h100, 64 CPUs, 512 GiB, at most 7 d`."""
    kind = _usual_node(partition)
    number = len(partition.gpu_nodes or partition.nodes) or partition.num_nodes
    words = [number_of(number, "node")]
    if kind and kind.gpus:
        words[0] += " of " + " and ".join(f"{gpus.count} {gpus.name or 'GPUs'}" for gpus in kind.gpus)
    words += [f"{kind.cpus} CPUs"] if kind and kind.cpus else []
    words += [f"{kind.memory_mib / 1024:,.0f} GiB"] if kind and kind.memory_mib else []
    words += [f"at most {duration(partition.time_limit_s)}"] if partition.time_limit_s else []
    return ", ".join(words)


def _partition(facts: ClusterFacts, chosen: PartitionFacts | None) -> Setting:
    others = [one for one in facts.partitions if one.is_up and one != chosen]
    listed = "; ".join(f"{one.name} ({describe(one)})" for one in others[:_SHOWN])
    more = f"; and {len(others) - _SHOWN} more, see `sinfo`" if len(others) > _SHOWN else ""
    also = f" Also here: {listed}{more}." if others else ""
    if chosen is None:
        return question("partition", "gpu", f"Which partition has the GPUs? Slurm showed none.{also}")
    why = "Slurm's default" if chosen.is_default else "not Slurm's default"
    gpus = "" if chosen.gpu_nodes else " No partition that you may use shows GPUs."
    return decided("partition", chosen.name, f"{describe(chosen)}; {why}.{gpus}{also}")


def _account(facts: ClusterFacts, partition: PartitionFacts | None) -> Setting:
    accounts = _accounts(facts, partition)
    if not accounts:
        reason = facts.unanswered.get("sacctmgr", "it lists none for you")
        is_enforced = "associations" in facts.config.get("AccountingStorageEnforce", "")
        needs = "Slurm refuses jobs without one here." if is_enforced else "Slurm takes its default otherwise."
        return question("account", "my-project", f"Which account pays? sacctmgr did not tell: {reason}. {needs}")
    is_default = facts.default_account in accounts
    value = str(facts.default_account) if is_default else accounts[0]
    others = [one for one in accounts if one != value]
    also = f" You may charge {', '.join(others)} too." if others else ""
    by = "Your default account" if is_default else "The first account that you may charge here"
    return decided("account", value, f"{by}, says sacctmgr.{also}")


def _qos(facts: ClusterFacts, partition: PartitionFacts | None, account: object) -> Setting:
    own = [one for one in facts.associations if one.account == account]
    mine = list(dict.fromkeys(qos for one in own for qos in one.qos))
    default = next((one.default_qos for one in own if one.default_qos), None)
    allowed = partition.allow_qos if partition else None
    usable = [qos for qos in mine if allowed is None or qos in allowed]
    if allowed is not None and usable and default not in usable:
        why = f"The partition takes {', '.join(allowed)} alone; of those you have {', '.join(usable)}."
        return decided("qos", usable[0], why)
    if not mine:
        return question("qos", "normal", "Does the site want a QOS to be named?")
    by_default = f", by default {default}" if default else ""
    return question("qos", mine[0], f"You have {', '.join(mine)}{by_default}. Does a job here need another?")


def _time(partition: PartitionFacts | None) -> Setting:
    limit_s = partition.time_limit_s if partition else None
    if limit_s is not None and limit_s < _USUAL_TIME_S:
        hours, minutes = divmod(int(limit_s // 60), 60)
        why = f"The partition's limit, {duration(limit_s)}; hpc-serve asks for {_USUAL_TIME} otherwise. "
        return decided("time", f"{hours:02d}:{minutes:02d}:00", f"{why}`--keep-up` goes on across limits.")
    longest = f" The partition allows {duration(limit_s)}." if limit_s else ""
    return question("time", _USUAL_TIME, f"How long does a service run? {_USUAL_TIME} unless you say.{longest}")


def _gpus(facts: ClusterFacts, partition: PartitionFacts | None) -> Iterator[Setting]:
    kind = _usual_node(partition) if partition else None
    if partition is None or kind is None or not kind.gpus:
        why = "What do the nodes have? Slurm shows no GPUs; `hpc-serve gpus` lists the names, cpu among them."
        yield question("gpu", "h100-80gb", why)
        return
    # Parts of GPUs (MIG) are of no use to an engine on several.
    first = max(kind.gpus, key=lambda gpus: (not _PART_OF_GPU.search(gpus.name or ""), gpus.count))
    names = gpus_named(first.name, kind.features) if first.name else ()
    if names:
        others = f" It may be {' or '.join(names[1:])}: `srun nvidia-smi` shows the memory." if names[1:] else ""
        yield decided("gpu", names[0], f"Slurm calls them {first.name}.{others}")
    else:
        called = f"calls them {first.name}, which the catalogue does not know" if first.name else "has no name"
        why = f"Which GPU do the nodes have? Slurm {called}; `hpc-serve gpus` lists the names."
        yield question("gpu", "h100-80gb", why)
    yield decided("gpus_per_node", first.count, f"Gres of the nodes: {first.count} each.")
    select = facts.config.get("SelectType", "")
    if select and not select.endswith("cons_tres"):
        yield decided("gpu_directive", "gres", f"SelectType is {select}, which knows no --gpus-per-node.")
    else:
        seen = f"SelectType {select} takes both" if select else "Slurm takes both as a rule"
        why = f"How is Slurm asked for GPUs? --gpus-per-node unless you write gres; {seen}."
        yield question("gpu_directive", "gres", why)
    types = {gpus.name for node in partition.gpu_nodes for gpus in node.gpus if gpus.name}
    if first.name and len(types) > 1:
        why = f"The partition has {', '.join(sorted(types))}; without a type Slurm may give any of them."
        yield decided("gres_type", first.name, why)
        return
    plugins = facts.config.get("JobSubmitPlugins", "")
    asks = f" This site checks jobs ({plugins}), and may." if plugins not in ("", "(null)") else ""
    yield question("gres_type", first.name or "h100", f"Must a job name the type of GPU?{asks}")


def _shares(partition: PartitionFacts | None) -> Iterator[Setting]:
    if partition and partition.gives_whole_nodes:
        why = "The partition gives whole nodes alone (OverSubscribe=EXCLUSIVE): take all cores and memory."
        yield decided("exclusive", True, why)
        return
    kind = _usual_node(partition) if partition else None
    yield question(
        "exclusive",
        True,
        "Whole nodes even for a service that needs a part? Several nodes are whole unless you write false.",
    )
    yield question(
        "mem",
        "200G",
        "Memory of each node, where hpc-serve's own guess is not right. Files that a job writes to /dev/shm or to a "
        "/tmp in memory count as well.",
    )
    yield question("constraint", next(iter(kind.features if kind else ()), "h100"), "Must nodes have a feature?")


def _submission(partition: PartitionFacts | None) -> Setting:
    if partition and partition.submit_hosts:
        why = f"AllocNodes of the partition is {partition.submit_hosts}: jobs on other hosts cannot submit the next."
        return decided("jobs_can_submit", False, why)
    return question("jobs_can_submit", False, "May a job call sbatch here? --keep-up needs that.")
