"""`models` and `gpus`: the models and the accelerators that a command can name, as lists.

`models` lists the site's own models and those of the catalogue. `gpus` lists what `--gpu` and the site file's `gpu` can
name; the site's own accelerator is marked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from hpc_serve.cli.commands import print_json, with_plain_sizes
from hpc_serve.cli.submit.request import machine_options, machines_of
from hpc_serve.errors import HpcServeError
from hpc_serve.plan import catalog
from hpc_serve.plan.hardware import DEFAULT_GPU, accelerator_of, cluster_named
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.units import GIB

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
    from hpc_serve.cli.console import print_table

    rows = []
    for entry in entries:
        memory = f"{entry['memory_bytes'] / GIB:.1f} GiB" if entry["memory_bytes"] else "--gpu-memory"
        aliases = f" ({', '.join(entry['aliases'])})" if entry["aliases"] else ""
        product = f"{entry['product']}{aliases}{'; plan alone' if entry['no_script_reason'] else ''}"
        name = f"{'* ' if entry['is_own'] else '  '}{entry['name']}"
        cells = {"NAME": name, "MEMORY": memory, "PER NODE": str(entry["per_node"]), "ENGINE": entry["engine"]}
        rows.append({**cells, "IS": product})
    print_table(rows, right=("MEMORY", "PER NODE"), folded=("IS",), if_wide="IS")


_Entry = dict[str, Any]

_KEYS = ("name", "aliases", "published_parameters", "min_vllm", "note")


@click.command("models")
@click.argument("word", required=False)
@click.option("--fits", is_flag=True, help="Only models that fit one node, with their layout.")
@machine_options
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def models_command(word: str | None, fits: bool, as_json: bool, **options: Any) -> None:
    """List the site's own models and the models of the catalogue; with WORD, only names that hold it.

    hpc-serve models --fits --gpu l4

    `--model` takes any Hugging Face id or folder as well. An option that says what a node has means --fits.
    """
    from hpc_serve.submit.site.site_files import load_site_models, read_site

    def is_meant(entry: Mapping[str, Any]) -> bool:
        return word is None or any(word.lower() in name.lower() for name in (entry["name"], *entry["aliases"]))

    site, none = read_site(os.environ), dict.fromkeys(_KEYS)
    of_site = load_site_models(site.models).values()
    own: list[_Entry] = [{**none, "name": one.model, "aliases": [one.name], "note": one.note} for one in of_site]
    known: list[_Entry] = [{key: getattr(entry, key) for key in _KEYS} for entry in catalog.models().values()]
    own, known = list(filter(is_meant, own)), list(filter(is_meant, known))
    is_known = bool(own or known)
    fits = fits or any(value is not None for value in options.values())
    if fits:
        machines = machines_of({"num_nodes": None, **options}, site)
        gpu, memory, per_node = (machines[name] for name in ("gpu", "gpu_memory_bytes", "gpus_per_node"))
        is_whole = cluster_named(gpu, total_bytes=memory, gpus_per_node=per_node).is_whole
        where = gpu if is_whole else f"one node of {gpu}"
        machines["num_nodes"] = None if is_whole else 1
        words = {one.name: with_plain_sizes(one.vllm_args) for one in of_site}
        own = [one for one in own if _note_layout(machines, one, words[one["aliases"][0]])]
        known = [one for one in known if _note_layout(machines, one)]
    if as_json:
        print_json([*own, *known])
    elif own or known:
        _print_models(own, known)
        if fits:
            assumed = "" if options["gpu"] or site.gpu else "; no GPU is named, so it is assumed: write --gpu NAME"
            own_args = "; of a site's model, with its vllm_args" if own else ""
            click.echo(f"LAYOUT is of {where}, with the model's longest context{own_args}{assumed}.")
    elif is_known:
        raise click.ClickException(f"No model fits {where}.")
    else:
        raise click.ClickException(f"No model has {word!r} in its name; `hpc-serve models` lists all.")


def _print_models(own: Sequence[_Entry], known: Sequence[_Entry]) -> None:
    """Print the site's own models, then the catalogue's; those with a short name first."""
    from hpc_serve.cli.console import print_table

    named = [
        (f"{one['aliases'][0]} (site)", f"{one['name']} ({one['note']})" if one["note"] else one["name"], one)
        for one in own
    ]
    short = [(" ".join(alias for alias in one["aliases"] if "/" not in alias), one["name"], one) for one in known]
    rows = []
    for name, model, one in (*named, *sorted(short, key=lambda row: not row[0])):
        size = f"{one['published_parameters'] / 1e9:,.1f} B" if one["published_parameters"] else ""
        layout = {"LAYOUT": one["layout"]} if "layout" in one else {}
        rows.append({"NAME": name, "MODEL": model, "PARAMETERS": size, **layout})
    print_table(rows, right=("PARAMETERS",), folded=("MODEL",), if_wide="PARAMETERS")


def _note_layout(machines: Mapping[str, Any], entry: _Entry, words: tuple[str, ...] = ()) -> bool:
    """Put the layout of a model on these machines beside it; False if the model does not fit.

    `words` are the options of the engine.
    """
    from hpc_serve.submit.plans.planning import asked_plan, plan_for

    try:
        request = ServeRequest(model=entry["name"], service="none", engine_args=words, **machines)
        plan = plan_for(asked_plan(request)).plan
    except HpcServeError:
        return False
    if plan is not None:
        entry["layout"] = plan.layout.sizes()
    return plan is not None
