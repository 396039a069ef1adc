"""`doctor`: what is wrong with a service or a job, in a sentence, with the cure and the lines that tell it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import click

from hpc_serve.cli.commands import FILE, print_json
from hpc_serve.cli.complete import service_names
from hpc_serve.errors import ServiceFailedError
from hpc_serve.printable import printable
from hpc_serve.rendezvous.store import own_store


class DoctorCommand(click.Command):
    """The command `doctor`; after --preflight it takes the options of `submit` instead."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        own = args[: args.index("--")] if "--" in args else args
        if "--preflight" not in own:
            return super().make_context(info_name, args, parent, **extra)
        from hpc_serve.cli.doctor.preflight import preflight_command

        args.remove("--preflight")
        return preflight_command.make_context(f"{info_name} --preflight", args, parent, **extra)


@click.command("doctor", cls=DoctorCommand)
@click.argument("target", metavar="SERVICE|JOB", shell_complete=service_names)
@click.option(
    "--bundle",
    type=FILE,
    metavar="FILE.tar.gz",
    help="Also write one file for a bug report, without keys, tokens and certificates.",
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.option(
    "--preflight",
    is_flag=True,
    expose_value=False,
    help="Look at the nodes that a service would get, in a short job: doctor --preflight MODEL, with submit's options.",
)
def doctor_command(target: str, bundle: Path | None, as_json: bool) -> None:
    """Say why a service or a job failed, and what to do about it.

    hpc-serve doctor 405b

    The logs of all its nodes and Slurm's words are read. If a service has several jobs, the one in trouble is meant,
    else the latest. Exit code 0 if nothing is wrong, 6 if something is.
    """
    from hpc_serve.cli import show
    from hpc_serve.submit.diagnosis import choose_replica, diagnose_replica, with_batch_log
    from hpc_serve.submit.plans.preflight import report_of
    from hpc_serve.submit.status.status_reader import find

    store = own_store()
    found = find(store, target)
    status = with_batch_log(choose_replica(found))
    diagnosis = diagnose_replica(status)
    preflight = report_of(store, status)
    warnings = preflight.of_level("warning") if preflight is not None else ()
    if bundle is not None:
        from hpc_serve.submit.diagnosis import write_bundle

        names = write_bundle(bundle, diagnosis, show.status_json(status), store, os.environ)
        click.echo(f"Wrote {bundle}: {', '.join(names)}. Look through it before you send it.", err=True)
    if as_json:
        about = {"service": status.service, "job": status.name, "state": status.state, "reason": status.reason}
        findings = [dataclasses.asdict(finding) for finding in diagnosis.findings]
        print_json({**about, "findings": findings, "logs": [str(path) for path in diagnosis.logs]})
    else:
        others = [one.name for one in found if one.name != status.name]
        click.echo(printable(f"{status.service} (job {status.name}) {status.sentence}"))
        if not diagnosis.findings:
            click.echo("Nothing is wrong that its logs or Slurm tell of.")
        click.echo(printable(diagnosis.report))
        for verdict in warnings:
            click.echo(printable(f"Warned before the start: {verdict.sentence}"))
        if others:
            click.echo(f"Other jobs of it: {', '.join(others[-5:])}: hpc-serve doctor JOB")
    if diagnosis.findings:
        raise click.exceptions.Exit(ServiceFailedError.exit_code)
