"""`scale`, `wake`, `stop`, `forget` and `adapter`: the commands that change services, or their LoRA adapters.

`submit/services/` decides what follows; here it is told to a person, or printed as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from hpc_serve.cli.commands import REPLICAS, SECONDS, end_as_by_ctrl_c, print_json
from hpc_serve.cli.complete import service_names
from hpc_serve.errors import RendezvousError
from hpc_serve.printable import printable
from hpc_serve.rendezvous.store import ServiceStore, own_store
from hpc_serve.submit.request.bounds import shown_counts
from hpc_serve.units import number_of

if TYPE_CHECKING:
    from hpc_serve.client.replicas.status import ReplicaStatus
    from hpc_serve.submit.services.adapters import Told


@click.command("adapter")
@click.argument("action", type=click.Choice(("add", "list", "remove")))
@click.argument("service", shell_complete=service_names)
@click.argument("name", required=False)
@click.argument("source", metavar="[FOLDER|REPOSITORY]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def adapter_command(action: str, service: str, name: str | None, source: str | None, as_json: bool) -> None:
    """Add LoRA adapters to a service while it serves, list them, or remove one.

    hpc-serve adapter add 8b sql /scratch/me/sql-lora

    All replicas load it, or none. Requests ask for it by NAME as their model. It stays with the service: a replica that
    is added, woken or started again loads it before it is ready. `submit --lora NAME=FOLDER` starts a service with
    adapters, and `submit … -- --enable-lora --max-lora-rank N` one with room for them.
    """
    from hpc_serve.submit.services.adapters import add_adapter, remove_adapter

    if (name is None) != (action == "list") or (source is None) != (action != "add"):
        raise click.UsageError("write add SERVICE NAME FOLDER, remove SERVICE NAME, or list SERVICE.")
    store = own_store()
    if name is None:
        _list(store, service, as_json=as_json)
        return
    told = add_adapter(store, service, name, str(source)) if action == "add" else remove_adapter(store, service, name)
    if as_json:
        print_json({"adapter": name, "replicas": told.done, "coming": told.coming, "note": told.note or None})
    else:
        click.echo(_words(told, name, is_added=action == "add"))


def _words(told: Told, name: str, *, is_added: bool) -> str:
    has, loaded = "has" if len(told.done) == 1 else "have", "loaded" if is_added else "unloaded"
    lines = [f"{_replicas(told.done)} {has} {loaded} {name}."]
    if told.coming and is_added:
        lines.append(f"{_replicas(told.coming)} will before serving.")
    lines += [f"note: {printable(told.note)}"] if told.note else []
    lines += [f"Ask for it as the model {name!r}."] if is_added and told.done else []
    return "\n".join(lines)


def _replicas(names: Sequence[str]) -> str:
    count = number_of(len(names), "replica")
    return f"{count} ({', '.join(names)})" if names else count


def _list(store: ServiceStore, service: str, *, as_json: bool) -> None:
    import time
    from dataclasses import asdict

    from hpc_serve.cli.console import print_table
    from hpc_serve.submit.services.adapters import list_adapters

    listed = list_adapters(store, service)
    if as_json:
        print_json([asdict(one) for one in listed])
        return
    if not listed:
        click.echo(f"{service} has no adapters. To add one: hpc-serve adapter add {service} NAME FOLDER")
        return
    rows = []
    for one in listed:
        added = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.added_at))
        loaded, folder = ", ".join(one.loaded) or "-", printable(one.path)
        rows.append({"NAME": one.name, "ADDED": added, "LOADED BY": loaded, "FOLDER": folder})
    print_table(rows, folded=("NAME", "LOADED BY", "FOLDER"))
    for one in listed:
        for replica, fault in one.faults.items():
            click.echo(f"{replica} has not loaded {one.name}: {printable(fault)}")


_DRAIN = click.option(
    "--drain", type=SECONDS, default=120.0, help="How long the requests under way may take [default: 120]."
)
_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")


@click.command("stop")
@click.argument("targets", metavar="[SERVICE|JOB]...", nargs=-1, shell_complete=service_names)
@click.option(
    "--replica",
    "replicas",
    metavar="JOB[_TASK][-K]",
    multiple=True,
    help="End this replica alone, of the services named; K is its number in a job of several.",
)
@click.option("--now", is_flag=True, help="Do not wait for the requests under way.")
@_DRAIN
@click.option("--timeout", type=SECONDS, default=120.0, help="How long to wait for the end after that [default: 120].")
@_AS_JSON
def stop_command(
    targets: Sequence[str], replicas: Sequence[str], now: bool, drain: float, timeout: float, as_json: bool
) -> None:
    """End services, or single jobs, and wait until they have ended.

    hpc-serve stop 405b

    A ready service takes no new requests, finishes the requests under way, and ends. With --now it ends at once. To end
    a job of another HPC_SERVE_HOME, give its JOB and --now.
    """
    from hpc_serve.cli import show
    from hpc_serve.submit.services.want import end_what_comes, want_stop_of
    from hpc_serve.submit.status.status_reader import elsewhere_sentence

    if not targets and not replicas:
        raise click.UsageError("Name a service or a job, or --replica JOB.")
    store, ended, names = own_store(), [], targets or replicas
    for target in names[1:]:
        _named(store, target, replicas, now=now)  # a wrong name is refused before anything ends
    for target in names:
        found, foreign = _named(store, target, replicas, now=now)
        if not found:
            said = f"There is no record of job {target} in {store.home}: it is ended without a drain."
            click.echo(said, err=as_json)
            ended += _stop(store, foreign, timeout_s=timeout, drain_s=0.0, err=as_json)
            continue
        live = [status for status in found if not status.is_over]
        if not live:
            click.echo(f"{target} is not running.", err=as_json)
        try:
            want_stop_of(store, found)
        except RendezvousError as error:
            click.echo(f"{error} The jobs are ended all the same.", err=True)
        ended += _stop(store, found, timeout_s=timeout, drain_s=0.0 if now else drain, err=as_json)
        for service in dict.fromkeys(status.service for status in found):
            for job_id in end_what_comes(store, service):
                click.echo(f"{service} (job {job_id}), which was being submitted, is ended.", err=as_json)
        for status in foreign:
            click.echo(elsewhere_sentence(store, status), err=as_json)
    if as_json:
        print_json({"ended": [show.status_json(status) for status in ended]})


def _named(
    store: ServiceStore, target: str, replicas: Sequence[str], *, now: bool
) -> tuple[Sequence[ReplicaStatus], Sequence[ReplicaStatus]]:
    """Return the replicas to end that a name means, and its jobs of other homes. Only with `now` may it mean a job of
    another home alone. Raises HpcServeError and UsageError."""
    from hpc_serve.submit.status.status_reader import find_report, replicas_here

    report = find_report(store, target)
    foreign = report.live_elsewhere
    if now and foreign and all(status.service != target for status in foreign):
        return (), foreign
    named = replicas_here(store, report)
    found = [status for status in named if not replicas or {status.name, status.job_id} & set(replicas)]
    if not found:
        raise click.UsageError(f"{target} has no replica {', '.join(replicas)}: `hpc-serve status {target}`.")
    return found, foreign


def _stop(
    store: ServiceStore, found: Sequence[ReplicaStatus], *, timeout_s: float, drain_s: float, err: bool
) -> list[ReplicaStatus]:
    """End replicas and print so, on stderr if `err`; return the replicas that are over."""
    from hpc_serve.submit.services.stop import stop

    for status in found:
        if not status.is_over:
            click.echo(_stopping(status), err=err)
    ended = list(stop(store, found, timeout_s=timeout_s, drain_s=drain_s))
    for status in ended:
        click.echo(_is_over(status), err=err)
    return ended


def _stopping(status: ReplicaStatus) -> str:
    return f"Stopping {status.service} (job {status.name}), which is {status.state} ..."


def _is_over(status: ReplicaStatus) -> str:
    return f"{status.service} (job {status.name}) is over: {status.sentence}"


@click.command("scale")
@click.argument("service", shell_complete=service_names)
@click.argument("replicas", type=REPLICAS, metavar="N|MIN:MAX|NAME:N,…")
@_DRAIN
@_AS_JSON
def scale_command(service: str, replicas: tuple[int, int | None] | dict[str, int], drain: float, as_json: bool) -> None:
    """Bring a service to N replicas, or let its jobs decide between MIN and MAX.

    hpc-serve scale 405b 1:4

    New replicas are submitted with the script of the last submission. If there are too many, replicas in the queue end
    first, then replicas that start. A ready replica finishes its requests before it ends. MIN:MAX is for a service that
    was submitted with --replicas MIN:MAX or --idle-stop. h100:2,a100:0 is for a service on several kinds of machine;
    kinds that are not named stay as they are.
    """
    from hpc_serve.cli import show
    from hpc_serve.submit.services.want import scale, set_bounds
    from hpc_serve.submit.status.status_reader import find_report, replicas_here

    store = own_store()
    count, most = (replicas, None) if isinstance(replicas, dict) else replicas
    if most is not None and isinstance(count, int):
        replicas_here(store, find_report(store, service))
        wanted = set_bounds(store, service, count, most)
        rest = "" if wanted.state == "awake" else f" It is {wanted.state}; `hpc-serve wake {service}` starts it."
        click.echo(f"{service}: its jobs decide on {count} to {most} replicas from now on.{rest}", err=as_json)
        if as_json:
            print_json({"service": service, "least": count, "most": most})
        return
    end_as_by_ctrl_c()
    done = scale(
        store, service, count, drain_s=drain, on_stop=lambda status: click.echo(_stopping(status), err=as_json)
    )
    if as_json:
        added, ended = [job.job_id for job in done.added], [show.status_json(status) for status in done.ended]
        print_json({"service": service, "before": done.before, "replicas": count, "submitted": added, "ended": ended})
        return
    for job in done.added:
        click.echo(f"{service}: submitted as job {job.job_id}")
    for status in done.ended:
        click.echo(_is_over(status))
    total = count if isinstance(count, int) else sum(done.counts.values())
    change = "as before" if done.before == total else f"it had {done.before}"
    each = f" ({shown_counts(done.counts)})" if done.counts else ""
    click.echo(f"{service} has {number_of(total, 'replica')}{each}, {change}.")


@click.command("wake")
@click.argument("service", shell_complete=service_names)
@_AS_JSON
def wake_command(service: str, as_json: bool) -> None:
    """Bring back a service that is asleep (--idle-stop), or over: with the least number of replicas it may have.

    hpc-serve wake 405b

    They are submitted with the script of its last submission. Nothing is done while replicas wait, start or serve.
    """
    from hpc_serve.submit.services.want import wake

    end_as_by_ctrl_c()
    woken = wake(own_store(), service)
    submitted = [job.job_id for job in woken.jobs]
    if as_json:
        print_json({"service": service, "submitted": submitted, "note": woken.note or None})
        return
    for job_id in submitted:
        click.echo(f"{service}: submitted as job {job_id}")
    done = f"is woken; hpc-serve wait {service}" if submitted else f"needs no waking: {woken.note}."
    click.echo(f"{service} {done}")


@click.command("forget")
@click.argument("targets", metavar="[SERVICE|JOB]...", nargs=-1, shell_complete=service_names)
@click.option("--ended", is_flag=True, help="Everything that is over, of all services.")
def forget_command(targets: Sequence[str], ended: bool) -> None:
    """Remove what is written about jobs that are over, so that `status` no longer shows them. Logs stay.

    hpc-serve forget --ended

    All jobs of a SERVICE that are over are forgotten. Jobs that wait, start or serve stay. `status` shows a job for a
    day after its end, `status --all` for a week.
    """
    from hpc_serve.submit.services.stop import forget
    from hpc_serve.submit.status.status_reader import find_report, read_status, replicas_here

    if bool(targets) == ended:
        raise click.UsageError("Name services or jobs, or write --ended alone.")
    store = own_store()
    found = list(read_status(store).everywhere) if ended else []
    for target in targets:
        named = replicas_here(store, find_report(store, target))
        found += named if any(status.service != target for status in named) else _over(named)
    gone = forget(store, _over(found) if ended else found)
    click.echo(f"Forgotten: {', '.join(gone)}." if gone else "There is nothing to forget: no job is over.")


def _over(found: Sequence[ReplicaStatus]) -> list[ReplicaStatus]:
    return [status for status in found if status.is_over]
