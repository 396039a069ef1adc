"""`gateway`: one address for services, for curl, web pages and other languages."""

from __future__ import annotations

import logging
import os
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_serve.cli.complete import service_names
from hpc_serve.cli.values import Duration, Size
from hpc_serve.rendezvous.names import validate_service_name

if TYPE_CHECKING:
    from hpc_serve.gateway.listening import Place


@click.command("gateway")
@click.argument("services", nargs=-1, shell_complete=service_names)
@click.option("--socket", "socket_path", type=click.Path(path_type=Path), help="Listen on this Unix socket.")
@click.option("--port", type=click.IntRange(0, 65535), help="Listen on this port, with a key; 0 for any free one.")
@click.option("--host", help="With --port: the address to listen on; TLS for any but this host's own [127.0.0.1].")
@click.option("--key-file", type=click.Path(path_type=Path), help="The key's file, made if it is missing (0600).")
@click.option("--wait", type=Duration(), default=60.0, help="How long a request waits for a replica [60s].")
@click.option("--wake", is_flag=True, help="A request wakes a service that is asleep.")
@click.option("--max-in-flight", type=click.IntRange(1), default=1000, help="Requests at a service at once [1000].")
@click.option("--queue", type=click.IntRange(0), default=1000, help="Requests that wait, of each service [1000].")
@click.option("--max-body", type=Size(), default="64MiB", metavar="SIZE", help="Largest body of a request [64MiB].")
@click.option("--allow-origin", "origins", multiple=True, metavar="URL", help="Let web pages of this origin ask.")
@click.option("--grace", type=Duration(), default=30.0, help="At the end: time for requests under way [30s].")
def gateway_command(
    services: tuple[str, ...],
    socket_path: Path | None,
    port: int | None,
    host: str | None,
    key_file: Path | None,
    wait: float,
    wake: bool,
    max_in_flight: int,
    queue: int,
    max_body: int,
    origins: tuple[str, ...],
    grace: float,
) -> None:
    """Serve one address for all services, or for those named, to anything that speaks to OpenAI.

    A request goes to the service that its `model` names, by the service's name or the model's. It is repeated, and its
    stream continued, at another replica, as by hpc_serve.client. Without --port it listens on a Unix socket that only
    you can reach; a port asks for a key.
    """
    from hpc_serve.gateway import key as keys
    from hpc_serve.gateway import listening, server
    from hpc_serve.gateway.settings import Settings
    from hpc_serve.rendezvous.store import ServiceStore, default_home

    if socket_path is not None and port is not None:
        raise click.UsageError("--socket and --port are two gateways: start one for each.")
    if host is not None and port is None:
        raise click.UsageError("--host needs --port.")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    home = default_home(os.environ)
    names = tuple(dict.fromkeys(map(validate_service_name, services)))
    key = None
    if port is not None or key_file is not None:
        key_file = (key_file or keys.default_key_file(home)).absolute()
        key = keys.ensure_key(key_file)
    settings = Settings(
        services=names,
        key=key,
        wait_s=wait,
        wake=wake,
        most_in_flight=max_in_flight,
        most_queued=queue,
        most_body_bytes=max_body,
        most_held_bytes=16 * max_body,
        origins=origins,
    )
    with ExitStack() as stack:
        if port is not None:
            place = stack.enter_context(listening.on_port(host or "127.0.0.1", port))
        elif socket_path is not None:
            place = stack.enter_context(listening.on_socket(socket_path.absolute()))
        else:
            place = stack.enter_context(listening.on_default_socket(home, os.environ))
        server.serve(
            place, ServiceStore(home), settings, grace_s=grace, on_start=lambda: _tell(place, names, home, key_file)
        )


def _tell(place: Place, services: tuple[str, ...], home: Path, key_file: Path | None) -> None:
    """What to type, for people; the key itself is not shown."""
    click.echo(f"Gateway to {', '.join(services) or f'all services of {home}'}. Ctrl-C ends it.")
    shows_key = f' -H "Authorization: Bearer $(cat {shlex.quote(str(key_file))})"' if key_file else ""
    if place.path is not None:
        path = shlex.quote(str(place.path))
        click.echo(f"curl --unix-socket {path}{shows_key} http://localhost/v1/models")
        click.echo(f"From your laptop: ssh -N -L 8000:{path} {os.uname().nodename}, then http://localhost:8000/v1")
        return
    host = f"[{place.host}]" if ":" in place.host else place.host
    scheme = "http" if place.is_loopback else "https"
    assert key_file is not None
    click.echo(f"export OPENAI_BASE_URL={scheme}://{host}:{place.port}/v1")
    click.echo(f'export OPENAI_API_KEY="$(cat {shlex.quote(str(key_file))})"')
    if place.is_loopback:
        click.echo(
            "The key goes over this port in the clear. Who ends up on it after this gateway could read it.", err=True
        )
    else:
        _tell_trust(home)


def _tell_trust(home: Path) -> None:
    from hpc_serve.trust.bundle import trust_variables

    for name, value in trust_variables(home, os.environ).items():
        click.echo(f"export {name}={shlex.quote(value)}")
