"""`access`, `env` and `chat`: how other programs reach a service, and a conversation with it.

`env` prints the address for a tool here. `access` says how a laptop reaches the service, and what programs there are
told. That way goes through the socket of a gateway, which stays while the service's jobs come and go. The socket is in
a folder that nobody else can look into, so a gateway needs no key there. None is printed.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import click

from hpc_serve.cli.commands import SECONDS, FiniteRange, print_json
from hpc_serve.cli.complete import live_service_names
from hpc_serve.errors import HpcServeError, InvalidRequestError, ServiceNotFoundError
from hpc_serve.printable import printable
from hpc_serve.rendezvous.fields import is_service_name
from hpc_serve.rendezvous.shares import is_service_folder

if TYPE_CHECKING:
    from hpc_serve.client.openai_client import ServiceClient


# -- access from a laptop

_PROGRAMS = {path.stem: path for path in sorted((Path(__file__).parent / "programs").glob("*.txt"))}

_AGENT_TOKENS = 64_000
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
        if service is None or isinstance(error, InvalidRequestError):
            raise
        name, context, why_not = service, None, str(error)
    else:
        name = client.service
        context, why_not = getattr(client.models.list().data[0], "max_model_len", None), ""
    url = f"http://localhost:{local_port}"
    if program is not None:
        length = context or _AGENT_TOKENS
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
    line = f"{options}{shlex.quote(str(path))} {shlex.quote(login or host)}"
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
    if context < _AGENT_TOKENS:
        return (
            f"Its context of {context:,} tokens is short for coding agents, which want {_AGENT_TOKENS:,}: submit it "
            f"with --max-model-len {_AGENT_TOKENS} --tools."
        )
    return f"Its context of {context:,} tokens is enough for coding agents. They need --tools at submit, too."


# -- env and chat

_WAIT = click.option("--wait", type=SECONDS, help="Wait for it that long if it is coming (600, 10m).")


@click.command("env")
@click.argument("service", required=False, shell_complete=live_service_names)
@_WAIT
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def env_command(service: str | None, wait: float | None, as_json: bool) -> None:
    """Print export lines for any tool that speaks to OpenAI: the address, the key, and the certificates to trust.

    eval "$(hpc-serve env 405b)"

    The certificates are the system's and that of your services. SSL_CERT_FILE, REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE and
    NODE_EXTRA_CA_CERTS name files of them in the folder of your services. If a proxy is set, NO_PROXY gets the host.

    If no SERVICE is named, it is the only one that is ready. The address is the current address of one replica.
    Programs in Python should use hpc_serve.client.connect(), which follows the service when it moves.

    Without such a service the line `false` is printed, so that a script with `set -e` ends at the `eval`.
    """
    from hpc_serve.client import endpoint

    try:
        found = endpoint(service, wait=wait)
    except HpcServeError:
        if not as_json and not sys.stdout.isatty():
            click.echo("false")  # else the script goes on, and asks whom earlier variables name
        raise
    if as_json:
        names = ("service", "model", "base_url", "api_key", "variables")
        print_json({name: getattr(found, name) for name in names})
        return
    for name, value in found.variables.items():
        click.echo(f"export {name}={shlex.quote(value)}")


@click.command("chat")
@click.argument("service", required=False, shell_complete=live_service_names)
@click.argument("prompt", required=False)
@click.option("--system", metavar="TEXT", help="A system message to begin with.")
@click.option("--max-tokens", type=int, metavar="N", help="Longest answer, in tokens.")
@click.option("--temperature", type=FiniteRange(0), metavar="T", help="0 for the likeliest answer.")
@click.option("--adapter", metavar="NAME", help="Ask this LoRA adapter of the service (`hpc-serve adapter`).")
@_WAIT
def chat_command(
    service: str | None,
    prompt: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    wait: float | None,
    adapter: str | None,
) -> None:
    """Ask a service one thing, or talk to it.

    hpc-serve chat 405b "Why is the sky blue?"

    The question is PROMPT. Without it, it is the text from a pipe; on a terminal it is a conversation. If no SERVICE is
    named, it is the only one that is ready: `hpc-serve chat "Why is the sky blue?"`.
    """
    import hpc_serve.client

    if adapter == "":  # an engine takes no name for that of its model
        raise click.UsageError("--adapter is empty (an unset variable?).")
    is_named = service is None or is_service_name(service) or is_service_folder(service)
    if prompt is None and not is_named:
        service, prompt = None, service
    try:
        client = hpc_serve.client.connect(service, wait=wait)
    except ServiceNotFoundError as error:
        if service is None or prompt is not None:
            raise
        raise ServiceNotFoundError(f"{error}{_name_first(service)}") from None
    messages = [{"role": "system", "content": system}] if system else []
    asked = {"model": adapter or client.model, "max_tokens": max_tokens, "temperature": temperature}
    options = {name: value for name, value in asked.items() if value is not None}
    if prompt is None and sys.stdin.isatty():
        _converse(client, messages, options)
        return
    question = prompt if prompt is not None else sys.stdin.read()
    if not question.strip():
        raise click.UsageError("There is no question: give a PROMPT, or pipe one in.")
    _ask(client, [*messages, {"role": "user", "content": question}], options)


def _name_first(word: str) -> str:
    """Advice for a person who may have meant `word` as a question, when no service has that name."""
    from hpc_serve.client import services

    known = services()
    if any(status.service == word for status in known):
        return ""
    ready = [status.service for status in known if status.ready]
    example = f"hpc-serve chat {ready[0] if len(ready) == 1 else 'SERVICE'} {shlex.quote(word)}"
    return f"\nIf {word!r} is what you want to ask, a service's name comes first: {example}"


def _converse(client: ServiceClient, messages: list[dict[str, str]], options: dict[str, Any]) -> None:
    import readline  # noqa: F401  -- line editing and history for input()

    click.echo(f"{client.service}: {options['model']}. Ctrl-C ends an answer, Ctrl-D the conversation.", err=True)
    while True:
        try:
            question = input("> ")
            if question.strip():
                asked = [*messages, {"role": "user", "content": question}]
                messages = [*asked, {"role": "assistant", "content": _ask(client, asked, options)}]
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\n(interrupted)", err=True)
        except HpcServeError as error:
            click.echo(f"error: {error}", err=True)


def _ask(client: ServiceClient, messages: list[dict[str, str]], options: dict[str, Any]) -> str:
    """Print the answer as it comes, and return it. Raises HpcServeError."""
    import openai

    answer, finish = [], None
    create: Any = client.chat.completions.create  # the SDK's types want a literal for each role
    try:
        for chunk in create(messages=messages, stream=True, **options):
            for choice in chunk.choices:
                finish = choice.finish_reason
                if text := choice.delta.content:
                    answer.append(text)
                    click.echo(printable(text), nl=False)
    except UnicodeEncodeError as error:
        raise InvalidRequestError("The question is not text in UTF-8; `iconv` converts other text.") from error
    except openai.APIStatusError as error:
        if error.status_code == 404 and "does not exist" not in error.message:  # the route, not the model
            from hpc_serve.cli.services.stages import calls_without_chat

            raise HpcServeError(
                f"{client.service} has no chat: its engine generates no text from prompts. "
                f"{calls_without_chat(client.service)}"
            ) from error
        raise HpcServeError(f"{client.service} answered: {error.message}") from error
    except openai.OpenAIError as error:
        raise HpcServeError(f"{client.service} cannot be asked: {error}") from error
    finally:
        if answer:  # an error stands on a line of its own
            click.echo()
    if not answer:  # such as reasoning alone
        click.echo(f"{client.service} answered without text; finish_reason: {finish}", err=True)
    return "".join(answer)
