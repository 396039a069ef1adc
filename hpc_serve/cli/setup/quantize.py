"""`quantize`: a separate job makes a model's weights 8 bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import click

from hpc_serve.cli.commands import GroupedCommand
from hpc_serve.cli.complete import model_names
from hpc_serve.cli.submit.request import SLURM_OPTIONS, slurm_options
from hpc_serve.printable import printable
from hpc_serve.redact import redact_lines
from hpc_serve.rendezvous.store import default_home
from hpc_serve.submit.request.options import expanded
from hpc_serve.submit.request.request import Cluster
from hpc_serve.submit.site.site_files import read_site

if TYPE_CHECKING:
    from hpc_serve.quantize.request import Scheme

_GROUPS = {
    "Most used": ("scheme", "output", "calibration", "gpus", "partition", "account", "time", "wait", "only_print"),
    "The model's copy": ("samples", "max_tokens", "venv", "cluster", "log_dir", "site"),
    "Slurm": (*SLURM_OPTIONS, "extra"),
}
_VENV = "~/hpc-serve-quantize"


@click.command("quantize", cls=GroupedCommand, groups=_GROUPS)
@click.argument("model", shell_complete=model_names)
@click.option("--int8", "scheme", flag_value="int8", help="Weights and activations of 8 bit integers: also for CPUs.")
@click.option("--fp8", "scheme", flag_value="fp8", help="8 bit floats: for GPUs from Ada, Hopper, MI300 on.")
@click.option("--output", metavar="FOLDER", help="Folder of the new model [default: NAME-int8 or NAME-fp8, here].")
@click.option("--calibration", metavar="FILE", help="Texts to measure activations with, JSONL; int8 is better with it.")
@click.option("--samples", type=int, default=512, metavar="N", help="Calibration samples [default: 512].")
@click.option("--max-tokens", type=int, default=2048, metavar="N", help="Tokens of each, at most [default: 2048].")
@click.option("--gpus", type=int, metavar="N", help="GPUs of the job [default: 1 with --calibration, else none].")
@click.option("--venv", metavar="FOLDER", help=f"Has llm-compressor [default: HPC_SERVE_QUANTIZE_ENV, or {_VENV}].")
@click.option("--cluster", type=click.Choice(get_args(Cluster)), default="slurm", help="Slurm, or this machine alone.")
@click.option("--log-dir", metavar="FOLDER", help="Folder of the log [default: quantize/logs in HPC_SERVE_HOME].")
@click.option("--site", metavar="FILE", help="Your site file [default: ~/.config/hpc-serve/site.yaml].")
@click.option("--print", "only_print", is_flag=True, help="Print the script, and submit nothing.")
@click.option("--wait/--no-wait", default=False, help="Follow its log until it has ended; Ctrl-C only detaches.")
@slurm_options
def quantize_command(model: str, scheme: str | None, only_print: bool, wait: bool, **options: Any) -> None:
    """Quantise the weights of MODEL, a name or a folder, in a job; `hpc-serve submit FOLDER` serves what it makes.

    hpc-serve quantize 8b --fp8 --output 8b-fp8
    """
    from hpc_serve.quantize import submission
    from hpc_serve.quantize.request import QuantizeRequest, render_quantize_script

    if scheme is None:
        raise click.UsageError("Say which: --int8 or --fp8.", click.get_current_context())
    environ, calibration = os.environ, options["calibration"]
    site, home = read_site(environ, options["site"]), default_home(environ)
    env = expanded(site.env, environ)
    title, folder, weight_bytes = submission.find_weights(model, {**environ, **env})
    gpus = options["gpus"] if options["gpus"] is not None else int(calibration is not None)
    request = QuantizeRequest(
        title=title,
        folder=str(folder),
        output=_absolute(options["output"] or f"{Path(title).name}-{scheme}"),
        scheme=cast("Scheme", scheme),
        venv=_absolute(options["venv"] or environ.get("HPC_SERVE_QUANTIZE_ENV") or _VENV),
        weight_bytes=weight_bytes,
        calibration=_absolute(calibration) if calibration else None,
        gpus=gpus,
        **{name: options[name] for name in ("samples", "max_tokens", "cluster")},
        slurm=site.slurm_options(extra=options["extra"], **{name: options[name] for name in SLURM_OPTIONS}),
        modules=site.modules,
        env=env,
        log_dir=_absolute(options["log_dir"] or str(home / "quantize" / "logs")),
        templates_dir=site.templates_dir,
    )
    submission.check_paths(request)
    if only_print:
        click.echo(render_quantize_script(request), nl=False)
        return
    done = submission.submit(request, home)
    click.echo(f"{title} to {scheme}: submitted as job {done.job_id}")
    click.echo(f"  log     {done.log}\n  makes   {done.output}\n  then    hpc-serve submit {done.output}")
    if not wait:
        return
    try:
        for line in redact_lines(submission.lines_until_end(done)):
            click.echo(printable(line), err=True)
    except KeyboardInterrupt:
        click.echo(f"\nNo longer watching; job {done.job_id} goes on. Its log: {done.log}", err=True)
        raise click.exceptions.Exit(130) from None


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
