"""`models`: the catalogue, as a list."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from hpc_serve.errors import HpcServeError
from hpc_serve.plan.hardware.cluster import DEFAULT_GPU

if TYPE_CHECKING:
    from hpc_serve.submit.site.site import SiteProfile


@click.command("models")
@click.argument("word", required=False)
@click.option("--fits", is_flag=True, help="Only models that fit one node of the site's GPUs, with their layout.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def models_command(word: str | None, fits: bool, as_json: bool) -> None:
    """List the site's own models and the models of the catalogue; with WORD, only names that hold it.

    hpc-serve models --fits

    `--model` takes any Hugging Face id or folder as well.
    """
    from hpc_serve.cli import show
    from hpc_serve.cli.tables import print_models
    from hpc_serve.plan import catalog
    from hpc_serve.submit.site.site_files import read_site
    from hpc_serve.submit.site.site_models import load_site_models

    site = read_site(os.environ)
    own = [
        entry
        for entry in load_site_models(site.models).values()
        if word is None or any(word.lower() in name.lower() for name in (entry.name, entry.model))
    ]
    found = [
        entry
        for entry in catalog.models().values()
        if word is None or any(word.lower() in name.lower() for name in (entry.name, *entry.aliases))
    ]
    layouts = {
        name: _layout_on(site, name) for name in [*(one.model for one in own), *(one.name for one in found)] if fits
    }
    if fits:
        own = [one for one in own if layouts[one.model]]
        found = [one for one in found if layouts[one.name]]
    if as_json:
        keys = ("name", "aliases", "published_parameters", "min_vllm", "note")
        of_site = [{**dict.fromkeys(keys), "name": one.model, "aliases": [one.name], "note": one.note} for one in own]
        listed = [*of_site, *({key: getattr(entry, key) for key in keys} for entry in found)]
        show.print_json([{**one, **({"layout": layouts[one["name"]]} if fits else {})} for one in listed])
        return
    if fits and not found and not own:
        raise click.ClickException(f"No model fits one node of {site.gpu or DEFAULT_GPU}.")
    if not found and not own:
        raise click.ClickException(f"No model of the catalogue has {word!r} in its name; `hpc-serve models` lists all.")
    print_models(own, found, layouts)
    if fits:
        assumed = "" if site.gpu else "; no site file names a GPU, so it is assumed"
        click.echo(f"LAYOUT is of one node of {site.gpu or DEFAULT_GPU}, with the model's longest context{assumed}.")


def _layout_on(site: SiteProfile, model: str) -> str | None:
    """Return the layout of a model on one node of the site's GPUs, in words; None if the model does not fit."""
    from hpc_serve.plan.asked import PlanRequest
    from hpc_serve.submit.plans.planning import plan_for

    try:
        asked = PlanRequest(
            model=model,
            gpu=site.gpu or DEFAULT_GPU,
            gpu_memory_bytes=site.gpu_memory_bytes,
            num_nodes=1,
            gpus_per_node=site.gpus_per_node,
        )
        plan = plan_for(asked).plan
    except HpcServeError:
        return None
    return plan.layout.sizes() if plan else None
