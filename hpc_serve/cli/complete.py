"""`completion`, and the names that a shell completes: services of this home, models of the catalogue.

A shell waits for the answer at each press of Tab. So records are not read, nothing is asked for over the network, and a
filesystem that hangs gives no names.
"""

from __future__ import annotations

import os
import threading

import click
from click.shell_completion import CompletionItem, get_completion_class

_PROGRAM, _VARIABLE = "hpc-serve", "_HPC_SERVE_COMPLETE"
_LIST_S = 1.0


def service_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The services that have a folder here."""
    from hpc_serve.errors import HpcServeError
    from hpc_serve.rendezvous.store import ServiceStore, default_home

    found: list[str] = []

    def look() -> None:
        try:
            found.extend(ServiceStore(default_home(os.environ)).services())
        except HpcServeError:
            return

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(_LIST_S)
    return [CompletionItem(name) for name in list(found) if name.startswith(incomplete)]


def model_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Short names of the catalogue; once there is a slash, repositories and folders."""
    from hpc_serve.plan.catalog import models

    names = {name for entry in models().values() for name in (entry.name, *entry.aliases)}
    items = [
        CompletionItem(name)
        for name in sorted(names)
        if name.startswith(incomplete) and ("/" in incomplete or "/" not in name)
    ]
    return items or [CompletionItem(incomplete, type="file")]


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print what makes a shell complete commands, options, services and models.

    bash: eval "$(hpc-serve completion bash)" in ~/.bashrc; zsh: the same with zsh in ~/.zshrc; fish: hpc-serve
    completion fish > ~/.config/fish/completions/hpc-serve.fish
    """
    from hpc_serve.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, _PROGRAM, _VARIABLE).source())
