"""`report`: one page of HTML about a service or a job, to look at and to pass on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_serve.cli.complete import service_names
from hpc_serve.rendezvous.store import ServiceStore, own_store

if TYPE_CHECKING:
    from hpc_serve.cli.doctor.report_page import ReplicaReport
    from hpc_serve.client.replicas.status import ReplicaStatus
    from hpc_serve.submit.logs.log_history import Reports

_MOST_REPLICAS = 16


@click.command("report")
@click.argument("target", metavar="SERVICE|JOB", shell_complete=service_names)
@click.option(
    "--output", "-o", metavar="FILE", help="Where to; - is stdout [default: hpc-serve-report-SERVICE|JOB.html]."
)
def report_command(target: str, output: str | None) -> None:
    """Write a page about a service or a job: plan, stages of the start, measured against predicted, figures over time.

    hpc-serve report 405b --output 405b.html

    One file of HTML without a script, which loads nothing. It shows a service's replicas that are not over, else the
    last. Look through it before you pass it on: it names addresses and folders, and quotes logs.
    """
    from hpc_serve.cli.doctor.report_page import report_page
    from hpc_serve.rendezvous.files import write_private

    store = own_store()
    page = report_page(f"hpc-serve: {target}", _reports(store, target), at=time.time())
    if output == "-":
        click.echo(page, nl=False)
        return
    path = Path(output or f"hpc-serve-report-{target}.html")
    if not path.absolute().parent.is_dir():
        raise click.UsageError(f"--output {path}: there is no folder {path.absolute().parent}.")
    write_private(path, page)
    click.echo(f"{path}: open it in a browser.")


def _reports(store: ServiceStore, target: str) -> list[ReplicaReport]:
    from hpc_serve.cli.doctor.report_page import ReplicaReport
    from hpc_serve.client.engine_work import look_for
    from hpc_serve.submit.diagnosis.diagnosis import diagnose_replica
    from hpc_serve.submit.status.status_reader import find

    found = find(store, target)
    live = [status for status in found if not status.is_over or status.service != target]
    shown = (live or list(found[-1:]))[-_MOST_REPLICAS:]
    jobs = {job.job_id: job for service in {one.service for one in shown} for job in store.read_submitted(service)}
    works = look_for(shown, store.read_api_key)
    return [
        ReplicaReport(
            status=status,
            work=work,
            reports=_engine_reports(status),
            diagnosis=diagnose_replica(status),
            engine_args=jobs[status.job_id].engine_args if status.job_id in jobs else (),
        )
        for status, work in zip(shown, works)
    ]


def _engine_reports(status: ReplicaStatus) -> Reports:
    from hpc_serve.submit.logs.log_history import read_reports

    near = status.updated_at or status.started_at or time.time()
    head = Path(status.log_dir) / f"{status.name}-node0.log"
    return read_reports(head, near=near) if status.log_dir else ()
