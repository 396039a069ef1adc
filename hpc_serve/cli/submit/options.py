"""The options that `plan`, `render` and `submit` share, and the request they make.

What is not said is taken from the site file, and after it from the planner's or Slurm's own defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, TypeVar, get_args

import click

from hpc_serve.cli.complete import gpu_names, model_names
from hpc_serve.cli.values import Context, Duration, Replicas, Size
from hpc_serve.plan.engine import Arrivals
from hpc_serve.plan.hardware.cluster import DEFAULT_GPU
from hpc_serve.submit.request.request import Backend, Cluster
from hpc_serve.submit.request.sbatch_options import SlurmOptions
from hpc_serve.vllm.allowed import OVERRULE

Function = TypeVar("Function", bound=Callable[..., Any])

_EXAMPLES = {"model": "405b", "gpu": DEFAULT_GPU, "target": "tpot=50ms", "plot": "plan.png"}


def not_empty(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse an empty text, as an unset variable of a script gives, rather than take it for an option left out."""
    if value is not None and not value.strip():
        example = f"{param.opts[0]} {_EXAMPLES[param.name or '']}"
        raise click.BadParameter(f"it is empty (an unset variable?); write it as in {example}.", ctx, param)
    return value


_PLAN_OPTIONS = (
    click.argument("model_argument", metavar="[MODEL]", required=False, shell_complete=model_names),
    click.option(
        "--model",
        callback=not_empty,
        shell_complete=model_names,
        help="Catalogue name (405b), Hugging Face id, folder, or a config.json; also as MODEL alone.",
    ),
    click.option(
        "--gpu",
        metavar="NAME",
        callback=not_empty,
        shell_complete=gpu_names,
        help=f"What the nodes have: mi300x, v5e:4x4, cpu-spr-2s … [default: site file, or {DEFAULT_GPU}].",
    ),
    click.option(
        "--gpu-memory",
        "gpu_memory_bytes",
        type=Size(),
        metavar="SIZE",
        help="Memory of one, as its driver shows it (79.2GiB); of a CPU socket, what the job may use [default: known].",
    ),
    click.option("--nodes", "num_nodes", type=int, metavar="N", help="Number of nodes [default: as few as fit]."),
    click.option(
        "--gpus-per-node", type=int, metavar="N", help="GPUs that a node has; the plan says how many are used."
    ),
    click.option(
        "--concurrency",
        type=int,
        default=1,
        metavar="N",
        help="Requests at once, of full length or as long as said here; those that the cache cannot hold wait.",
    ),
    click.option("--tensor-parallel-size", "-tp", type=int, metavar="N", help="GPUs that share each layer."),
    click.option("--pipeline-parallel-size", "-pp", type=int, metavar="N", help="Stages the layers are dealt to."),
    click.option(
        "--max-model-len",
        type=Context(),
        metavar="TOKENS",
        help="Longest context: 131072, 128k; auto: as long as fits those machines [default: the model's].",
    ),
    click.option(
        "--target",
        metavar="WHAT",
        callback=not_empty,
        help="throughput, tpot=50ms, ttft=2s: choose layout and replicas for it.",
    ),
    click.option(
        "--input-tokens", type=click.IntRange(min=1), metavar="N", help="Prompt of a request [default: 1024]."
    ),
    click.option(
        "--output-tokens", type=click.IntRange(min=1), metavar="N", help="Answer of a request [default: 256]."
    ),
    click.option(
        "--arrivals",
        type=click.Choice(get_args(Arrivals)),
        default="steady",
        help="steady: always so many requests in flight; burst: all at once, then no more [default: steady].",
    ),
    click.option(
        "--longest-output-tokens",
        type=click.IntRange(min=1),
        metavar="N",
        help="In a burst: answers differ in length, --output-tokens on average, at most so many.",
    ),
    click.option(
        "--allow-unknown-config-keys",
        is_flag=True,
        help="Plan although the model's config has sizes that the planner does not know, at your own risk.",
    ),
)


def _slurm_option(option: Field[Any]) -> Callable[[Function], Function]:
    """The command's option for one of sbatch's."""
    name, help_text = option.name.replace("_", "-"), option.metadata["help"]
    if "bool" in str(option.type):
        return click.option(f"--{name}/--no-{name}", default=None, help=help_text)
    kind = int if "int" in str(option.type) else str
    return click.option(f"--{name}", type=kind, metavar=option.metadata["metavar"], help=help_text)


_SLURM_FIELDS = tuple(option for option in fields(SlurmOptions) if "help" in option.metadata)
SLURM_OPTIONS = tuple(option.name for option in _SLURM_FIELDS)
_SLURM_OPTIONS = (
    *(_slurm_option(option) for option in _SLURM_FIELDS),
    click.option("--sbatch", "extra", multiple=True, metavar="--X=Y", help="A further sbatch option; may be repeated."),
)
_JOB_OPTIONS = (
    click.option("--name", "--service", "service", metavar="NAME", help="Name of the service [default: the model's]."),
    click.option(
        "--replicas",
        type=Replicas(),
        metavar="N|MIN:MAX",
        help="Replicas, a job each, one array; 1:4: more while requests wait [default: as --target takes, or 1].",
    ),
    click.option(
        "--idle-stop",
        "idle_stop_s",
        type=Duration(needs_unit=True),
        help="End all jobs after so long without a request (30m); `hpc-serve wake` brings them back.",
    ),
    click.option(
        "--replicas-per-job",
        type=int,
        default=1,
        metavar="K",
        help="So many of them in each job: they divide its node's GPUs evenly [default: 1].",
    ),
    click.option(
        "--keep-up",
        is_flag=True,
        help="Go on across time limits: each job submits the next early enough, and ends once that one is ready.",
    ),
    click.option(
        "--chain",
        type=int,
        default=1,
        metavar="N",
        help="Submit N jobs ahead, each to take over before the time limit of the one before; no job calls sbatch.",
    ),
    click.option(
        "--overlap",
        "overlap_s",
        type=Duration(needs_unit=True),
        help="With --chain: how long before that limit the next may begin [default: 30m, or half of it].",
    ),
    click.option(
        "--tools",
        is_flag=True,
        help="Let requests call tools, and part reasoning from answers: with the parsers that the catalogue knows.",
    ),
    click.option(
        "--stage/--no-stage",
        default=None,
        help="Copy the model to each node first, to local disk or HPC_SERVE_STAGE, and load it from there.",
    ),
    click.option(
        "--backend",
        type=click.Choice(get_args(Backend)),
        default="auto",
        help="What joins the nodes: Ray, or vLLM's own start [default: ray for several nodes, else none].",
    ),
    click.option(
        "--cluster", type=click.Choice(get_args(Cluster)), default="slurm", help="Slurm, or this machine alone."
    ),
    click.option(
        "--engine-restarts",
        type=int,
        metavar="N",
        help="How often an engine that was ready is started again in place when it ends or hangs [default: 3].",
    ),
    *_SLURM_OPTIONS,
    click.option(
        "--env",
        "env",
        multiple=True,
        metavar="NAME=VALUE",
        help="A variable of the job, in its script; may be repeated. No secrets: export those before.",
    ),
    click.option(
        OVERRULE,
        "allow_unknown_vllm_options",
        is_flag=True,
        help="Let options after -- pass that the pinned vLLM does not know: the job has another version, or a plugin.",
    ),
    click.option("--log-dir", metavar="FOLDER", help="Where logs go [default: the service's own folder]."),
    click.option("--site", metavar="FILE", help="Your site file [default: ~/.config/hpc-serve/site.yaml]."),
)


_LAYOUT = ("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_bytes", "replicas_per_job", "backend")
_REQUESTS = ("concurrency", "target", "input_tokens", "output_tokens", "arrivals", "longest_output_tokens")
_UNKNOWN = ("allow_unknown_config_keys", "allow_unknown_vllm_options")
_PLAN_FIRST = ("model_argument", "model", "gpu", "num_nodes", "gpus_per_node", "max_model_len", "concurrency", "target")
PLAN_GROUPS: Mapping[str, Sequence[str]] = {
    "Most used": (*_PLAN_FIRST, "compare", "explained", "as_json"),
    "Layout": (*_LAYOUT, "replicas"),
    "Requests and speed": (*_REQUESTS, "decode_only", "ideal", "usd_per_gpu_hour"),
}
REQUEST_GROUPS: Mapping[str, Sequence[str]] = {
    "Most used": (
        *("model_argument", "model", "service", "gpu", "num_nodes", "gpus_per_node", "max_model_len", "replicas"),
        *("partition", "account", "time", "wait"),
    ),
    "Layout": _LAYOUT,
    "Requests that the layout is chosen for": _REQUESTS,
    "How long it stays": ("keep_up", "chain", "overlap_s", "idle_stop_s", "engine_restarts"),
    "The job": ("tools", "stage", "env", "log_dir", "cluster", "site", "output", *_UNKNOWN),
    "Slurm": (*SLURM_OPTIONS, "extra"),
}
"""Headings of a help, with the names of their parameters."""


def plan_options(function: Function) -> Function:
    """Give a command the options that say what to plan for."""
    return _with_options(function, _PLAN_OPTIONS)


def request_options(function: Function) -> Function:
    """Give a command the options of a request: what to plan for, and how its job starts."""
    return plan_options(_with_options(function, _JOB_OPTIONS))


def slurm_options(function: Function) -> Function:
    """Give a command sbatch's options."""
    return _with_options(function, _SLURM_OPTIONS)


def _with_options(function: Function, options: Sequence[Callable[[Function], Function]]) -> Function:
    for option in reversed(options):
        function = option(function)
    return function
