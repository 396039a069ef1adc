"""`forget`: takes what is over out of `status`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from hpc_serve.cli.complete import service_names
from hpc_serve.rendezvous.store import own_store

if TYPE_CHECKING:
    from hpc_serve.client.replicas.status import ReplicaStatus


@click.command("forget")
@click.argument("targets", metavar="[SERVICE|JOB]...", nargs=-1, shell_complete=service_names)
@click.option("--ended", is_flag=True, help="Everything that is over, of all services.")
def forget_command(targets: Sequence[str], ended: bool) -> None:
    """Remove what is written about jobs that are over, so that `status` no longer shows them. Logs stay.

    hpc-serve forget --ended

    All jobs of a SERVICE that are over are forgotten. Jobs that wait, start or serve stay. `status` shows a job for a
    day after its end, `status --all` for a week.
    """
    from hpc_serve.submit.services.forget import forget
    from hpc_serve.submit.status.status_reader import find_report, read_status, replicas_here

    if bool(targets) == ended:
        raise click.UsageError("Name services or jobs, or write --ended alone.")
    store = own_store()
    found = list(read_status(store).everywhere) if ended else []
    for target in targets:
        named = replicas_here(store, find_report(store, target))
        found += named if any(status.service != target for status in named) else _over(named)
    gone = forget(store, _over(found) if ended else found)
    click.echo(f"Forgotten: {', '.join(gone)}." if gone else "There is nothing to forget.")


def _over(found: Sequence[ReplicaStatus]) -> list[ReplicaStatus]:
    return [status for status in found if status.is_over]
