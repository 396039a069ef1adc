"""`plan`: what fits where, before anything is queued."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from hpc_serve.cli.commands import CommandWithVllmOptions, FiniteRange, print_json
from hpc_serve.cli.submit.request import (
    PLAN_GROUPS,
    assumed_gpu_note,
    engine_words,
    not_empty,
    plan_options,
    request_of_plan,
)
from hpc_serve.plan.hardware import DEFAULT_GPU
from hpc_serve.submit.site.site_files import read_site
from hpc_serve.vllm.command import check_arguments

if TYPE_CHECKING:
    from hpc_serve.plan.make import PlanRequest, PlanResult


@click.command("plan", cls=CommandWithVllmOptions, groups=PLAN_GROUPS)
@plan_options
@click.option("--replicas", type=int, metavar="N", help="Engines that share those GPUs [default: 1].")
@click.option("--vllm-version", metavar="X.Y.Z", help="Version to plan for, as 0.33 [default: the pinned one].")
@click.option(
    "--usd-per-gpu-hour",
    type=FiniteRange(min=0, min_open=True),
    metavar="USD",
    help="Price, for tokens a dollar.",
)
@click.option(
    "--decode-only", is_flag=True, help="Speed of generating alone: prompts are read elsewhere and take no time."
)
@click.option("--no-measured", "measured", flag_value=False, default=True, help="Leave out what `bench` measured here.")
@click.option("--ideal", is_flag=True, help="The roofline: every rate at its peak, which no engine beats.")
@click.option(
    "--plot",
    metavar="FILE",
    callback=not_empty,
    help="Draw it: .html, a page with sliders; .png, .svg or .pdf (need the extra hpc-serve[plot]).",
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.option(
    "--explain", "explained", is_flag=True, help="Print all layouts and speeds, and the arithmetic line by line."
)
@click.option("--compare", metavar="GPU,GPU", help="Compare accelerators.")
def plan_command(compare: str | None, as_json: bool, explained: bool, plot: str | None, **options: Any) -> None:
    """Say what fits where and how fast, before anything is queued: how many GPUs, which TP and PP, and why.

    hpc-serve plan 405b --gpu h100-80gb --nodes 2

    Memory is per GPU of the tightest rank, in the terms vLLM prints when it starts. Speed is that of a replica, by
    requests in flight. TPU slices and CPU nodes are GPUs here: --gpu v5e:4x4, --gpu cpu-spr-2s --gpu-memory 256GiB.

    Options of `vllm serve` count too, as `submit` takes them: --max-num-seqs 64
    """
    from hpc_serve.cli.plan import plan_view
    from hpc_serve.submit.plans.planning import plan_for

    is_page = plot is not None and plot.lower().endswith(".html")
    if plot and compare is not None and not is_page:
        raise click.UsageError(
            "--plot draws one accelerator: write --gpu NAME in place of --compare, or --plot FILE.html."
        )
    names = [word.strip() for word in compare.split(",") if word.strip()] if compare is not None else [options["gpu"]]
    if not names:
        raise click.UsageError(f"--compare names no accelerator: write --compare {DEFAULT_GPU},mi300x.")
    results = [plan_for(_plan_request(options | {"gpu": name})) for name in names]
    fits = any(result.plan for result in results)
    if plot and fits:
        if is_page:
            from hpc_serve.plots.page import write_page

            write_page(results, plot)
        else:
            from hpc_serve.plots.figure import draw

            draw(results[0], plot)
        click.echo(f"wrote {plot}", err=True)
    if as_json:
        from hpc_serve.plan.as_json import result_json

        documents = [result_json(result) for result in results]
        print_json(documents if compare else documents[0])
    elif compare:
        plan_view.print_comparison(results)
    elif explained:
        words, _ = engine_words(options, read_site(os.environ))
        plan_view.print_explanation(results[0], words, assumed_gpu_note(), _memory_of_nodes(options, results[0]))
    else:
        plan_view.print_plan(results[0], assumed_gpu_note(), _memory_of_nodes(options, results[0]))
    if not fits:
        raise click.exceptions.Exit(3)


def _memory_of_nodes(options: Mapping[str, Any], result: PlanResult) -> str:
    """Return what the memory of each node consists of that `submit` asks for; "" if it is for processes alone."""
    from hpc_serve.submit.script.memory import asked_parts, memory_sum

    plan = result.plan
    return memory_sum(asked_parts(request_of_plan(options), plan)) if plan is not None else ""


def _plan_request(options: Mapping[str, Any]) -> PlanRequest:
    """Return the request for the plan: that of `submit` with these options, and what `plan` alone is asked for."""
    from hpc_serve.submit.plans.planning import asked_plan

    version = options.get("vllm_version")
    words, _ = engine_words(options, read_site(os.environ))
    check_arguments(words, allow_unknown=False, version=version or "")
    asked = asked_plan(request_of_plan(options))
    return replace(
        asked,
        engine=replace(asked.engine, vllm_version=version) if version else asked.engine,
        workload=replace(asked.workload, replicas=options["replicas"]),
        **{name: options[name] for name in ("decode_only", "ideal", "measured", "usd_per_gpu_hour")},
    )
