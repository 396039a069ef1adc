"""`status --watch`: the table of services, drawn again while it changes; plain lines where there is no terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from time import sleep, strftime

import click
from rich.console import Console
from rich.live import Live

from hpc_serve.cli.console import PlainConsole
from hpc_serve.cli.services.stages import stage_line
from hpc_serve.cli.show import recent, status_table
from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.slurm.scheduler import SchedulerView
from hpc_serve.submit.status.job_status import CoarseChanges
from hpc_serve.submit.status.status_reader import find, read_any_status

_INTERVAL_S = 2.0
_SCHEDULER_S = 5.0  # a controller serves a whole site: it is asked less often than our own files are read

Replicas = Sequence[ReplicaStatus]


def watch_status(store: ServiceStore, target: str | None) -> None:
    """Show the recent replicas of all, of a service or of a job, until Ctrl-C.

    Raises ServiceNotFoundError, StoreError.
    """
    slurm = SchedulerView(max_age_s=_SCHEDULER_S)
    service = None
    if target is not None:
        service = find(store, target)[0].service

    def look() -> Replicas:
        replicas = read_any_status(store, service, slurm=slurm).everywhere
        return recent(one for one in replicas if target in (None, one.service, one.job_id, one.name))

    console = PlainConsole()
    if console.is_terminal:
        _draw(console, look)
    else:
        _print_changes(look)


def _draw(console: Console, look: Callable[[], Replicas]) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            replicas = look()
            shown = status_table(replicas, width=console.width) if replicas else "No services."
            live.update(shown, refresh=True)
            sleep(_INTERVAL_S)


def _print_changes(look: Callable[[], Replicas]) -> None:
    changes: defaultdict[str, CoarseChanges] = defaultdict(CoarseChanges)
    while True:
        for status in look():
            if changes[f"{status.service} {status.name}"].is_one(status):
                words = stage_line(status)
                click.echo(f"{strftime('%H:%M:%S')} {status.service} {status.name} {words}")
        sleep(_INTERVAL_S)
