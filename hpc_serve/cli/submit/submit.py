"""`render` and `submit`: the script, and the job made of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_serve.cli.commands import CommandWithVllmOptions, print_json
from hpc_serve.cli.submit.options import REQUEST_GROUPS, request_options
from hpc_serve.cli.submit.request import assumed_gpu_note, make_request, make_requests
from hpc_serve.cli.values import SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_serve.submit.services.services import Submission

_VLLM_OPTIONS = "\n\nOptions of `vllm serve` go to it as they are, here or after --: --enable-prefix-caching"


@click.command(
    "render",
    cls=CommandWithVllmOptions,
    groups=REQUEST_GROUPS,
    help="Print the batch script that `submit` would hand to sbatch.\n\nhpc-serve render 405b --nodes 2"
    + _VLLM_OPTIONS,
)
@request_options
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write it to a file instead.")
def render_command(output: Path | None, **options: Any) -> None:
    from hpc_serve.submit.plans.planning import plan_request
    from hpc_serve.submit.script.memory import small_memory_note
    from hpc_serve.submit.script.render import render_script

    planned = plan_request(make_request(options), stand_in=os.environ.get("HPC_SERVE_MODEL"))
    script = render_script(planned.request, planned.plan)
    for note in (assumed_gpu_note(), planned.machines_note, small_memory_note(planned.request, planned.plan)):
        if note:
            click.echo(f"note: {note}", err=True)
    if output is None:
        click.echo(script, nl=False)
        return
    try:
        output.write_text(script)
    except OSError as error:
        raise click.FileError(str(output), hint=error.strerror) from error


@click.command(
    "submit",
    cls=CommandWithVllmOptions,
    groups=REQUEST_GROUPS,
    help="Start a model as a service: plan it, submit its job.\n\nhpc-serve submit 405b --nodes 2 --wait"
    + _VLLM_OPTIONS,
)
@request_options
@click.option(
    "--wait/--no-wait",
    default=False,
    help="Follow it until a replica is ready; Ctrl-C only detaches.",
)
@click.option("--timeout", type=SECONDS, help="With --wait: how long (600, 10m, 2h) [default: for ever].")
@click.option(
    "--check-hub", is_flag=True, help="Ask the hub, for 5 s, whether weights that are not here may be fetched."
)
@click.option(
    "--share", metavar="GROUP", help="Let a Unix group of yours use this service: see its records, and ask it."
)
@click.option(
    "--lora",
    multiple=True,
    metavar="NAME=FOLDER",
    help="A LoRA adapter that each replica loads; may be repeated. `hpc-serve adapter` adds more later.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the submission as JSON.")
def submit_command(
    wait: bool,
    timeout: float | None,
    check_hub: bool,
    share: str | None,
    lora: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> Sequence[Submission]:
    from hpc_serve.cli.services.stages import follow_until_ready
    from hpc_serve.cli.submit.submission import submission_json, submission_text
    from hpc_serve.submit.services import services
    from hpc_serve.submit.services.adapters import read_adapters, room_for

    adapters = read_adapters(lora)
    context = click.get_current_context()
    context.meta["engine_args"] = (*room_for(adapters), *context.meta["engine_args"])
    requests = make_requests(options)
    submissions = services.submit_each(requests, ask_hub=check_hub, share=share, adapters=adapters)
    is_one = len(submissions) == 1
    if as_json:
        told = [submission_json(one) for one in submissions]
        print_json(told[0] if is_one else {"service": requests[0].service, "submissions": told})
    else:
        for one in submissions:
            click.echo(submission_text(one, gpu_note=assumed_gpu_note()))
    if wait:
        job_id = submissions[0].job_id if is_one else None
        follow_until_ready(requests[0].service, job_id=job_id, timeout_s=timeout)
    return submissions
