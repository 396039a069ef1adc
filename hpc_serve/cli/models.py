"""`models`: the catalogue, as a list."""

from __future__ import annotations

import os

import click


@click.command("models")
@click.argument("word", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def models_command(word: str | None, as_json: bool) -> None:
    """List the site's own models and those of the catalogue, or those whose name holds WORD.

    Any Hugging Face id or folder works as well: `--model` takes it as it is.
    """
    from hpc_serve.cli import show
    from hpc_serve.cli.tables import print_models
    from hpc_serve.plan import catalog
    from hpc_serve.submit.site_files import read_site
    from hpc_serve.submit.site_models import load_site_models

    own = [
        entry
        for entry in load_site_models(read_site(os.environ).models).values()
        if word is None or any(word.lower() in name.lower() for name in (entry.name, entry.model))
    ]
    found = [
        entry
        for entry in catalog.models().values()
        if word is None or any(word.lower() in name.lower() for name in (entry.name, *entry.aliases))
    ]
    if as_json:
        keys = ("name", "aliases", "published_parameters", "note")
        of_site = [{**dict.fromkeys(keys), "name": one.model, "aliases": [one.name], "note": one.note} for one in own]
        show.print_json([*of_site, *({key: getattr(entry, key) for key in keys} for entry in found)])
        return
    if not found and not own:
        raise click.ClickException(f"No model of the catalogue has {word!r} in its name; `hpc-serve models` lists all.")
    print_models(own, found)
