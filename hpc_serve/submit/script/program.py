"""The script of a job that runs one program on one node: its `#SBATCH` lines, and its text. Pure.

Which program: quantize.sh.j2, batch.sh.j2. The scripts of services are render.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import hpc_serve
from hpc_serve.submit.request.sbatch_options import SlurmOptions
from hpc_serve.submit.script.template import Checked, comment, render_template
from hpc_serve.submit.slurm.slurm import batch_log_option


def render_program(
    template: str,
    *,
    title: str,
    directives: Sequence[str],
    modules: Sequence[str],
    exports: Mapping[str, str],
    templates_dir: str | None,
    umask: int = 0o077,
    **further: Any,
) -> str:
    """Return the text of a script. Without `directives` it runs on this machine. Raises InvalidRequestError."""
    context = {
        "title": comment(title),
        "version": Checked(hpc_serve.__version__),
        "is_slurm": bool(directives),
        "directives": list(map(Checked, directives)),
        "modules": modules,
        "exports": {Checked(name): value for name, value in exports.items()},
        "umask": Checked(f"{umask:03o}"),
    }
    return render_template(template, templates_dir, {**context, **further})


def program_directives(
    slurm: SlurmOptions, *, job_name: str, log_dir: str, gpus: int = 0, further: Sequence[str] = ()
) -> list[str]:
    """Return the words of the `#SBATCH` lines, for one node. sbatch's own words (`slurm.extra`) come last, and win."""
    return [
        f"--job-name={job_name}",
        *slurm.lines("where"),
        "--nodes=1",
        "--ntasks-per-node=1",
        *([slurm.gpu_line(gpus)] if gpus else []),
        *slurm.lines("share"),
        batch_log_option(log_dir, is_array=any(word.startswith(("--array", "-a")) for word in slurm.extra)),
        *(["--exclusive"] if slurm.exclusive else []),
        *further,
        *slurm.extra,
    ]
