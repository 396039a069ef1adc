"""`gateway` and `key`: one address for services, for any program that speaks HTTP, and the keys of persons there.

`gateway --on-demand FILE` reads here the list of models that are started when they are asked for. `hpc_serve.gateway`
decides how requests are answered.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from hpc_serve.cli.commands import FILE, PATH, SECONDS, SIZE, print_json
from hpc_serve.cli.complete import service_names
from hpc_serve.cli.submit.request import make_requests
from hpc_serve.cli.submit.submit import submit_command
from hpc_serve.errors import HpcServeError, SiteFileError
from hpc_serve.rendezvous.fields import host_and_port, validate_service_name

if TYPE_CHECKING:
    import socket

    from hpc_serve.gateway.listening import ListenAddress
    from hpc_serve.gateway.personal_keys import Person, Use
    from hpc_serve.gateway.settings import OnDemand
    from hpc_serve.gateway.sharing import Shared


# -- the keys of persons

_LIMIT = click.IntRange(1, 2**63 - 1)  # what a file of ours holds
_COUNTS = {
    **{"AT ONCE": "max_in_flight", "A DAY": "tokens_a_day", "REQUESTS": "requests"},
    **{"PROMPT": "prompt_tokens", "ANSWERS": "completion_tokens"},
}


@click.command("key")
@click.argument("action", type=click.Choice(("add", "list", "revoke")))
@click.argument("name", required=False)
@click.option("--max-in-flight", type=_LIMIT, metavar="N", help="With add: requests at once, per gateway.")
@click.option("--tokens-a-day", type=_LIMIT, metavar="N", help="With add: tokens a day, at all gateways.")
@click.option("--json", "as_json", is_flag=True, help="With list: print it as JSON.")
def key_command(
    action: str, name: str | None, max_in_flight: int | None, tokens_a_day: int | None, as_json: bool
) -> None:
    """Make, list or revoke the keys of persons at your gateways.

    hpc-serve key add alice --tokens-a-day 1000000

    A gateway that asks for a key takes these beside its own within 2 seconds, without a restart. `add` prints the key,
    once. `list` shows the limits of each person and the use of today. `revoke` takes a key back within 5 seconds.
    """
    from hpc_serve.gateway.personal_keys import add_person, read_people, read_use, revoke_key, today
    from hpc_serve.rendezvous.store import default_home

    if (name is None) != (action == "list"):
        raise click.UsageError("add and revoke need the NAME of one person, and list takes none.")
    if action != "add" and (max_in_flight or tokens_a_day):
        raise click.UsageError("limits are given when a key is made: revoke it, and add it anew.")
    folder = default_home(os.environ) / "gateway"
    if name is None:
        _show(read_people(folder), read_use(folder, today()), as_json=as_json)
    elif action == "add":
        key = add_person(folder, name, max_in_flight=max_in_flight, tokens_a_day=tokens_a_day)
        click.echo(f"This is the key of {name}. It is not shown again.", err=True)
        click.echo(key)
    else:
        revoke_key(folder, name)
        click.echo(f"The key of {name} is revoked. Answers under way still end.", err=True)


def _show(people: Sequence[Person], use: Mapping[str, Use], *, as_json: bool) -> None:
    from dataclasses import asdict

    from hpc_serve.cli.console import print_table
    from hpc_serve.gateway.personal_keys import Use

    rows = [{**asdict(person), **asdict(use.get(person.name, Use()))} for person in people]
    if as_json:
        print_json([{name: value for name, value in row.items() if name != "key_sha256"} for row in rows])
        return
    if not rows:
        click.echo("Nobody has a key of their own. To make one: hpc-serve key add NAME")
        return
    shown = []
    for row in rows:
        since = time.strftime("%Y-%m-%d", time.localtime(row["since"]))
        counts = {name: "any" if row[key] is None else f"{row[key]:,}" for name, key in _COUNTS.items()}
        shown.append({"NAME": row["name"], "SINCE": since, **counts, "GPU H": f"{row['gpu_seconds'] / 3600:.2f}"})
    print_table(shown, right=(*_COUNTS, "GPU H"), folded=("NAME",))
    click.echo("A DAY is in tokens. REQUESTS, the tokens of PROMPT and ANSWERS, and the GPU-hours are those of today.")


# -- the models on demand

_EXAMPLE = "models: {chat: 70b --time 04:00:00}"


@dataclass(frozen=True, kw_only=True)
class _File:
    services: int | None
    gpus: int | None
    gpu_hours_a_day: int | None
    models: Mapping[str, str]


def read_on_demand(path: Path) -> OnDemand:
    """Return the list in a file, each of whose models can be planned. Raises SiteFileError, naming the file."""
    from hpc_serve.gateway.settings import ListedModel, OnDemand
    from hpc_serve.submit.site.site import fields_of, read_site_yaml

    node = read_site_yaml(path, "list of models")
    found = dict(fields_of(node, _File, path)) if node is not None else {}
    if not found.get("models"):
        raise SiteFileError(f"{path} lists no models. An example: {_EXAMPLE}.")
    bounds = ((name, found.get(name)) for name in ("services", "gpus", "gpu_hours_a_day"))
    limits = {name: math.inf if most is None else most for name, most in bounds}
    if zeros := [name for name, most in limits.items() if not most]:
        raise SiteFileError(f"{path}: {zeros[0]} allows no model to start: write a number above 0, or leave it out.")
    models = {}
    for name, text in found["models"].items():
        try:
            words = ("--name", validate_service_name(name), *shlex.split(text))
            models[name] = ListedModel(words=words, gpus=_gpus_of(name, words))
        except (HpcServeError, click.ClickException, click.exceptions.Exit, ValueError) as error:
            said = error.format_message() if isinstance(error, click.ClickException) else error
            raise SiteFileError(f"{path}: {name}: `hpc-serve submit {text}` would fail: {said}") from error
        if models[name].gpus > limits["gpus"]:
            raise SiteFileError(f"{path}: {name} takes {models[name].gpus} GPUs, and `gpus` allows {limits['gpus']}.")
    return OnDemand(
        models=models,
        most_services=limits["services"],
        most_gpus=limits["gpus"],
        most_gpu_hours=limits["gpu_hours_a_day"],
    )


def _gpus_of(service: str, words: tuple[str, ...]) -> int:
    """Return the GPUs of a submission. Raises what `submit` raises."""
    from hpc_serve.submit.plans.planning import plan_service
    from hpc_serve.submit.script.render import devices_per_node, replicas_of

    with submit_command.make_context("submit", list(words)) as ctx:
        if ctx.params["wait"]:
            raise click.UsageError("leave out --wait: the gateway waits.")
        requests = make_requests(ctx.params)
    if requests[0].service != service:
        raise click.UsageError("leave out --name: the list has the name.")
    gpus = 0
    for request in requests:
        plan = plan_service(request)
        replicas = request.max_replicas or replicas_of(request, plan)
        gpus += devices_per_node(plan) * plan.layout.num_nodes * replicas
    return gpus


# -- the gateway

_WITH_KEY = """printf 'header = "Authorization: Bearer %s"' {key} | curl --config - {options}"""


@click.command("gateway")
@click.argument("services", nargs=-1, shell_complete=service_names)
@click.option("--socket", "socket_path", type=PATH, help="Listen on this Unix socket.")
@click.option("--port", type=click.IntRange(0, 65535), help="Listen on this port, with a key; 0 for any free one.")
@click.option("--host", help="With --port: the address to listen on; TLS for any but this host's own [127.0.0.1].")
@click.option("--share", type=PATH, help="With --host: a folder for the files that others need to ask.")
@click.option(
    "--own-keys", is_flag=True, help="With --share: put no key there; `hpc-serve key add` makes one for each."
)
@click.option("--key-file", type=PATH, help="The key's file, made if it is missing (0600).")
@click.option("--wait", type=SECONDS, default=60.0, help="How long a request waits for a replica [60s].")
@click.option("--wake", is_flag=True, help="A request wakes a service that is asleep.")
@click.option(
    "--on-demand",
    type=FILE,
    metavar="FILE",
    help="Start the models of this list when they are asked for.",
)
@click.option("--max-in-flight", type=click.IntRange(1), default=1000, help="Requests at a service at once [1000].")
@click.option("--queue", type=click.IntRange(0), default=1000, help="Requests that wait, of each service [1000].")
@click.option(
    "--workers", type=click.IntRange(1), default=1, help="Processes, for more load than one core carries [1]."
)
@click.option("--max-body", type=SIZE, default="64MiB", metavar="SIZE", help="Largest body of a request [64MiB].")
@click.option("--allow-origin", "origins", multiple=True, metavar="URL", help="Let web pages of this origin ask.")
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME", help="Answer as this host, beside localhost.")
@click.option("--grace", type=SECONDS, default=30.0, help="At the end: time for requests under way [30s].")
def gateway_command(
    services: tuple[str, ...],
    socket_path: Path | None,
    port: int | None,
    host: str | None,
    share: Path | None,
    key_file: Path | None,
    **options: Any,
) -> None:
    """Serve one address for all services, or for those named, to anything that speaks to OpenAI.

    hpc-serve gateway --port 8080

    A request goes to the service that its `model` names, by the service's name or the model's. It is repeated, and its
    stream continued, at another replica, as by hpc_serve.client. It listens on a Unix socket that only you can reach,
    or on --port, which asks for a key. --host and --share FOLDER let colleagues ask who can read FOLDER.
    """
    from hpc_serve.gateway import listening, server, sharing
    from hpc_serve.gateway.settings import Settings
    from hpc_serve.gateway.workers import Workers
    from hpc_serve.rendezvous.shares import named_service
    from hpc_serve.rendezvous.store import ServiceStore, default_home

    if socket_path is not None and port is not None:
        raise click.UsageError("--socket and --port are two gateways: start one for each.")
    if host is not None and port is None:
        raise click.UsageError("--host needs --port.")
    if share is not None and host is None:
        raise click.UsageError("--share needs --host, an address or name of this host that others reach, and --port.")
    if options["on_demand"] and options["workers"] > 1:
        raise click.UsageError("--on-demand starts and ends models in one process: leave --workers out.")
    for name, option in (("max_in_flight", "--max-in-flight"), ("queue", "--queue")):
        if 0 < options[name] < options["workers"]:
            raise click.UsageError(f"{option} is shared out among --workers: give at least one request to each.")
    if options["own_keys"] and share is None:
        raise click.UsageError("--own-keys needs --share.")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    home = default_home(os.environ)
    named = [named_service(service, home) for service in services]
    store = named[0][0] if named else ServiceStore(home)
    if any(one.home != store.home for one, _ in named):
        raise click.UsageError("Services of several users are several gateways: start one for each.")
    if store.owner is not None and (share is not None or options["on_demand"]):
        raise click.UsageError("A service of another user is shared and started by its owner alone.")
    names = tuple(dict.fromkeys(validate_service_name(service) for _, service in named))
    on_demand = read_on_demand(options["on_demand"]) if options["on_demand"] else None
    key = None
    if port is not None or key_file is not None:
        key_file = (key_file or sharing.default_key_file(home)).absolute()
        key = sharing.ensure_key(key_file)
    settings = Settings(
        services=names,
        key=key,
        wait_s=options["wait"],
        wake=options["wake"],
        max_in_flight=options["max_in_flight"],
        most_queued=options["queue"],
        most_body_bytes=options["max_body"],
        most_held_bytes=16 * options["max_body"],
        origins=options["origins"],
        hosts=tuple(map(str.lower, options["hosts"])),
        on_demand=on_demand,
    )
    with ExitStack() as stack:
        counts = Path(stack.enter_context(_counts_folder()) if options["workers"] > 1 else "")
        if port is not None:
            place = stack.enter_context(listening.on_port(host or "127.0.0.1", port))
        else:
            path = socket_path.absolute() if socket_path else listening.default_socket(home, os.environ)
            place = stack.enter_context(listening.on_socket(path))
        certificate = shared = None
        if not place.is_loopback:
            assert host is not None
            assert key is not None
            certificate = sharing.certificate_file(home)
            shown = sharing.ensure_certificate(certificate, host)
            folder = share.absolute() if share else certificate.with_name(f"{certificate.stem}-{place.port}")
            if share is None:  # it is for this run's users alone
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            shared = sharing.share(
                folder, host=host, port=place.port, key=None if options["own_keys"] else key, certificate=shown
            )
        elif share is not None:
            raise click.UsageError(
                f"--share needs an address that others reach, and on this host {host} is {place.host}: give --host an"
                " address of its network, or 0.0.0.0 for all of them."
            )
        serve = partial(server.serve, place, store, certificate=certificate, grace_s=options["grace"])
        tell = partial(_tell, place, names, home, key_file, shared)
        if (count := options["workers"]) == 1:
            serve(settings, on_start=tell)
            return

        def work(number: int, channel: socket.socket) -> None:
            serve(settings.of_worker(number, count, counts), on_start=lambda: None, channel=channel)
            with suppress(OSError):  # the last one removes the folder: the first process may have been killed
                (counts / f"{number}.prom").unlink(missing_ok=True)
                counts.rmdir()

        Workers(count, place.listener, work, grace_s=options["grace"]).run(tell)


def _counts_folder() -> TemporaryDirectory[str]:
    """Make the folder of the workers' counts. Raises HpcServeError."""
    try:
        return TemporaryDirectory(prefix="hpc-serve-gateway-")
    except OSError as error:
        raise HpcServeError(
            f"--workers needs a folder for counts: {error.strerror}. Set TMPDIR to a folder that you may write to."
        ) from error


def _tell(
    place: ListenAddress, services: tuple[str, ...], home: Path, key_file: Path | None, shared: Shared | None
) -> None:
    """Print what to type; the key itself is not shown, and no line puts it into a command line."""
    from hpc_serve.client.access import without_proxy

    click.echo(f"Gateway to {', '.join(services) or f'all services of {home}'}. Ctrl-C ends it.")
    if shared is not None:
        click.echo(
            f"source {shlex.quote(str(shared.folder / 'env.sh'))}    # in bash or zsh: address, key, certificate"
        )
        click.echo(_WITH_KEY.format(key='"$OPENAI_API_KEY"', options='"$OPENAI_BASE_URL/models"'))
        click.echo(f"{shared.folder} is for others, too. {shared.readers}")
        return
    key = f'"$(cat {shlex.quote(str(key_file))})"'
    if place.path is not None:
        path = shlex.quote(str(place.path))
        options = f"--unix-socket {path} http://localhost/v1/models"
        click.echo(_WITH_KEY.format(key=key, options=options) if key_file else f"curl {options}")
        click.echo(f"From your laptop: ssh -N -L 8000:{path} {os.uname().nodename}, then http://localhost:8000/v1")
        return
    url = f"http://{host_and_port(place.host, place.port)}/v1"
    for name, value in {"OPENAI_BASE_URL": url, **without_proxy(url)}.items():
        click.echo(f"export {name}={shlex.quote(value)}")
    click.echo(f"export OPENAI_API_KEY={key}")
    click.echo("The key goes over this port in the clear. A later program on this port could read it.", err=True)
