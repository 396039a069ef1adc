"""`plan`: what fits where, before anything is queued."""

from __future__ import annotations

import math
import os
from typing import Any

import click

from hpc_serve.cli.options import GPU_MEMORY, Size
from hpc_serve.plan.hardware.cluster import DEFAULT_GPU

_EXAMPLES = {"model": "405b", "gpu": DEFAULT_GPU, "target": "tpot=50ms", "plot": "plan.png"}


def _not_empty(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse an empty text, as an unset variable of a script gives, rather than take it for an option left out."""
    if value is not None and not value.strip():
        example = f"{param.opts[0]} {_EXAMPLES[param.name or '']}"
        raise click.BadParameter(f"it is empty (an unset variable?); write it as in {example}.", ctx, param)
    return value


def _finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no price; write dollars as in {param.opts[0]} 2.50.", ctx, param)
    return value


@click.command("plan")
@click.option(
    "--model",
    required=True,
    callback=_not_empty,
    help="Catalogue name (405b), Hugging Face id, folder, or a config.json.",
)
@click.option(
    "--gpu",
    metavar="NAME",
    callback=_not_empty,
    help=f"Accelerator to plan for ({DEFAULT_GPU}, mi300x, v5e:4x4, cpu-spr-2s …).",
)
@GPU_MEMORY
@click.option("--nodes", "num_nodes", type=int, metavar="N", help="Number of nodes [default: as few as fit].")
@click.option("--gpus-per-node", type=int, metavar="N", help="GPUs a node has [default: usual for that GPU].")
@click.option("--replicas", type=int, metavar="N", help="Engines that share those GPUs [default: 1].")
@click.option("--concurrency", type=int, default=1, metavar="N", help="Requests of that length held at once.")
@click.option("--tensor-parallel-size", "-tp", type=int, metavar="N", help="GPUs that share each layer.")
@click.option("--pipeline-parallel-size", "-pp", type=int, metavar="N", help="Stages the layers are dealt to.")
@click.option("--max-model-len", type=int, metavar="TOKENS", help="Longest context [default: the model's].")
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
@click.option("--vllm-version", metavar="X.Y.Z", help="Version to plan for [default: the pinned one].")
@click.option(
    "--target",
    metavar="WHAT",
    callback=_not_empty,
    help="throughput, tpot=50ms, ttft=2s: choose layout and replicas for it.",
)
@click.option("--input-tokens", type=click.IntRange(min=1), metavar="N", help="Prompt of a request [default: 1024].")
@click.option("--output-tokens", type=click.IntRange(min=1), metavar="N", help="Answer of a request [default: 256].")
@click.option(
    "--usd-per-gpu-hour",
    type=click.FloatRange(min=0, min_open=True),
    metavar="USD",
    callback=_finite,
    help="Price, for tokens a dollar.",
)
@click.option(
    "--plot",
    metavar="FILE",
    callback=_not_empty,
    help="Draw it: .png, .svg, .pdf or .html (needs the extra hpc-serve[plot]).",
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.option("--explain", "explained", is_flag=True, help="Print the arithmetic line by line.")
@click.option("--compare", metavar="GPU,GPU", help="Compare accelerators.")
def plan_command(
    model: str, gpu: str | None, compare: str | None, as_json: bool, explained: bool, plot: str | None, **options: Any
) -> None:
    """Say what fits where and how fast, before anything is queued: how many GPUs, which TP and PP, and why.

    Memory is per GPU of the tightest rank, in the terms vLLM prints when it starts. Speed is that of a replica, by
    requests in flight. TPU slices and CPU nodes are GPUs here: --gpu v5e:4x4, --gpu cpu-spr-2s --gpu-memory 256GiB.
    """
    from hpc_serve.cli import plan_view, show
    from hpc_serve.submit.site import find_site_file, load_site

    if plot and compare is not None:
        raise click.UsageError("--plot draws one accelerator: write --gpu NAME in place of --compare.")
    if gpu is None and compare is None:  # the machines that `submit` would plan for
        site = load_site(find_site_file(os.environ))
        gpu = site.gpu
        options["gpus_per_node"] = options["gpus_per_node"] or site.gpus_per_node
        options["gpu_memory_bytes"] = options["gpu_memory_bytes"] or site.gpu_memory_bytes
    words = compare.split(",") if compare is not None else [gpu or DEFAULT_GPU]
    names = [word.strip() for word in words if word.strip()]
    if not names:
        raise click.BadParameter(f"name at least one accelerator, as in --compare {DEFAULT_GPU},mi300x.")
    answers = [plan_view.answer(model, name, options) for name in names]
    if plot and answers[0].plan:
        from hpc_serve.plots.figure import draw

        draw(answers[0].question, answers[0].plan, answers[0].traffic, plot)
    if as_json:
        documents = [plan_view.as_json(answer) for answer in answers]
        show.print_json(documents if compare else documents[0])
    elif compare:
        from hpc_serve.cli.plan_compare import print_comparison

        print_comparison(answers)
    elif explained:
        plan_view.print_explanation(answers[0])
    else:
        plan_view.print_plan(answers[0])
    if not any(answer.plan for answer in answers):
        raise click.exceptions.Exit(3)
