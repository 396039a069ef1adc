"""The options that `plan`, `render` and `submit` share, and the request they make.

What is not said is taken from the site file, and after it from the planner's or Slurm's own defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from hpc_serve.cli.complete import model_names
from hpc_serve.cli.values import Context, Duration, Replicas, Size
from hpc_serve.plan.engine import Arrivals
from hpc_serve.plan.hardware.cluster import DEFAULT_GPU
from hpc_serve.submit.request import Backend, Cluster
from hpc_serve.submit.sbatch_options import SlurmOptions
from hpc_serve.vllm.allowed import OVERRULE

Function = TypeVar("Function", bound=Callable[..., Any])

if TYPE_CHECKING:
    pass

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


class CommandWithVllmOptions(click.Command):
    """A command that takes words after `--` as options for vLLM."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            ctx.meta["engine_args"] = tuple(args[place + 1 :])
            args = args[:place]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if _is_of_vllm(error.option_name):
                raise click.UsageError(
                    f"{error.option_name} is an option of vLLM: write it after `--`, as in "
                    f"{ctx.command_path} MODEL -- {error.option_name} …",
                    ctx,
                ) from None
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Slurm options": []}
        for parameter in self.get_params(ctx):
            if (line := parameter.get_help_record(ctx)) is not None:
                sections["Slurm options" if parameter.name in (*SLURM_OPTIONS, "extra") else "Options"].append(line)
        for heading, lines in sections.items():
            if not lines:
                continue
            with formatter.section(heading):
                formatter.write_dl(lines)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- VLLM_OPTIONS...]"]


def _is_of_vllm(spelling: str) -> bool:
    from hpc_serve.vllm.arguments import read_arguments

    return read_arguments([spelling])[0].option is not None


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
