"""`plan`: what fits where, before anything is queued."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from hpc_serve.cli.options import (
    CommandWithVllmOptions,
    not_empty,
    plan_options,
)
from hpc_serve.cli.request import assumed_gpu_note, machines_of, model_of, site_model
from hpc_serve.cli.values import Size
from hpc_serve.plan.hardware.cluster import DEFAULT_GPU

if TYPE_CHECKING:
    from hpc_serve.plan.make import PlanRequest
    from hpc_serve.submit.site_models import SiteModel


_AS_WORDS = (
    *("enable_lora", "max_loras", "max_lora_rank"),
    *("cpu_offload_gb", "limit_mm_per_prompt", "speculative_config"),
)
"""Options of vLLM that people ask a plan for: they are the same as words after --, which come after them."""


def _finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no price; write dollars as in {param.opts[0]} 2.50.", ctx, param)
    return value


@click.command("plan", cls=CommandWithVllmOptions)
@plan_options
@click.option("--replicas", type=int, metavar="N", help="Engines that share those GPUs [default: 1].")
@click.option("--max-num-seqs", type=int, metavar="N", help="Sequences of one step.")
@click.option("--max-num-batched-tokens", type=int, metavar="N", help="Tokens of one step.")
@click.option("--gpu-memory-utilization", type=float, metavar="SHARE", help="Share vLLM may use [default: its own].")
@click.option("--kv-cache-memory-bytes", type=Size(), metavar="SIZE", help="KV cache, in place of that share.")
@click.option("--block-size", type=int, metavar="TOKENS", help="Tokens of a cache block.")
@click.option("--dtype", default="auto", metavar="TYPE", help="bfloat16, float16, float32.")
@click.option("--quantization", "-q", metavar="METHOD", help="fp8, int8, awq, gptq, mxfp4 …: as if quantised so.")
@click.option("--kv-cache-dtype", default="auto", metavar="TYPE", help="auto, fp8, int8 …")
@click.option("--enforce-eager", is_flag=True, help="No CUDA graphs.")
@click.option("--enable-expert-parallel", is_flag=True, help="Whole experts to each GPU.")
@click.option("--enable-lora", is_flag=True, help="Room for LoRA adapters.")
@click.option("--max-loras", type=int, metavar="N", help="Adapters in a step.")
@click.option("--max-lora-rank", type=int, metavar="N", help="The largest rank of them.")
@click.option("--cpu-offload-gb", type=float, metavar="GIB", help="Weights of each GPU in the node's memory.")
@click.option("--limit-mm-per-prompt", metavar="JSON", help="Images, videos …: '{\"image\": 0}' loads no tower.")
@click.option("--speculative-config", metavar="JSON", help="Draft model, EAGLE, MTP or n-grams, as vLLM takes it.")
@click.option("--vllm-version", metavar="X.Y.Z", help="Version to plan for [default: the pinned one].")
@click.option(
    "--usd-per-gpu-hour",
    type=click.FloatRange(min=0, min_open=True),
    metavar="USD",
    callback=_finite,
    help="Price, for tokens a dollar.",
)
@click.option(
    "--decode-only", is_flag=True, help="Speed of generating alone: prompts are read elsewhere and take no time."
)
@click.option("--ideal", is_flag=True, help="The roofline: every rate at its peak, which no engine beats.")
@click.option(
    "--plot",
    metavar="FILE",
    callback=not_empty,
    help="Draw it: .html, a page with sliders; .png, .svg or .pdf (need the extra hpc-serve[plot]).",
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.option("--explain", "explained", is_flag=True, help="Print the arithmetic line by line.")
@click.option("--compare", metavar="GPU,GPU", help="Compare accelerators.")
def plan_command(compare: str | None, as_json: bool, explained: bool, plot: str | None, **options: Any) -> None:
    """Say what fits where and how fast, before anything is queued: how many GPUs, which TP and PP, and why.

    Memory is per GPU of the tightest rank, in the terms vLLM prints when it starts. Speed is that of a replica, by
    requests in flight. TPU slices and CPU nodes are GPUs here: --gpu v5e:4x4, --gpu cpu-spr-2s --gpu-memory 256GiB.

    Words after -- are options of `vllm serve`, as `submit` takes them: -- --max-num-seqs 64
    """
    from hpc_serve.cli import plan_view, show
    from hpc_serve.submit.planning import plan_for

    is_page = plot is not None and plot.lower().endswith(".html")
    if plot and compare is not None and not is_page:
        raise click.UsageError(
            "--plot draws one accelerator: write --gpu NAME in place of --compare, or --plot FILE.html."
        )
    names = [word.strip() for word in compare.split(",") if word.strip()] if compare is not None else [options["gpu"]]
    if not names:
        raise click.BadParameter(f"name at least one accelerator, as in --compare {DEFAULT_GPU},mi300x.")
    results = [plan_for(_plan_request(options | {"gpu": name})) for name in names]
    if plot and is_page and any(result.plan for result in results):
        from hpc_serve.plots.page import write_page

        write_page(results, plot)
    elif plot and results[0].plan:
        from hpc_serve.plots.figure import draw

        draw(results[0], plot)
    if as_json:
        documents = [plan_view.as_json(result) for result in results]
        show.print_json(documents if compare else documents[0])
    elif compare:
        from hpc_serve.cli.plan_compare import print_comparison

        print_comparison(results)
    elif explained:
        plan_view.print_explanation(results[0], _engine_words(options)[0])
    else:
        plan_view.print_plan(results[0], note=assumed_gpu_note())
    if not any(result.plan for result in results):
        raise click.exceptions.Exit(3)


def _plan_request(options: Mapping[str, Any]) -> PlanRequest:
    """What is asked of the plan; without --gpu, for the machines of the site file, as `submit` does."""
    from hpc_serve.plan.choice.vllm_flags import read_fields
    from hpc_serve.plan.engine import EngineConfig, Workload
    from hpc_serve.plan.make import PlanRequest
    from hpc_serve.submit.site_files import read_site
    from hpc_serve.vllm.allowed import check_arguments

    words, own = _engine_words(options)
    site = read_site(os.environ)
    check_arguments(words, allow_unknown=False)
    asked = dict(options) | read_fields(words)  # vLLM's own words win, as they do for `submit`
    engine = {option.name: asked[option.name] for option in fields(EngineConfig) if option.name in asked}
    return PlanRequest(
        model=own.model if own else model_of(options),
        **machines_of(options, site),
        engine=EngineConfig(**{name: value for name, value in engine.items() if value is not None}),
        workload=Workload(**{option.name: asked[option.name] for option in fields(Workload) if option.name in asked}),
        **{
            name: options[name]
            for name in (
                *("target", "input_tokens", "output_tokens", "arrivals", "longest_output_tokens"),
                *("decode_only", "ideal", "usd_per_gpu_hour", "allow_unknown_config_keys"),
            )
        },
    )


def _engine_words(options: Mapping[str, Any]) -> tuple[Sequence[str], SiteModel | None]:
    """The words after --, with those of the site's own model; and that model, if one is named."""
    from hpc_serve.submit.site_files import read_site

    words = (*_given_words(options), *click.get_current_context().meta.get("engine_args", ()))
    own = site_model(model_of(options), read_site(os.environ))
    return (own.engine_args(words) if own else words), own


def _given_words(options: Mapping[str, Any]) -> Iterator[str]:
    for name in _AS_WORDS:
        value = options[name]
        if value is not None and value is not False:
            yield "--" + name.replace("_", "-")
            if value is not True:
                yield str(value)
