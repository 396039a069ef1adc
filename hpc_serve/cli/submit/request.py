"""The request that the options of a command make, together with the site file and the environment.

Values that are not given come from the site file, then from the planner's or Slurm's own defaults.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_serve.cli.commands import with_plain_sizes
from hpc_serve.cli.submit.options import SLURM_FIELDS, SLURM_OPTIONS
from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.hardware.cluster import DEFAULT_GPU
from hpc_serve.rendezvous.record import DEFAULT_MACHINE
from hpc_serve.submit.request.environment import JobSettings
from hpc_serve.submit.request.option import unset_value
from hpc_serve.submit.request.request import OPTIONS, ServeRequest

if TYPE_CHECKING:
    from hpc_serve.submit.site.site import SiteProfile
    from hpc_serve.submit.site.site_models import SiteModel

_ALSO_OF_VLLM = ("tensor_parallel_size", "pipeline_parallel_size", "max_model_len")
"""Our options that vLLM has by the same names."""


def model_of(options: Mapping[str, Any]) -> str:
    """The model named, as MODEL or with --model. Raises UsageError where there is none, or there are two."""
    named = [name for name in (options["model_argument"], options["model"]) if name is not None]
    if len(named) == 1 and named[0].strip():
        return str(named[0])
    given = f"Two models are named, {named[0]} and {named[1]}" if len(named) == 2 else "No model is named"
    context = click.get_current_context()
    raise click.UsageError(f"{given}: write {context.command_path} MODEL, or --model MODEL.", context)


def site_model(named: str, site: SiteProfile) -> SiteModel | None:
    """The site's own model of that name; None where it has none. Raises SiteFileError."""
    from hpc_serve.submit.site.site_models import load_site_models

    return load_site_models(site.models).get(named.lower())


def engine_words(options: Mapping[str, Any], site: SiteProfile) -> tuple[tuple[str, ...], SiteModel | None]:
    """The options of vLLM that the running command was given, with those of the site's own model; and that model.

    Our own options of the same names win over those of the site's model.
    """
    from hpc_serve.vllm.arguments import without

    words = click.get_current_context().meta.get("engine_args", ())
    own = site_model(model_of(options), site)
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
        "gpus_per_node": options["gpus_per_node"] or (site.gpus_per_node if own else None),
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
    from hpc_serve.hub.hub_settings import hub_cache
    from hpc_serve.submit.request.job_env import expanded, parse_env
    from hpc_serve.submit.site.site_files import read_site

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
    named, (engine_args, own) = model_of(options), engine_words(options, site)
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
    unset = {one.name: unset_value(one) for one in (*OPTIONS, *SLURM_FIELDS)}
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
