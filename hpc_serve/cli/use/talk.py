"""`env` and `chat`: the address of a service for another tool, and a conversation with it."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from hpc_serve.cli.commands import SECONDS, print_json
from hpc_serve.cli.complete import live_service_names
from hpc_serve.errors import HpcServeError, ServiceNotFoundError
from hpc_serve.printable import printable
from hpc_serve.rendezvous.names import is_service_name
from hpc_serve.rendezvous.shares import is_service_folder

if TYPE_CHECKING:
    from hpc_serve.client.openai_client import ServiceClient

_WAIT = click.option("--wait", type=SECONDS, help="Wait for it that long if it is coming (600, 10m).")


@click.command("env")
@click.argument("service", required=False, shell_complete=live_service_names)
@_WAIT
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def env_command(service: str | None, wait: float | None, as_json: bool) -> None:
    """Print export lines for any tool that speaks to OpenAI: the address, the key, and the certificates to trust.

    eval "$(hpc-serve env 405b)"

    The certificates are the system's and that of your services. SSL_CERT_FILE, REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE and
    NODE_EXTRA_CA_CERTS name files of them in the folder of your services.

    If no SERVICE is named, it is the only one that is ready. The address is the current address of one replica.
    Programs in Python should use hpc_serve.client.connect(), which follows the service when it moves.
    """
    from hpc_serve.client import endpoint

    found = endpoint(service, wait=wait)
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
@click.option("--temperature", type=float, metavar="T", help="0 for the likeliest answer.")
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

    The question is PROMPT, or text from a pipe; on a terminal without either it is a conversation. If no SERVICE is
    named, it is the only one that is ready: `hpc-serve chat "Why is the sky blue?"`.
    """
    import hpc_serve.client

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
    asked = {"max_tokens": max_tokens, "temperature": temperature}
    options = {name: value for name, value in asked.items() if value is not None}
    if prompt is None and sys.stdin.isatty():
        _converse(client, messages, {"model": adapter or client.model, **options})
        return
    question = prompt if prompt is not None else sys.stdin.read()
    if not question.strip():
        raise click.UsageError("There is no question: give a PROMPT, or pipe one in.")
    _ask(client, [*messages, {"role": "user", "content": question}], {"model": adapter or client.model, **options})


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
        except EOFError:
            click.echo()
            return
        if not question.strip():
            continue
        messages.append({"role": "user", "content": question})
        try:
            answer = _ask(client, messages, options)
        except KeyboardInterrupt:
            click.echo("\n(interrupted)", err=True)
            messages.pop()
            continue
        except HpcServeError as error:
            click.echo(f"error: {error}", err=True)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def _ask(client: ServiceClient, messages: list[dict[str, str]], options: dict[str, Any]) -> str:
    """Print the answer as it comes, and return it. Raises HpcServeError."""
    import openai

    answer = []
    create: Any = client.chat.completions.create  # the SDK's types want a literal for each role
    try:
        stream = create(messages=messages, stream=True, **options)
        for chunk in stream:
            if chunk.choices and (text := chunk.choices[0].delta.content):
                answer.append(text)
                click.echo(printable(text), nl=False)
                sys.stdout.flush()
    except openai.APIStatusError as error:
        if error.status_code == 404 and "does not exist" not in error.message:  # the route, not the model
            from hpc_serve.cli.services.stages import calls_without_chat

            raise HpcServeError(
                f"{client.service} has no chat: its engine generates no text from prompts. "
                f"{calls_without_chat(client.service)}"
            ) from error
        raise HpcServeError(f"{client.service} answered {error.status_code}: {error.message}") from error
    except openai.OpenAIError as error:
        raise HpcServeError(f"{client.service} cannot be asked: {error}") from error
    click.echo()
    return "".join(answer)
