"""`targets`: the replicas for Prometheus, how it asks them, and a dashboard for Grafana."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import click

from hpc_serve.cli.commands import FILE, print_json
from hpc_serve.cli.complete import live_service_names, live_services
from hpc_serve.errors import HpcServeError
from hpc_serve.printable import printable
from hpc_serve.rendezvous.fields import validate_service_name
from hpc_serve.rendezvous.store import ServiceStore, own_store

_EVERY_S = 10.0
_pause = time.sleep


@click.command("targets")
@click.argument("services", metavar="[SERVICE]...", nargs=-1, shell_complete=live_service_names)
@click.option("--output", "-o", type=FILE, help="Write them to this file.")
@click.option("--watch", is_flag=True, help="Go on, and write the file again whenever replicas come or go.")
@click.option("--scrape-config", is_flag=True, help="Print the part of prometheus.yml that reads that file.")
@click.option("--dashboard", is_flag=True, help="Print a dashboard of these metrics for Grafana.")
def targets_command(
    services: Sequence[str], output: Path | None, watch: bool, scrape_config: bool, dashboard: bool
) -> None:
    """Print all replicas as targets for Prometheus (file_sd), with labels: service, slurm_job, replica, node, model.

    hpc-serve targets --output targets.json --watch

    The file holds no secret. Prometheus sends each service's key to replicas of that service alone: it reads the key
    from its file, so it has to run as you.
    """
    if dashboard:
        from hpc_serve.vllm.arguments import load_data

        print_json(load_data("grafana.json"))
        return
    if output is None and (watch or scrape_config):
        raise click.UsageError(f"--output FILE: {'--watch' if watch else '--scrape-config'} needs the file's name.")
    store = own_store()
    services = [validate_service_name(name) for name in services]
    if scrape_config:
        assert output is not None
        click.echo(_scrape_config(store, services, output.absolute()), nl=False)
        return
    written = _write(store, services, output, None)
    while watch:
        _pause(_EVERY_S)
        try:
            written = _write(store, services, output, written)
        except HpcServeError as error:  # the file stays as it is: a filesystem that hangs ends no replica
            click.echo(f"warning: {error}", err=True)


def _write(store: ServiceStore, services: Sequence[str], output: Path | None, written: str | None) -> str:
    """Write the targets if they are others than those `written`; returns them."""
    from hpc_serve.client.discovery.discovery import discover_services
    from hpc_serve.client.engine_work import target_groups
    from hpc_serve.rendezvous.files import write_private

    found = [one for one in discover_services(store) if not services or one.service in services]
    groups, problems = target_groups(replica for one in found for replica in one.replicas)
    problems += [problem for one in found for problem in one.problems]
    problems += [f"there is no service {name}" for name in services if name not in {one.service for one in found}]
    text = json.dumps(groups, indent=2, ensure_ascii=False) + "\n"
    if text == written:
        return text
    for problem in problems:
        click.echo(f"warning: {printable(problem)}", err=True)
    if output is None:
        click.echo(text, nl=False)
    else:
        if not output.absolute().parent.is_dir():
            raise click.UsageError(f"--output {output}: there is no folder {output.absolute().parent}.")
        write_private(output, text)
        click.echo(f"{len(groups)} targets in {output}", err=True)
    return text


def _scrape_config(store: ServiceStore, services: Sequence[str], output: Path) -> str:
    from hpc_serve.client.engine_work import scrape_config
    from hpc_serve.trust.certificates import authority_alone

    names = services or live_services(store)
    if not names:
        raise click.UsageError("No service waits or runs: submit one, or name it.")
    keys = [(name, store.api_key_path(name).absolute()) for name in names]
    return scrape_config(keys, targets_file=output, authority_file=authority_alone(store.home))
