"""The options that `plan`, `render` and `submit` share, and the request that they make with site file and environment.

Most options are declared as fields of `ServeRequest` and `SlurmOptions` (submit/request/); here they become click's,
in the groups of a help. Values that are not given come from the site file, then from the planner's or Slurm's own
defaults.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from hpc_serve.cli.commands import REPLICAS, SIZE, TIME_WITH_UNIT, TOKENS, FiniteRange, with_plain_sizes
from hpc_serve.cli.complete import gpu_names, model_names
from hpc_serve.errors import InvalidRequestError
from hpc_serve.hub.local_weights import hub_cache
from hpc_serve.plan.hardware import DEFAULT_GPU
from hpc_serve.rendezvous.record import DEFAULT_MACHINE
from hpc_serve.submit.request.options import JobSettings, SlurmOptions, expanded, parse_env, spellings, unset_value
from hpc_serve.submit.request.request import OPTIONS, ServeRequest
from hpc_serve.submit.site.site import SiteProfile
from hpc_serve.submit.site.site_files import SiteModel, load_site_models, read_site
from hpc_serve.vllm.arguments import without

# -- the options

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
    "share": FiniteRange(0, 1, max_open=True),
    "least_one": FiniteRange(1),
}
_FURTHER: Mapping[str, Mapping[str, Any]] = {
    "gpu": {"callback": not_empty, "shell_complete": gpu_names},
    "target": {"callback": not_empty},
}


_HINTS = {**get_type_hints(ServeRequest), **get_type_hints(SlurmOptions)}


def _declared(one: Field[Any]) -> Callable[[Function], Function]:
    """Return the command's option for a field of a request, or of sbatch's options."""
    about, hint = one.metadata, _HINTS[one.name]
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


_PLAN_OPTIONS = (
    click.argument("model_argument", metavar="[MODEL]", required=False, shell_complete=model_names),
    click.option(
        "--model",
        callback=not_empty,
        shell_complete=model_names,
        help="Catalogue name (405b), Hugging Face id, folder, or a config.json; also as MODEL alone.",
    ),
    *(_declared(one) for one in OPTIONS if one.metadata["of_plan"]),
)
_SLURM_FIELDS = tuple(option for option in fields(SlurmOptions) if "help" in option.metadata)
SLURM_OPTIONS = tuple(option.name for option in _SLURM_FIELDS)
_SLURM_OPTIONS = (
    *map(_declared, _SLURM_FIELDS),
    click.option("--sbatch", "extra", multiple=True, metavar="--X=Y", help="A further sbatch option; may be repeated."),
)
_JOB_OPTIONS = (
    *(_declared(one) for one in OPTIONS if not one.metadata["of_plan"]),
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
    *("concurrency", "requests", "target", "input_tokens", "output_tokens", "arrivals", "longest_output_tokens"),
    *("prefix_hits", "acceptance_length"),
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


def machine_options(function: Function) -> Function:
    """Give a command the options that say what one node has."""
    names = ("gpu", "gpus_per_node", "gpu_memory_bytes")
    return _with_options(function, [_declared(one) for one in OPTIONS if one.name in names])


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


# -- the request

_ALSO_OF_VLLM = ("tensor_parallel_size", "pipeline_parallel_size", "max_model_len")
"""Our options that vLLM has by the same names."""


def _model_of(options: Mapping[str, Any]) -> str:
    """The model named, as MODEL or with --model. Raises UsageError where there is none, or there are two."""
    named = [name for name in (options["model_argument"], options["model"]) if name is not None]
    if len(named) == 1 and named[0].strip():
        return str(named[0])
    given = f"Two models are named, {named[0]} and {named[1]}" if len(named) == 2 else "No model is named"
    context = click.get_current_context()
    raise click.UsageError(f"{given}: write {context.command_path} MODEL, or --model MODEL.", context)


def site_model(named: str, site: SiteProfile) -> SiteModel | None:
    """The site's own model of that name; None where it has none. Raises SiteFileError."""
    return load_site_models(site.models).get(named.lower())


def engine_words(options: Mapping[str, Any], site: SiteProfile) -> tuple[tuple[str, ...], SiteModel | None]:
    """The options of vLLM that the running command was given, with those of the site's own model; and that model.

    Our own options of the same names win over those of the site's model.
    """
    words = click.get_current_context().meta.get("engine_args", ())
    own = site_model(_model_of(options), site)
    if own:
        given = {f"--{name.replace('_', '-')}" for name in _ALSO_OF_VLLM if options[name] is not None}
        words = replace(own, vllm_args=without(own.vllm_args, given)).engine_args(words)
    return with_plain_sizes(words), own


def machines_of(options: Mapping[str, Any], site: SiteProfile) -> dict[str, Any]:
    """Return the machines asked for, by PlanRequest's names. If --gpu is given, the site file's words on GPUs do not
    count.
    """
    own = options["gpu"] is None
    if own and site.gpu is None:
        click.get_current_context().meta["gpu_is_assumed"] = True
    return {
        "gpu": options["gpu"] or site.gpu or DEFAULT_GPU,
        "gpu_memory_bytes": options["gpu_memory_bytes"] or (site.gpu_memory_bytes if own else None),
        "num_nodes": options["num_nodes"],
        "gpus_per_node": site.gpus_per_node if own and options["gpus_per_node"] is None else options["gpus_per_node"],
    }


def assumed_gpu_note() -> str | None:
    """Return the note for a plan of nodes if nobody named their GPU."""
    if "gpu_is_assumed" not in click.get_current_context().meta:
        return None
    return (
        f"no GPU is named, so {DEFAULT_GPU} is assumed: write --gpu NAME, or `gpu: NAME` in the site file; "
        "`hpc-serve gpus` lists them"
    )


def make_requests(options: Mapping[str, Any]) -> list[ServeRequest]:
    """Return a request for each kind of machine that --replicas names. Raises HpcServeError."""
    counts = options["replicas"]
    if not isinstance(counts, dict):
        return [make_request(options)]
    if len(counts) > 1:
        if options["cluster"] == "local":
            raise InvalidRequestError(
                f"--cluster local runs on this machine alone, not on {' and '.join(counts)}: use --cluster slurm."
            )
        for name in ("gpu", "gpus_per_node", "gpu_memory_bytes", "partition"):
            if options[name] is not None:
                raise InvalidRequestError(
                    f"--{name.removesuffix('_bytes').replace('_', '-')} would be that of {' and '.join(counts)}: "
                    "leave it out, the site file says what each machine is."
                )
    # The default goes first: of a service that is there, --once adds no default.
    names = sorted(counts, key=lambda name: name != DEFAULT_MACHINE)
    return [make_request({**options, "replicas": {name: counts[name]}}) for name in names]


def make_request(options: Mapping[str, Any]) -> ServeRequest:
    """The request that a command's options, the environment and the site file make together. Raises HpcServeError."""
    environ, counts, machine = os.environ, options["replicas"], DEFAULT_MACHINE
    if isinstance(counts, dict):
        if len(counts) > 1:
            raise InvalidRequestError(
                f"{click.get_current_context().info_name} takes one kind of machine at a time: "
                + ", or ".join(f"--replicas {name}:{count}" for name, count in counts.items())
            )
        machine = next(iter(counts))
        counts = (counts[machine], None)
    site = read_site(environ, options["site"]).of_machine(machine)
    log_dir = options["log_dir"] or environ.get("HPC_SERVE_LOG_DIR") or site.log_dir
    named, (engine_args, own) = _model_of(options), engine_words(options, site)
    replicas, max_replicas = counts or (None, None)
    env = expanded({**site.env, **(own.env if own else {})}, environ) | parse_env(options["env"])
    asked = {one.name: options[one.name] for one in OPTIONS} | machines_of(options, site)
    asked |= {
        "service": options["service"]
        if options["service"] is not None
        else default_service(own.name if own else named),
        "replicas": replicas,
        "log_dir": os.path.abspath(os.path.expanduser(log_dir)) if log_dir else None,
        "site": os.path.abspath(options["site"]) if options["site"] else None,
    }
    return ServeRequest(
        model=own.model if own else named,
        **asked,
        max_replicas=max_replicas,
        machine=machine,
        engine_args=engine_args,
        slurm=site.slurm_options(extra=options["extra"], **{name: options[name] for name in SLURM_OPTIONS}),
        environment=site.environment(environ),
        settings=_job_settings(site, options["stage"], environ),
        env=env,
        templates_dir=site.templates_dir,
        jobs_can_submit=site.jobs_can_submit is not False,
        memory_folders=site.memory_folders,
        hub_cache=str(hub_cache({**environ, **env})),
        offline_nodes=bool(site.offline_nodes),
        weights_help=site.weights_help,
    )


def request_of_plan(options: Mapping[str, Any]) -> ServeRequest:
    """The request that `submit` makes of the options of `plan`. Raises HpcServeError."""
    unset = {one.name: unset_value(one) for one in (*OPTIONS, *_SLURM_FIELDS)}
    further = {"site": None, "log_dir": None, "stage": None, "env": (), "extra": ()}
    # The plan has checked the engine's options, for its version of vLLM.
    return make_request({**unset, **further, **options, "replicas": None, "allow_unknown_vllm_options": True})


def _job_settings(site: SiteProfile, stage: bool | None, environ: Mapping[str, str]) -> JobSettings:
    """The site's, with what was asked of staging: `--stage` takes the folder that the site names, if it names one."""
    settings = site.job_settings(environ)
    if stage is None:
        return settings
    named = settings.stage if settings.stage not in (None, "off") else "on"
    return replace(settings, stage=named if stage else "off")


def default_service(model: str) -> str:
    """A service's name from its model's: the last part of a repository or folder.

    >>> default_service("meta-llama/Llama-3.1-8B-Instruct")
    'Llama-3.1-8B-Instruct'
    """
    path = Path(model)
    last = path.parent.absolute().name if path.name == "config.json" else path.absolute().name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", last).lstrip("._-")[:63]
    if not name:
        raise InvalidRequestError(f"No service can be named after {model!r}: give it a --name.")
    return name
