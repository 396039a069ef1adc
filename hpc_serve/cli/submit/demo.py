"""`demo`: makes a tiny model, serves it with the real engine on this machine, asks it something, and stops it."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import click

from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous.store import own_store
from hpc_serve.submit.request.options import Environment
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.units import GIB
from hpc_serve.vllm.arguments import ARGS_FILE, read_args_file

SERVICE = "demo"
_MEMORY_BYTES = 2 * GIB
QUESTION = "Why is the sky blue?"
# The engine's CPU backend would bind its threads to cores that containers and small machines do not give it.
_CPU_ENGINE = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@click.command("demo")
@click.option("--keep", is_flag=True, help="Leave the service running at the end.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Folder to make the model in.")
def demo_command(keep: bool, folder: Path | None) -> None:
    """Serve a tiny model on this machine, ask it something, and stop it.

    hpc-serve demo

    It needs an environment with vLLM, but no Slurm and no GPU. The model's weights are random numbers, so its answer is
    gibberish.
    """
    from hpc_serve.cli.commands import end_as_by_ctrl_c
    from hpc_serve.cli.services.stages import Stages
    from hpc_serve.cli.submit.submit import submission_text
    from hpc_serve.submit.services import services
    from hpc_serve.submit.services.stop import stop
    from hpc_serve.submit.services.wait import wait
    from hpc_serve.submit.status.status_reader import find

    end_as_by_ctrl_c()
    store = own_store()
    for name, value in _CPU_ENGINE.items():
        os.environ.setdefault(name, value)
    submission = services.submit(_request(folder or store.ensure_service(SERVICE) / "model"))
    job_id, answered = submission.job.job_id, False
    try:
        click.echo(submission_text(submission))
        with Stages(SERVICE) as stages:
            wait(store, SERVICE, job_id=job_id, on_change=stages.show)
        click.echo(_ask())
        click.echo(_how_to_call())
        answered = True
    finally:
        if not (keep and answered):
            with contextlib.suppress(OSError):  # the terminal may be gone
                click.echo("\nStopping it ...")
            for status in stop(store, find(store, job_id)):
                click.echo(f"{SERVICE} is over: {status.sentence}")


def _request(folder: Path) -> ServeRequest:
    from hpc_serve.demo_model import make_demo_model

    try:
        make_demo_model(folder)
        engine_args = read_args_file((folder / ARGS_FILE).read_text())
    except OSError as error:
        raise InvalidRequestError(f"The demo's model cannot be written to {folder}: {error}") from error
    in_venv = sys.prefix != sys.base_prefix
    return ServeRequest(
        model=str(folder),
        service=SERVICE,
        gpu="cpu",
        gpu_memory_bytes=_MEMORY_BYTES,
        cluster="local",
        engine_args=engine_args,
        environment=Environment(kind="venv", path=sys.prefix) if in_venv else Environment(kind="none"),
    )


def _ask() -> str:
    """The question and the model's answer, through the client that any program would use."""
    import hpc_serve.client

    client = hpc_serve.client.connect(SERVICE)
    messages: Any = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(model=client.model, messages=messages, max_tokens=24)
    return (
        f"\n  you    {QUESTION}\n  model  {answer.choices[0].message.content}\n\n"
        "(Its weights are random numbers, so the answer is gibberish. The engine is the real one.)"
    )


def _how_to_call() -> str:
    return f"""
`hpc-serve demo --keep` leaves this service running. Call a running service

  with        hpc-serve chat {SERVICE}
  in Python   hpc_serve.client.connect("{SERVICE}"), an openai.OpenAI
  by curl     (the key goes through a pipe, so that nobody sees it in the list of processes)

    eval "$(hpc-serve env {SERVICE})"
    printf 'header = "Authorization: Bearer %s"' "$OPENAI_API_KEY" |
      curl --silent --config - "$OPENAI_BASE_URL/chat/completions" --header "Content-Type: application/json" \\
        --data '{{"model": "{SERVICE}", "messages": [{{"role": "user", "content": "{QUESTION}"}}]}}'"""
