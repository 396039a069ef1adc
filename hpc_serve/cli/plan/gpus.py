"""`gpus`: the accelerators that `--gpu` and the site file's `gpu` can name, as a list. The site's own is marked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from hpc_serve.cli.commands import print_json
from hpc_serve.sizes import GIB

_ENGINES = {"NVIDIA": "CUDA", "AMD": "ROCm", "Intel": "XPU", "Google": "TPU"}


@click.command("gpus")
@click.argument("word", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def gpus_command(word: str | None, as_json: bool) -> None:
    """List the accelerators that --gpu can name; with WORD, only names that hold it.

    hpc-serve gpus h100

    MEMORY is of one accelerator, as its driver shows it. PER NODE is the usual number; --gpus-per-node says otherwise.
    A * marks the accelerator that the site file names.
    """
    from hpc_serve.plan import catalog
    from hpc_serve.plan.hardware.cluster import DEFAULT_GPU, accelerator_of
    from hpc_serve.submit.site.site_files import read_site

    own = read_site(os.environ).gpu
    own_name = accelerator_of(own)["name"] if own else None
    entries = {entry["name"]: entry for entry in catalog.accelerator_entries().values()}
    found = [
        _described(entry, is_own=name == own_name)
        for name, entry in entries.items()
        if word is None or any(word.lower() in one.lower() for one in (name, entry["product"], *entry["aliases"]))
    ]
    if as_json:
        print_json(found)
        return
    if not found:
        raise click.ClickException(f"No accelerator has {word!r} in its name; `hpc-serve gpus` lists all.")
    _print_accelerators(found)
    if own is None:
        click.echo(f"No site file names yours, so {DEFAULT_GPU} is assumed; write `gpu: NAME` in it, or --gpu NAME.")
    else:
        click.echo(f"* the site file's: {own}")


def _described(entry: Mapping[str, Any], *, is_own: bool) -> dict[str, Any]:
    """Return an accelerator under stable keys; `memory_bytes` is None for CPUs, because --gpu-memory says it."""
    memory = int(entry["total_gib"] * GIB) if entry["total_gib"] else entry["label_bytes"]
    return {
        "name": entry["name"],
        "aliases": list(entry["aliases"]),
        "product": entry["product"],
        "memory_bytes": memory,
        "per_node": entry["gpus_per_node"],
        "slices": list(entry.get("slices") or ()),
        "engine": _engine(entry),
        "no_script_reason": entry.get("no_script_reason"),
        "is_own": is_own,
    }


def _engine(entry: Mapping[str, Any]) -> str:
    if entry["kind"] == "cpu":
        return "CPU"
    return "HPU" if "Gaudi" in entry["product"] else _ENGINES[entry["vendor"]]


def _print_accelerators(entries: Sequence[Mapping[str, Any]]) -> None:
    """Print the name to type, memory, how many a node has, what the engine runs on."""
    from rich.text import Text

    from hpc_serve.cli.console import WIDE_ENOUGH, PlainConsole, plain_table

    console = PlainConsole()
    is_wide = console.width >= WIDE_ENOUGH
    headings = ("NAME", "MEMORY", "PER NODE", "ENGINE", *(("IS",) if is_wide else ()))
    table = plain_table(*headings, right=("MEMORY", "PER NODE"), folded=("IS",))
    for entry in entries:
        memory = f"{entry['memory_bytes'] / GIB:.1f} GiB" if entry["memory_bytes"] else "--gpu-memory"
        aliases = f" ({', '.join(entry['aliases'])})" if entry["aliases"] else ""
        product = f"{entry['product']}{aliases}{'; plan alone' if entry['no_script_reason'] else ''}"
        name = f"{'* ' if entry['is_own'] else '  '}{entry['name']}"
        cells = [name, memory, str(entry["per_node"]), entry["engine"], *([product] if is_wide else [])]
        table.add_row(*map(Text, cells))
    console.print(table)
