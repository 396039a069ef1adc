"""`status`, `wait` and `logs`: the commands that look at services."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_serve.cli.commands import SECONDS, print_json
from hpc_serve.cli.complete import service_names
from hpc_serve.printable import printable
from hpc_serve.redact import redact_lines
from hpc_serve.rendezvous.shares import named_service
from hpc_serve.rendezvous.store import own_store

if TYPE_CHECKING:
    from hpc_serve.client.replicas.status import ReplicaStatus
    from hpc_serve.submit.logs import LogWriter


@click.command("status")
@click.argument("service", metavar="[SERVICE|JOB]", required=False, shell_complete=service_names)
@click.option("--all", "everything", is_flag=True, help="Also show services that ended before the last day.")
@click.option("--watch", "-w", "watched", is_flag=True, help="Go on showing it, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def status_command(service: str | None, everything: bool, watched: bool, as_json: bool) -> None:
    """Show all services, or all about one, and what their engines do: tokens/s are those of one second.

    hpc-serve status 405b

    It shows services that are not over and the ends of the last day. If a SERVICE has neither, it shows its last end.

    States: pending (in the queue), starting, ready (it has just answered), unresponsive, draining (it takes no new
    requests), stopped, failed, unknown (neither the scheduler nor the engine answers, or the records of a running job
    are not in this HPC_SERVE_HOME).
    """
    from hpc_serve.cli import show
    from hpc_serve.cli.console import PlainConsole
    from hpc_serve.submit.status.status_reader import find, read_any_status

    store = own_store()
    if service is not None:
        store, service = named_service(service, store.home)
    if watched:
        if as_json or everything:
            raise click.UsageError("--watch shows a table for people, without old ends: leave out --json and --all.")
        from hpc_serve.cli.services.status_watch import watch_status

        watch_status(store, service)
        return
    report = read_any_status(store, service)
    shown = report.everywhere
    if service is not None and not shown:
        shown, everything = tuple(find(store, service)), True
    if not everything:
        shown = show.recent(shown) or (shown[-1:] if service is not None else ())
    report = replace(report, replicas=shown, elsewhere=())
    from hpc_serve.client.engine_work import look_for

    works = look_for(report.replicas, store.read_api_key)
    if as_json:
        print_json(show.report_json(report, works))
        return
    if service is not None:
        for status, work in zip(report.replicas, works):
            show.print_details(status, work)
    elif report.replicas:
        console = PlainConsole()
        console.print(show.status_table(report.replicas, works, width=console.width))
    else:
        click.echo("No services. Start one: hpc-serve submit --model 8b --wait")
    show.print_counts(report)
    for line in report.problems:
        click.echo(f"warning: {line}", err=True)


@click.command("wait")
@click.argument("target", metavar="SERVICE|JOB", shell_complete=service_names)
@click.option(
    "--replicas", type=click.IntRange(min=1), default=1, metavar="N", help="Wait for N replicas [default: 1]."
)
@click.option("--timeout", type=SECONDS, help="How long: seconds, or 10m, 2h [default: for ever].")
@click.option("--json", "as_json", is_flag=True, help="Print the ready service as JSON.")
def wait_command(target: str, replicas: int, timeout: float | None, as_json: bool) -> None:
    """Wait until a service, or a job of it, is ready, and show its stages.

    hpc-serve wait 405b --timeout 2h

    The exit code is 6 if the job ended first, and 7 if the time is over. Ctrl-C does not end the service.
    """
    from hpc_serve.cli import show
    from hpc_serve.cli.services.stages import follow_until_ready
    from hpc_serve.submit.status.status_reader import find

    store = own_store()
    service = target if target in store.services() else find(store, target)[0].service
    job_id = None if service == target else target
    status = follow_until_ready(service, job_id=job_id, replicas=replicas, timeout_s=timeout)
    if as_json:
        print_json(show.status_json(status))


@click.command("logs")
@click.argument("target", metavar="SERVICE|JOB", shell_complete=service_names)
@click.option("--follow", "-f", is_flag=True, help="Go on with new lines until the job is over.")
@click.option("--node", type=int, metavar="K", help="Only the launcher of the job's K-th node, from 0.")
@click.option("--tail", "lines", type=click.IntRange(min=0), default=100, help="Last lines of a file [default: 100].")
@click.option("--files", is_flag=True, help="Print the names of the files instead.")
@click.option(
    "--only",
    "writer",
    type=click.Choice(("script", "launcher", "engine", "ray")),
    help="The batch script's lines, the launchers', the engine's, or the ends of Ray's own logs.",
)
def logs_command(
    target: str, follow: bool, node: int | None, lines: int, files: bool, writer: LogWriter | None
) -> None:
    """Show what the batch script, and on each node the launcher and the engine, have written.

    hpc-serve logs 405b --follow

    Standard output and standard error are in one file, in their order. Ray's own logs are shown by --only ray.

    A service with several jobs shows the logs of one that is ready, else of one that runs, else of the last that ended.
    Name a JOB to see those of another.
    """
    from hpc_serve.submit import diagnosis, logs

    store = own_store()
    status, others = diagnosis.find_job(store, target, to_follow=follow)
    if others:
        click.echo(_which_is_shown(status, others), err=True)

    def find_files() -> list[Path]:
        return logs.files_of(status, writer, node)

    found = find_files()
    if not found and not follow:
        of_which = (f" by {writer}" if writer else "") + ("" if node is None else f" of node {node}")
        raise click.ClickException(
            f"{status.service} (job {status.name}, {status.sentence}) has no logs{of_which} that this host can see; "
            f"they would be {' and '.join(logs.places_of(status))}."
        )
    secrets = logs.known_secrets(status.service, store, os.environ)
    if files:
        click.echo("\n".join(map(str, found)))
    elif follow:
        new = logs.follow(find_files, first_lines=lines, is_over=diagnosis.end_of(store, status))
        _print_lines(((path, line) for path, line in new if logs.is_by(writer, line)), secrets)
    else:
        _print_lines(((path, line) for path in found for line in logs.tail_by(path, lines, writer)), secrets)


def _which_is_shown(status: ReplicaStatus, others: Sequence[ReplicaStatus]) -> str:
    latest = ", ".join(f"{one.name} ({one.state})" for one in list(reversed(others))[:3])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    shown = f"These are the logs of job {status.name}, which is {status.state}."
    return f"{shown} {status.service} also has {latest}{more}: hpc-serve logs JOB"


def _print_lines(found: Iterator[tuple[Path, str]], secrets: Sequence[str]) -> None:
    """Print lines without secrets, as `tail` does with several files: a heading whenever the file is another."""
    last: Path | None = None
    for path, lines in itertools.groupby(found, key=itemgetter(0)):
        click.echo(f"{'' if last is None else chr(10)}==> {path} <==")
        last = path
        for line in redact_lines((line for _, line in lines), secrets):
            click.echo(printable(line))
