"""The options that `plan`, `render` and `submit` share, as click's, and their groups in a help.

Most are declared as fields of `ServeRequest` and `SlurmOptions` (submit/request/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from hpc_serve.cli.complete import gpu_names, model_names
from hpc_serve.cli.values import REPLICAS, SIZE, TIME_WITH_UNIT, TOKENS
from hpc_serve.plan.hardware.cluster import DEFAULT_GPU
from hpc_serve.submit.request.option import spellings, unset_value
from hpc_serve.submit.request.request import OPTIONS, ServeRequest
from hpc_serve.submit.request.sbatch_options import SlurmOptions

Function = TypeVar("Function", bound=Callable[..., Any])

_EXAMPLES = {"model": "405b", "gpu": DEFAULT_GPU, "target": "tpot=50ms", "plot": "plan.png"}


def not_empty(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse an empty text, as an unset variable of a script gives, rather than take it for an option left out."""
    if value is not None and not value.strip():
        example = f"{param.opts[0]} {_EXAMPLES[param.name or '']}"
        raise click.BadParameter(f"it is empty (an unset variable?); write it as in {example}.", ctx, param)
    return value


_KINDS: Mapping[str, Any] = {
    "size": SIZE,
    "tokens": TOKENS,
    "time": TIME_WITH_UNIT,
    "replicas": REPLICAS,
    "positive": click.IntRange(min=1),
    "share": click.FloatRange(0, 1, max_open=True),
    "least_one": click.FloatRange(1),
}
_FURTHER: Mapping[str, Mapping[str, Any]] = {
    "gpu": {"callback": not_empty, "shell_complete": gpu_names},
    "target": {"callback": not_empty},
}


def _declared(one: Field[Any], hint: Any) -> Callable[[Function], Function]:
    """Return the command's option for a field of a request, or of sbatch's options. `hint` is the field's type."""
    about = one.metadata
    if hint == bool | None:
        name = spellings(one)[0].removeprefix("--")
        return click.option(f"--{name}/--no-{name}", default=None, help=about["help"])
    words: dict[str, Any] = {"help": about["help"], "metavar": about["metavar"], **_FURTHER.get(one.name, {})}
    if hint is bool:
        return click.option(*spellings(one), one.name, is_flag=True, **words)
    is_choice = get_origin(hint) is Literal
    plain = click.Choice(get_args(hint)) if is_choice else int if int in (hint, *get_args(hint)) else str
    words["type"] = _KINDS.get(about["kind"], plain)
    return click.option(*spellings(one), one.name, default=unset_value(one), **words)


_HINTS = get_type_hints(ServeRequest)
_PLAN_OPTIONS = (
    click.argument("model_argument", metavar="[MODEL]", required=False, shell_complete=model_names),
    click.option(
        "--model",
        callback=not_empty,
        shell_complete=model_names,
        help="Catalogue name (405b), Hugging Face id, folder, or a config.json; also as MODEL alone.",
    ),
    *(_declared(one, _HINTS[one.name]) for one in OPTIONS if one.metadata["of_plan"]),
)
SLURM_FIELDS = tuple(option for option in fields(SlurmOptions) if "help" in option.metadata)
SLURM_OPTIONS = tuple(option.name for option in SLURM_FIELDS)
_SLURM_HINTS = get_type_hints(SlurmOptions)
_SLURM_OPTIONS = (
    *(_declared(one, _SLURM_HINTS[one.name]) for one in SLURM_FIELDS),
    click.option("--sbatch", "extra", multiple=True, metavar="--X=Y", help="A further sbatch option; may be repeated."),
)
_JOB_OPTIONS = (
    *(_declared(one, _HINTS[one.name]) for one in OPTIONS if not one.metadata["of_plan"]),
    click.option(
        "--stage/--no-stage",
        default=None,
        help="Copy the model to each node first, to local disk or HPC_SERVE_STAGE, and load it from there.",
    ),
    *_SLURM_OPTIONS,
    click.option(
        "--env",
        multiple=True,
        metavar="NAME=VALUE",
        help="A variable of the job, in its script; may be repeated. No secrets: export those before.",
    ),
)

_LAYOUT = ("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_bytes", "replicas_per_job", "backend")
_REQUESTS = (
    "concurrency",
    "requests",
    "target",
    "input_tokens",
    "output_tokens",
    "arrivals",
    "longest_output_tokens",
    "prefix_hits",
    "acceptance_length",
)
_UNKNOWN = ("allow_unknown_config_keys", "allow_unknown_vllm_options")
_PLAN_FIRST = ("model_argument", "model", "gpu", "num_nodes", "gpus_per_node", "max_model_len", "concurrency", "target")
PLAN_GROUPS: Mapping[str, Sequence[str]] = {
    "Most used": (*_PLAN_FIRST, "compare", "explained", "as_json"),
    "Layout": (*_LAYOUT, "replicas"),
    "Requests and speed": (*_REQUESTS, "decode_only", "ideal", "measured", "usd_per_gpu_hour"),
}
REQUEST_GROUPS: Mapping[str, Sequence[str]] = {
    "Most used": (
        *("model_argument", "model", "service", "gpu", "num_nodes", "gpus_per_node", "max_model_len", "replicas"),
        *("partition", "account", "time", "wait"),
    ),
    "Layout": _LAYOUT,
    "Requests that the layout is chosen for": _REQUESTS,
    "How long it stays": ("keep_up", "chain", "overlap_s", "idle_stop_s", "engine_restarts"),
    "The job": ("share", "lora", "once", "tools", "stage", "env", "log_dir", "cluster", "site", "output", *_UNKNOWN),
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
