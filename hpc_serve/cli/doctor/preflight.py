"""`doctor --preflight`: a short job that looks at the nodes and starts no engine, and the table of what it found."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import click
from rich.text import Text

from hpc_serve.cli.commands import SECONDS, CommandWithVllmOptions, print_json
from hpc_serve.cli.console import print_table
from hpc_serve.cli.submit.request import REQUEST_GROUPS, assumed_gpu_note, make_request, request_options
from hpc_serve.errors import HpcServeError, ServiceFailedError
from hpc_serve.printable import printable
from hpc_serve.rendezvous.store import PreflightReport, own_store

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "not checked": "dim"}


@click.command(
    "preflight",
    cls=CommandWithVllmOptions,
    groups=REQUEST_GROUPS,
    help="Look at the nodes that a service would get, in a short job that starts no engine: take the options of "
    "`submit`. Exit code 0 if an engine could start, 6 if not.",
)
@request_options
@click.option("--timeout", type=SECONDS, help="How long to wait for the job (600, 10m, 2h) [default: for ever].")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def preflight_command(timeout: float | None, as_json: bool, **options: Any) -> None:
    from hpc_serve.cli.services.stages import Stages
    from hpc_serve.submit.plans.preflight import preflight_request, report_of
    from hpc_serve.submit.services import services
    from hpc_serve.submit.services.wait import wait
    from hpc_serve.submit.status.status_reader import find

    request = preflight_request(make_request(options), time=options["time"])
    submission = services.submit(request)
    if note := assumed_gpu_note():
        click.echo(f"note: {note}", err=True)
    store = own_store()
    ended = ""
    try:
        with Stages(request.service) as stages:
            wait(store, request.service, job_id=submission.job_id, timeout_s=timeout, on_change=stages.show)
    except ServiceFailedError as error:  # it ends, as it shall, before it is ready
        ended = str(error)
    (status,) = find(store, submission.job_id)
    report = report_of(store, status)
    if report is None:
        raise ServiceFailedError(ended)
    if as_json:
        print_json({"job_id": submission.job_id, "service": request.service, **dataclasses.asdict(report)})
    else:
        print_report(report)
    if report.of_level("failed"):
        raise click.exceptions.Exit(ServiceFailedError.exit_code)
    with contextlib.suppress(HpcServeError):
        store.forget(request.service, {status.job_id})


def print_report(report: PreflightReport) -> None:
    """Print a table of all checks, then the cure for each check that did not pass."""
    rows: list[dict[str, str | Text]] = [
        {
            "CHECK": one.check,
            "RESULT": Text(one.level, style=_COLOURS[one.level]),
            "NODES": printable(one.where),
            "SEEN": printable(one.seen),
            "TIME": f"{one.took_s:.2f} s",
        }
        for one in report.verdicts
    ]
    print_table(rows, right=("TIME",), folded=("NODES", "SEEN"))
    for verdict in (*report.of_level("failed"), *report.of_level("warning")):
        click.echo(printable(f"{verdict.check}: {verdict.cure}"))
    click.echo(printable(report.summary))
