"""`access`: how a service is reached from a laptop, and what other programs there are told.

Everything goes through the socket of a gateway, which stays while the service's jobs come and go. The socket is in a
folder that nobody else can look into, so a gateway needs no key there. None is printed.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from string import Template

import click

from hpc_serve.cli.complete import live_service_names
from hpc_serve.errors import HpcServeError

_PROGRAMS = {path.stem: path for path in sorted((Path(__file__).parent / "programs").glob("*.txt"))}
AGENT_TOKENS = 64_000
"""Context that coding agents are said to need, in tokens: Ollama's documents on Claude Code and Codex (2026)."""
_ANSWER_SHARE = 4  # an agent's answer is given at most this part of the context


@click.command("access")
@click.argument("service", required=False, shell_complete=live_service_names)
@click.option(
    "--for",
    "program",
    type=click.Choice(list(_PROGRAMS)),
    help="Print what to paste into this program, and nothing else.",
)
@click.option("--local-port", type=click.IntRange(1, 65535), default=8000, help="The laptop's port [default: 8000].")
@click.option("--login", metavar="NAME", help="What the laptop's ssh calls the gateway's host [default: its own name].")
def access_command(service: str | None, program: str | None, local_port: int, login: str | None) -> None:
    """Say how to reach a service from a laptop, and with --for what to paste into a program there.

    hpc-serve access 70b --for opencode

    The ssh line leads to a gateway's socket. It goes on through handovers and restarts of the service. If no gateway
    runs, the line starts one, which ends with it.
    """
    from hpc_serve.client import connect

    try:
        client = connect(service)
    except HpcServeError as error:
        if service is None:
            raise
        name, context, why_not = service, None, str(error)
    else:
        name = client.service
        context, why_not = getattr(client.models.list().data[0], "max_model_len", None), ""
    url = f"http://localhost:{local_port}"
    if program is not None:
        length = context or AGENT_TOKENS
        words = {"url": url, "model": name, "context": length, "output": length // _ANSWER_SHARE}
        click.echo(Template(_PROGRAMS[program].read_text(encoding="utf-8")).substitute(words), nl=False)
        return
    for line in _ssh_lines(local_port, login):
        click.echo(line)
    click.echo(f"\nThen {url}/v1 is the address and {name} the model. A program that wants a key takes any word,")
    click.echo("unless the gateway was started with --key-file: then it takes that key.")
    click.echo(why_not or _for_agents(name, context))
    click.echo(f"\nWhat to paste into a program: hpc-serve access {name} --for NAME, with one of")
    click.echo(f"  {', '.join(_PROGRAMS)}")


def _ssh_lines(local_port: int, login: str | None) -> list[str]:
    """Return the line for the laptop, below a sentence on its gateway."""
    from hpc_serve.gateway.listening import default_socket, is_answered
    from hpc_serve.rendezvous.store import default_home

    home = default_home(os.environ)
    path, host = default_socket(home, os.environ), os.uname().nodename
    elsewhere = [other for other in path.parent.glob("*.sock") if other != path]
    is_running = is_answered(path)
    if not is_running and elsewhere:
        path, host, is_running = elsewhere[0], elsewhere[0].stem, True
    options = f"-o ExitOnForwardFailure=yes -o ServerAliveInterval=15 -L {local_port}:"
    line = f"{options}{shlex.quote(str(path))} {login or host}"
    if is_running:
        return [f"On your laptop (a gateway runs on {host}):", f"  ssh -N {line}"]
    command = [f"HPC_SERVE_HOME={home}"] if os.environ.get("HPC_SERVE_HOME") else []
    command = ["env", *command, sys.executable, "-m", "hpc_serve.cli", "gateway"]
    return [
        f"On your laptop (the line starts a gateway on {host}, which ends with it):",
        f"  ssh -t {line} {shlex.quote(shlex.join(command))}",
    ]


def _for_agents(service: str, context: int | None) -> str:
    """Say whether coding agents can use the service."""
    if context is None:
        return ""
    if context < AGENT_TOKENS:
        return (
            f"Its context of {context:,} tokens is short for coding agents, which want {AGENT_TOKENS:,}: submit it with"
            f" --max-model-len {AGENT_TOKENS} --tools."
        )
    return f"Its context of {context:,} tokens is enough for coding agents. They need --tools at submit, too."
