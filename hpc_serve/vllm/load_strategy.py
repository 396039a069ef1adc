"""Which strategy of vLLM reads the weights: by the filesystem of their files, their size and the memory of the node.

Pure. vLLM 0.32 maps the files into memory and reads what it needs as it needs it ("lazy"), which is slow where each
read is a round trip to a server. It reads ahead by itself ("prefetch") on NFS and Lustre alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_serve.units import readable_size
from hpc_serve.vllm.arguments import names_in, read_arguments, value_of

STRATEGY = "--safetensors-load-strategy"
NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "wekafs", "ceph", "panfs", "pvfs2", "orangefs", "glusterfs", "cifs"}
    | {"smb3", "smbfs", "afs", "9p", "virtiofs", "quobyte", "daos", "cvmfs2", "vast"}
    | {f"fuse.{name}" for name in ("beegfs", "ceph", "glusterfs", "quobyte", "daos", "dfuse", "juicefs", "sshfs")}
    | {f"fuse.{name}" for name in ("s3fs", "rclone", "gcsfuse", "moosefs", "mfs", "weka")}
)
"""As the kernel names them in /proc/mounts."""
_READ_AHEAD_BY_VLLM = frozenset({"nfs", "nfs4", "lustre"})
_OF_DEFAULT_LOADER = (None, "auto", "hf", "safetensors", "mistral")
_PART_OF_MEMORY = 0.9  # above it vLLM warns of a lack of memory, and reads nothing ahead by itself
_PART_FOR_EAGER = 0.5


@dataclass(frozen=True, kw_only=True)
class WeightsPlace:
    """The location of a run's weights, as a node sees it.

    `available_bytes` is memory that its job may still use.
    """

    filesystem: str
    total_bytes: int
    largest_bytes: int
    available_bytes: int


@dataclass(frozen=True, kw_only=True)
class LoadStrategy:
    """Words for the engine's command, and the reason for them, or for their absence."""

    args: tuple[str, ...] = ()
    reason: str


def choose_strategy(
    words: Sequence[str], place: WeightsPlace, *, known: Sequence[str], ranks_per_node: int
) -> LoadStrategy:
    """Return the strategy for an engine; a choice in its `words` wins. `known` are the strategies of its version."""
    if reason := _settled_reason(words, place):
        return LoadStrategy(reason=reason)
    size, memory = readable_size(place.total_bytes), readable_size(place.available_bytes)
    if place.total_bytes <= _PART_OF_MEMORY * place.available_bytes:
        held = f"{size} on {place.filesystem}, {memory} of memory are free"
        if place.filesystem in _READ_AHEAD_BY_VLLM:
            return LoadStrategy(reason=f"prefetch, by vLLM itself: {held}")
        return _if_known("prefetch", held, known)
    too_large = f"{size} on {place.filesystem} do not fit into 90 % of the {memory} of memory that are free"
    if ranks_per_node * place.largest_bytes <= _PART_FOR_EAGER * place.available_bytes:
        return _if_known(
            "eager", f"{too_large}, and one file of {readable_size(place.largest_bytes)} a rank does", known
        )
    return LoadStrategy(
        reason=f"vLLM's default (lazy): {too_large}, nor does one file for each of {ranks_per_node} ranks"
    )


def foreseen_strategy(words: Sequence[str], place: WeightsPlace | None, *, ranks_per_node: int) -> str:
    """Say what `choose_strategy` will choose on a node that is not known yet, as far as possible.

    A `place` of None means that the weights are not here. The node's memory is unknown: `place.available_bytes` is
    ignored.
    """
    if reason := _settled_reason(words, place):
        return reason
    if place is None:
        return "known once the job sees them: no safetensors files of it are here"
    whole = int(place.total_bytes / _PART_OF_MEMORY)
    files = int(ranks_per_node * place.largest_bytes / _PART_FOR_EAGER)
    own = ", by vLLM itself," if place.filesystem in _READ_AHEAD_BY_VLLM else ""
    eager = f"else eager with {readable_size(files)}, " if files < whole else ""
    return (
        f"prefetch{own} on nodes with {readable_size(whole)} of memory free, {eager}else vLLM's default (lazy): "
        f"{readable_size(place.total_bytes)} on {place.filesystem}"
    )


def _settled_reason(words: Sequence[str], place: WeightsPlace | None) -> str:
    """Say why vLLM gets no strategy whatever memory a node has; "" if its memory decides."""
    given = read_arguments(words)
    if STRATEGY in names_in(words):
        return f"{value_of(given, STRATEGY)}, as its command says"
    if (load_format := value_of(given, "--load-format")) not in _OF_DEFAULT_LOADER:
        return f"--load-format {load_format} reads the files in its own way"
    if "--model-loader-extra-config" in names_in(words):
        return "vLLM's default, since --model-loader-extra-config is given"
    if place is not None and place.filesystem not in NETWORK_FILESYSTEMS:
        size = readable_size(place.total_bytes)
        return f"vLLM's default (lazy): {size} on {place.filesystem}, which is no network filesystem"
    return ""


def _if_known(strategy: str, why: str, known: Sequence[str]) -> LoadStrategy:
    if strategy not in known:
        return LoadStrategy(reason=f"vLLM's default: {why}, but this vLLM has no strategy {strategy!r}")
    return LoadStrategy(args=(STRATEGY, strategy), reason=f"{strategy}: {why}")
