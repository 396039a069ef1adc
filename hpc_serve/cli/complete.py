"""`completion`, and the names that a shell completes: services of this home, models of site and catalogue.

A shell waits for the answer at each press of Tab. Therefore nothing is asked for over the network, and a filesystem
that hangs gives no names.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem, get_completion_class

from hpc_serve.errors import HpcServeError

if TYPE_CHECKING:
    from hpc_serve.rendezvous.store import ServiceStore

_PROGRAM, _VARIABLE = "hpc-serve", "_HPC_SERVE_COMPLETE"
_LIST_S = 1.0


def service_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The services that have a folder here."""
    from hpc_serve.rendezvous.store import own_store

    return _items(_listed(lambda: own_store().services()), incomplete)


def live_service_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The services that have a job which is not over, by what is written of them."""
    from hpc_serve.rendezvous.store import own_store

    return _items(_listed(lambda: live_services(own_store())), incomplete)


def live_services(store: ServiceStore) -> tuple[str, ...]:
    """The services of a store that have a job which waits, or a record that is renewed. Raises StoreError."""
    from hpc_serve.rendezvous.store import ABANDONED_AFTER_S

    def is_live(service: str) -> bool:
        found, oldest = store.read(service), time.time() - ABANDONED_AFTER_S
        renewed = any(not record.is_final and record.updated_at > oldest for record in found.records)
        return renewed or bool(found.awaiting_record())

    return tuple(filter(is_live, store.services()))


def gpu_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The accelerators; after a colon the slices of one."""
    from hpc_serve.plan.catalog import accelerator_entries

    entries = accelerator_entries()
    slices = [f"{name}:{part}" for name, entry in entries.items() for part in entry.get("slices") or ()]
    return _items(slices if ":" in incomplete else entries, incomplete)


def model_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The site's own models and short names of the catalogue; once there is a slash, repositories and folders."""
    from hpc_serve.plan.catalog import models

    names = {name for entry in models().values() for name in (entry.name, *entry.aliases)}
    names |= set(_listed(_site_model_names))
    short = [name for name in sorted(names) if "/" in incomplete or "/" not in name]
    return _items(short, incomplete) or [CompletionItem(incomplete, type="file")]


def _items(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def _site_model_names() -> Iterable[str]:
    from hpc_serve.submit.site.site_files import load_site_models, read_site

    return [entry.name for entry in load_site_models(read_site(os.environ).models).values()]


def _listed(read: Callable[[], Iterable[str]]) -> list[str]:
    """The names that are read from files; none where that fails, or takes too long."""
    from concurrent.futures import TimeoutError

    from hpc_serve.background import in_background

    with contextlib.suppress(HpcServeError, TimeoutError):
        return list(in_background(read).result(_LIST_S))
    return []


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print what makes a shell complete commands, options, services and models.

    eval "$(hpc-serve completion bash)"

    bash: eval "$(hpc-serve completion bash)" in ~/.bashrc; zsh: the same with zsh in ~/.zshrc; fish: hpc-serve
    completion fish > ~/.config/fish/completions/hpc-serve.fish
    """
    from hpc_serve.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, _PROGRAM, _VARIABLE).source())
