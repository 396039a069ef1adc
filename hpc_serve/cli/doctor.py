"""`doctor`: what is wrong with a service or a job, in a sentence, with the cure and the lines that tell it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_serve.cli.complete import service_names
from hpc_serve.errors import ServiceFailedError
from hpc_serve.printable import printable
from hpc_serve.rendezvous.store import ServiceStore, default_home

if TYPE_CHECKING:
    from hpc_serve.submit.diagnosis import Diagnosis


@click.command("doctor")
@click.argument("target", metavar="SERVICE|JOB", shell_complete=service_names)
@click.option(
    "--bundle",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.tar.gz",
    help="Also write one file for a bug report, without keys, tokens and certificates.",
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def doctor_command(target: str, bundle: Path | None, as_json: bool) -> None:
    """Say why a service or a job failed, and what to do about it.

    The logs of all its nodes and Slurm's words are read. Of a service with several jobs, the one in trouble is meant,
    else the latest. Exit code 0 if nothing is wrong, 6 if something is.
    """
    from hpc_serve.cli import show
    from hpc_serve.submit.diagnosis import choose_replica, diagnose_replica
    from hpc_serve.submit.status_reader import find

    store = ServiceStore(default_home(os.environ))
    found = find(store, target)
    status = choose_replica(found)
    diagnosis = diagnose_replica(status)
    if bundle is not None:
        from hpc_serve.submit.bug_report import write_bundle

        names = write_bundle(bundle, diagnosis, show.status_json(status), store, os.environ)
        click.echo(f"Wrote {bundle}: {', '.join(names)}. Look through it before you send it.", err=True)
    if as_json:
        show.print_json(_as_json(diagnosis))
    else:
        others = [one.name for one in found if one.name != status.name]
        click.echo(printable(f"{status.service} (job {status.name}) {status.sentence}"))
        if not diagnosis.findings:
            click.echo("Nothing is wrong that its logs or Slurm tell of.")
        click.echo(printable(diagnosis.report))
        if others:
            click.echo(f"Other jobs of it: {', '.join(others[-5:])}: hpc-serve doctor JOB")
    if diagnosis.findings:
        raise click.exceptions.Exit(ServiceFailedError.exit_code)


def _as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    status = diagnosis.status
    return {
        "service": status.service,
        "job": status.name,
        "state": status.state,
        "reason": status.reason,
        "findings": [dataclasses.asdict(finding) for finding in diagnosis.findings],
        "logs": [str(path) for path in diagnosis.logs],
    }
