"""`gateway --on-demand FILE`: reads the list of models that are started when they are asked for."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_serve.cli.submit.request import make_requests
from hpc_serve.cli.submit.submit import submit_command
from hpc_serve.errors import HpcServeError, SiteFileError
from hpc_serve.rendezvous.names import validate_service_name

if TYPE_CHECKING:
    from hpc_serve.gateway.settings import OnDemand

_EXAMPLE = "models: {chat: 70b --time 04:00:00}"


@dataclass(frozen=True, kw_only=True)
class _File:
    services: int | None
    gpus: int | None
    gpu_hours_a_day: int | None
    models: Mapping[str, str]


def read_on_demand(path: Path) -> OnDemand:
    """Return the list in a file, each of whose models can be planned. Raises SiteFileError, naming the file."""
    from hpc_serve.gateway.settings import ListedModel, OnDemand
    from hpc_serve.submit.site.yaml_files import fields_of, read_yaml

    try:
        node = read_yaml(path)
    except (OSError, ValueError) as error:
        raise SiteFileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    found = dict(fields_of(node, _File, path)) if node is not None else {}
    if not found.get("models"):
        raise SiteFileError(f"{path} lists no models. An example: {_EXAMPLE}.")
    most_gpus = found.get("gpus") or math.inf
    models = {}
    for name, text in found["models"].items():
        try:
            words = ("--name", validate_service_name(name), *shlex.split(text))
            models[name] = ListedModel(words=words, gpus=_gpus_of(name, words))
        except (HpcServeError, click.ClickException, click.exceptions.Exit, ValueError) as error:
            said = error.format_message() if isinstance(error, click.ClickException) else error
            raise SiteFileError(f"{path}: {name}: `hpc-serve submit {text}` would fail: {said}") from error
        if models[name].gpus > most_gpus:
            raise SiteFileError(f"{path}: {name} takes {models[name].gpus} GPUs, and `gpus` allows {most_gpus}.")
    return OnDemand(
        models=models,
        most_services=found.get("services") or math.inf,
        most_gpus=most_gpus,
        most_gpu_hours=found.get("gpu_hours_a_day") or math.inf,
    )


def _gpus_of(service: str, words: tuple[str, ...]) -> int:
    """Return the GPUs of a submission. Raises what `submit` raises."""
    from hpc_serve.submit.plans.planning import plan_service
    from hpc_serve.submit.script.render import devices_per_node, replicas_of

    with submit_command.make_context("submit", list(words)) as ctx:
        if ctx.params["wait"]:
            raise click.UsageError("leave out --wait: the gateway waits.")
        requests = make_requests(ctx.params)
    if requests[0].service != service:
        raise click.UsageError("leave out --name: the list has the name.")
    gpus = 0
    for request in requests:
        plan = plan_service(request)
        replicas = request.max_replicas or replicas_of(request, plan)
        gpus += devices_per_node(plan) * plan.layout.num_nodes * replicas
    return gpus
