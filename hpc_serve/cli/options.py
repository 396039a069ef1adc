"""The options that say what to serve and where, shared by `submit` and `render`, and the request they make.

What is not said is the site file's, and after it the planner's or Slurm's own default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.hardware.cluster import DEFAULT_GPU
from hpc_serve.sizes import parse_size
from hpc_serve.submit.request import ServeRequest
from hpc_serve.vllm.allowed import OVERRULE

Function = TypeVar("Function", bound=Callable[..., Any])

if TYPE_CHECKING:
    _IntType = click.ParamType[int]
else:
    _IntType = click.ParamType


class Size(_IntType):
    """A number of bytes: 79.2GiB (powers of 1024), 80GB (powers of 1000), or plain."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except InvalidRequestError as error:
            self.fail(str(error), param, ctx)


GPU_MEMORY = click.option(
    "--gpu-memory",
    "gpu_memory_bytes",
    type=Size(),
    metavar="SIZE",
    help="Memory of one, as its driver shows it (79.2GiB); of a CPU socket, what the job may use [default: known].",
)
_SLURM = (
    "partition",
    "account",
    "qos",
    "time",
    "constraint",
    "reservation",
    "nodelist",
    "exclude",
    "mem",
    "cpus_per_task",
    "exclusive",
    "job_name",
)
_REQUEST_OPTIONS = (
    click.option("--model", required=True, help="Catalogue name (405b), Hugging Face id, or folder."),
    click.option("--name", "--service", "service", metavar="NAME", help="Name of the service [default: the model's]."),
    click.option("--nodes", "num_nodes", type=int, metavar="N", help="Number of nodes [default: as few as fit]."),
    click.option(
        "--gpus-per-node", type=int, metavar="N", help="GPUs that a node has; the plan says how many are used."
    ),
    click.option(
        "--gpu",
        metavar="NAME",
        help=f"What the nodes have: mi300x, v5e:4x4, cpu-spr-2s … [default: site file, or {DEFAULT_GPU}].",
    ),
    GPU_MEMORY,
    click.option("--tensor-parallel-size", type=int, metavar="N", help="GPUs that share each layer."),
    click.option("--pipeline-parallel-size", type=int, metavar="N", help="Stages the layers are dealt to."),
    click.option("--max-model-len", type=int, metavar="TOKENS", help="Longest context to serve."),
    click.option(
        "--backend",
        type=click.Choice(["auto", "ray", "mp"]),
        default="auto",
        help="What joins the nodes: Ray, or vLLM's own start [default: ray for several nodes, else none].",
    ),
    click.option(
        "--cluster", type=click.Choice(["slurm", "local"]), default="slurm", help="Slurm, or this machine alone."
    ),
    click.option("--partition", metavar="NAME", help="Slurm partition."),
    click.option("--account", metavar="NAME", help="Slurm account."),
    click.option("--qos", metavar="NAME", help="Slurm QOS."),
    click.option("--time", metavar="TIME", help="Time limit: minutes, HH:MM:SS or D-HH:MM:SS [default: 12:00:00]."),
    click.option("--constraint", metavar="FEATURES", help="Features the nodes must have."),
    click.option("--reservation", metavar="NAME", help="Slurm reservation."),
    click.option("--nodelist", metavar="NODES", help="Nodes that must be used."),
    click.option("--exclude", metavar="NODES", help="Nodes that must not be used."),
    click.option("--mem", metavar="SIZE", help="Memory of each node, as Slurm writes it (200G; 0 is all)."),
    click.option("--cpus-per-task", type=int, metavar="N", help="CPU cores of each node."),
    click.option(
        "--exclusive/--no-exclusive", default=None, help="Whole nodes [default: if several, or of TPUs or CPUs]."
    ),
    click.option("--job-name", metavar="NAME", help="Name in the queue [default: hpc-serve-NAME]."),
    click.option("--sbatch", "extra", multiple=True, metavar="--X=Y", help="A further sbatch option; may be repeated."),
    click.option(
        OVERRULE,
        "allow_unknown_vllm_options",
        is_flag=True,
        help="Let options after -- pass that the pinned vLLM does not know: the job has another version, or a plugin.",
    ),
    click.option("--log-dir", metavar="FOLDER", help="Where logs go [default: the service's own folder]."),
    click.option("--site", metavar="FILE", help="Site file [default: ~/.config/hpc-serve/site.yaml]."),
)


class EngineCommand(click.Command):
    """A command whose words after `--` are the engine's, and nothing else is."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            ctx.meta["engine_args"] = tuple(args[place + 1 :])
            args = args[:place]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Slurm options": []}
        for parameter in self.get_params(ctx):
            if (line := parameter.get_help_record(ctx)) is not None:
                sections["Slurm options" if parameter.name in (*_SLURM, "extra") else "Options"].append(line)
        for heading, lines in sections.items():
            with formatter.section(heading):
                formatter.write_dl(lines)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- VLLM_OPTIONS...]"]


def request_options(function: Function) -> Function:
    """Give a command the options of a request."""
    for option in reversed(_REQUEST_OPTIONS):
        function = option(function)
    return function


def make_request(options: Mapping[str, Any], *, environ: Mapping[str, str] = os.environ) -> ServeRequest:
    """The request that a command's options, the environment and the site file make together. Raises HpcServeError."""
    from hpc_serve.submit.site import find_site_file, load_site

    site = load_site(find_site_file(environ, options["site"]))
    log_dir = options["log_dir"] or environ.get("HPC_SERVE_LOG_DIR") or site.log_dir
    return ServeRequest(
        model=options["model"],
        service=options["service"] if options["service"] is not None else default_service(options["model"]),
        gpu=options["gpu"] or site.gpu or DEFAULT_GPU,
        gpu_memory_bytes=options["gpu_memory_bytes"] or (None if options["gpu"] else site.gpu_memory_bytes),
        num_nodes=options["num_nodes"],
        gpus_per_node=options["gpus_per_node"] or (None if options["gpu"] else site.gpus_per_node),
        tensor_parallel_size=options["tensor_parallel_size"],
        pipeline_parallel_size=options["pipeline_parallel_size"],
        max_model_len=options["max_model_len"],
        backend=options["backend"],
        cluster=options["cluster"],
        engine_args=click.get_current_context().meta.get("engine_args", ()),
        allow_unknown_vllm_options=options["allow_unknown_vllm_options"],
        slurm=site.slurm_options(extra=options["extra"], **{name: options[name] for name in _SLURM}),
        environment=site.environment(environ),
        settings=site.job_settings(environ),
        log_dir=os.path.abspath(os.path.expanduser(log_dir)) if log_dir else None,
        templates_dir=site.templates_dir,
    )


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


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on
    """Seconds, or a number with s, m or h: 90, 90s, 10m, 1.5h."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value))
        if match is None:
            self.fail(f"{value!r} is no time: write seconds, or 90s, 10m, 2h.", param, ctx)
        return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
