"""Which accelerator of the catalogue a GPU is that Slurm knows by a name of the site's own. Pure.

Slurm's names come from a site (`h100`) or from the driver (`nvidia_a100-sxm4-80gb`); a feature of the node may say the
memory (`a100_80g`). A part of a GPU (MIG) is none of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpc_serve.plan.catalog import accelerator_entries

_PART_OF_GPU = re.compile(r"\d+g[._]\d+g")
_VARIANT = re.compile(r"-(?:pcie|nvl|gcd|server|\d+gb).*")
_REST = re.compile(r"(?:l|x|sxm\d?|pcie|nvl|\d{2,3}gb?)*")
_MEMORY = re.compile(r"(\d{2,3})gb?(?![a-z0-9])")


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
