"""`adapter`: the LoRA adapters of a service."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hpc_serve.cli.commands import print_json
from hpc_serve.cli.complete import service_names
from hpc_serve.printable import printable
from hpc_serve.rendezvous.store import ServiceStore, own_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_serve.submit.services.adapters import Told


@click.command("adapter")
@click.argument("action", type=click.Choice(("add", "list", "remove")))
@click.argument("service", shell_complete=service_names)
@click.argument("name", required=False)
@click.argument("source", metavar="[FOLDER|REPOSITORY]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def adapter_command(action: str, service: str, name: str | None, source: str | None, as_json: bool) -> None:
    """Add LoRA adapters to a service while it serves, list them, or remove one.

    hpc-serve adapter add 8b sql /scratch/me/sql-lora

    All replicas load it, or none. Requests ask for it by NAME as their model. It stays with the service: a replica that
    is added, woken or started again loads it before it is ready. `submit --lora NAME=FOLDER` starts a service with
    adapters, and `submit … -- --enable-lora --max-lora-rank N` one with room for them.
    """
    from hpc_serve.submit.services.adapters import add_adapter, remove_adapter

    if (name is None) != (action == "list") or (source is None) != (action != "add"):
        raise click.UsageError("write add SERVICE NAME FOLDER, remove SERVICE NAME, or list SERVICE.")
    store = own_store()
    if name is None:
        _list(store, service, as_json=as_json)
        return
    told = add_adapter(store, service, name, str(source)) if action == "add" else remove_adapter(store, service, name)
    if as_json:
        print_json({"adapter": name, "replicas": told.done, "coming": told.coming, "note": told.note or None})
    else:
        click.echo(_words(told, name, is_added=action == "add"))


def _words(told: Told, name: str, *, is_added: bool) -> str:
    has, loaded = "has" if len(told.done) == 1 else "have", "loaded" if is_added else "unloaded"
    lines = [f"{_replicas(told.done)} {has} {loaded} {name}."]
    if told.coming and is_added:
        lines.append(f"{_replicas(told.coming)} will before serving.")
    lines += [f"note: {printable(told.note)}"] if told.note else []
    lines += [f"Ask for it as the model {name!r}."] if is_added and told.done else []
    return "\n".join(lines)


def _replicas(names: Sequence[str]) -> str:
    count = "1 replica" if len(names) == 1 else f"{len(names)} replicas"
    return f"{count} ({', '.join(names)})" if names else count


def _list(store: ServiceStore, service: str, *, as_json: bool) -> None:
    import time
    from dataclasses import asdict

    from rich.text import Text

    from hpc_serve.cli.console import PlainConsole, plain_table
    from hpc_serve.submit.services.adapters import list_adapters

    listed = list_adapters(store, service)
    if as_json:
        print_json([asdict(one) for one in listed])
        return
    if not listed:
        click.echo(f"{service} has no adapters. To add one: hpc-serve adapter add {service} NAME FOLDER")
        return
    table = plain_table("NAME", "ADDED", "LOADED BY", "FOLDER", folded=("NAME", "LOADED BY", "FOLDER"))
    for one in listed:
        added = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.added_at))
        table.add_row(*map(Text, (one.name, added, ", ".join(one.loaded) or "-", printable(one.path))))
    PlainConsole().print(table)
    for one in listed:
        for replica, fault in one.faults.items():
            click.echo(f"{replica} has not loaded {one.name}: {printable(fault)}")
