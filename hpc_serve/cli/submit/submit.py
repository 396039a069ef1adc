"""`render` and `submit`: the script, and the job made of it, shown as text for people and as JSON for scripts.

request.py makes the request of the options; `hpc_serve.submit` plans it and hands it over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_serve.cli.commands import FILE, SECONDS, CommandWithVllmOptions, end_as_by_ctrl_c, print_json
from hpc_serve.cli.submit.request import REQUEST_GROUPS, assumed_gpu_note, make_request, make_requests, request_options
from hpc_serve.plan.catalog import parsers_of
from hpc_serve.rendezvous.record import DEFAULT_MACHINE
from hpc_serve.units import number_of
from hpc_serve.vllm.arguments import read_arguments, value_of

if TYPE_CHECKING:
    from hpc_serve.submit.services.services import Submission


_LOGS_SHOWN = 4


def _submission_json(submission: Submission) -> dict[str, Any]:
    """A submission under stable keys, with the other replicas of its service, and in what its engine differs."""
    job, plan = submission.job, submission.plan
    sizes = ("num_nodes", "gpus_per_node", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    ahead = [
        {"job_id": one.job_id, "predecessor": one.predecessor, "log": one.log_path}
        for one in submission.jobs
        if one.predecessor
    ]
    shared = {"shared_with": submission.shared_with, "folder": submission.folder}
    return {
        **{name: getattr(job, name) for name in ("service", "model", "cluster")},
        "job_id": submission.job_id,
        "is_there": submission.is_there,
        "machine": job.machine,
        "replicas": [
            {"name": name, "job_id": one.job_id, "log": one.log_path}
            for one in submission.jobs
            if not one.predecessor
            for name in one.replica_names
        ],
        "script": job.script,
        "log": job.log_path,
        **{name: getattr(plan.layout, name) for name in sizes},
        "replicas_wanted": plan.replicas,
        "weights_note": submission.weights_note,
        "queue": submission.queue,
        "machines_note": submission.machines_note,
        **({"memory": submission.memory} if submission.memory else {}),
        **({"ahead": ahead} if ahead else {}),
        **(shared if submission.shared_with else {}),
        "other_jobs": [
            {"job_id": other.job_id, "state": other.state, "differs": list(submission.differing.get(other.job_id, ()))}
            for other in submission.others
        ],
    }


def submission_text(submission: Submission, *, gpu_note: str | None = None) -> str:
    """What was submitted, and what to type next."""
    from hpc_serve.submit.status.wanted_words import bounds_sentence

    job, layout, wanted = submission.job, submission.plan.layout, submission.wanted
    is_slurm, count, further = job.cluster == "slurm", submission.num_replicas, len(submission.jobs) - _LOGS_SHOWN
    gpus = number_of(layout.gpus_per_node, submission.plan.accelerator.unit)
    machines = f"{number_of(layout.num_nodes, 'node')} x {gpus}" if is_slurm else "this machine"
    if job.machine != DEFAULT_MACHINE:
        machines += f" of {job.machine}"
    per_job = f", {job.replicas_per_job} on one node" if job.replicas_per_job > 1 else ""
    each = f"{count} replicas{per_job}, each " if count > 1 else ""
    chain = [one.job_id for one in submission.jobs if one.predecessor]
    keeps_up = wanted is not None and wanted.keep_up
    shared_with, service = submission.shared_with, job.service
    rows = [
        ("model", job.model),
        ("replicas", bounds_sentence(wanted) if wanted is not None and wanted.is_elastic else ""),
        ("keeps up", "across time limits: each job submits the next before its own ends" if keeps_up else ""),
        ("ahead", f"{len(chain)} jobs take over in time: {', '.join(chain)}" if chain else ""),
        ("shared", f"with group {shared_with}, who name it {submission.folder}" if shared_with else ""),
        ("memory", submission.memory),
        ("queue", submission.queue),
        *(("log", one.log_path) for one in submission.jobs[:_LOGS_SHOWN]),
        ("", f"… and those of {further} more" if further > 0 else ""),
        ("next", f"hpc-serve wait {service}     hpc-serve logs {service} --follow"),
        ("", f"hpc-serve status {service}   hpc-serve stop {service}"),
        ("tools", _tools_note(job.model, job.engine_args)),
        ("note", submission.weights_note),
        ("note", submission.machines_note),
        ("note", gpu_note or ""),
        *_others_rows(submission),
        *(
            ("note", f"its engine is not that of job {job_id}, so answers may differ: {'; '.join(words)}")
            for job_id, words in submission.differing.items()
        ),
    ]
    what = "is there already, as" if submission.is_there else "submitted as"
    heading = f"{service}: {what} job {submission.job_id} ({each}{machines}, {layout.sizes()})"
    return "\n".join([heading, *(f"  {name:<7} {text}" for name, text in rows if text)])


def _others_rows(submission: Submission) -> Iterator[tuple[str, str]]:
    """Yield how many replicas the service has now, if it had others before."""
    others, wanted = submission.others, submission.wanted
    if not others or submission.is_there:
        return
    ahead = {other.successor_job_id for other in others}
    before = sum(other.job_id not in ahead for other in others)
    now = max(before + submission.num_replicas, wanted.count if wanted is not None else 0)
    there = ", ".join(f"job {other.name} ({other.state})" for other in others)
    yield "note", f"{submission.job.service} has {now} replicas now; it had {before} before, {there};"
    yield "", f"if that is too many: hpc-serve stop {submission.job_id}"


def _tools_note(model: str, engine_args: Sequence[str]) -> str:
    """Which parsers the engine has for calls of tools and reasoning, or how to have them; "" where none is known."""
    given = read_arguments(engine_args)
    names = ("--tool-call-parser", "--reasoning-parser")
    if has := [f"{name} {value}" for name in names if (value := value_of(given, name))]:
        return " ".join(has)
    known = parsers_of(model).vllm_args
    return f"not set up; --tools adds {' '.join(known)}" if known else ""


_VLLM_OPTIONS = "\n\nOptions of `vllm serve` go to it as they are, here or after --: --enable-prefix-caching"


@click.command(
    "render",
    cls=CommandWithVllmOptions,
    groups=REQUEST_GROUPS,
    help="Print the batch script that `submit` would hand to sbatch.\n\nhpc-serve render 405b --nodes 2"
    + _VLLM_OPTIONS,
)
@request_options
@click.option("--output", type=FILE, help="Write it to a file instead.")
def render_command(output: Path | None, **options: Any) -> None:
    from hpc_serve.submit.plans.planning import plan_request
    from hpc_serve.submit.script.memory import small_memory_note
    from hpc_serve.submit.script.render import render_script

    planned = plan_request(make_request(options), stand_in=os.environ.get("HPC_SERVE_MODEL"))
    script = render_script(planned.request, planned.plan)
    is_kept = planned.request.keep_up or planned.request.is_elastic
    by_hand = "given to sbatch by hand, it gets no successors and no further replicas: use `hpc-serve submit`"
    memory_note = small_memory_note(planned.request, planned.plan)
    for note in (assumed_gpu_note(), planned.machines_note, memory_note, by_hand if is_kept else ""):
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
@click.option("--wait/--no-wait", default=False, help="Follow it until a replica is ready; Ctrl-C only detaches.")
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
    from hpc_serve.submit.services import services
    from hpc_serve.submit.services.adapters import read_adapters, room_for

    end_as_by_ctrl_c()
    adapters = read_adapters(lora)
    context = click.get_current_context()
    context.meta["engine_args"] = (*room_for(adapters), *context.meta["engine_args"])
    requests = make_requests(options)
    submissions = services.submit_each(requests, ask_hub=check_hub, share=share, adapters=adapters)
    is_one = len(submissions) == 1
    if as_json:
        told = [_submission_json(one) for one in submissions]
        print_json(told[0] if is_one else {"service": requests[0].service, "submissions": told})
    else:
        for one in submissions:
            click.echo(submission_text(one, gpu_note=assumed_gpu_note()))
    if wait:
        job_id = submissions[0].job_id if is_one else None
        follow_until_ready(requests[0].service, job_id=job_id, timeout_s=timeout)
    return submissions
