"""A batch as a Slurm job of its own, without a GPU: its script, and how it is handed over.

The job runs the same command. It is queued again before its time limit and after a preemption, and goes on then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_serve.rendezvous.files import make_log_dir, make_private_folder
from hpc_serve.submit.request.options import SlurmOptions, expanded
from hpc_serve.submit.script.render import program_directives, render_program
from hpc_serve.submit.site.site import SiteProfile
from hpc_serve.submit.slurm.executor import submit_to_slurm

SIZE = {"cpus_per_task": 2, "mem": "4G"}
"""The job's size, by the names of sbatch's options. The site's is that of GPU nodes."""


def render_batch_script(
    words: Sequence[str], *, slurm: SlurmOptions, site: SiteProfile, environ: Mapping[str, str], home: Path
) -> str:
    """Return the script of a job that runs `hpc-serve batch` with these words. Raises InvalidRequestError."""
    umask = os.umask(0o077)
    os.umask(umask)  # the output is a file of the user's, as without a job
    return render_program(
        "batch.sh.j2",
        title=f"Answers the requests in {words[0]}.",
        directives=program_directives(
            slurm,
            job_name=slurm.job_name or "hpc-serve-batch",
            log_dir=str(_log_dir(home)),
            further=["--no-requeue" if slurm.requeue is False else "--requeue", "--open-mode=append"],
        ),
        modules=site.modules,
        exports={**expanded(site.env, environ), "HPC_SERVE_HOME": str(home)},
        templates_dir=site.templates_dir,
        umask=umask,
        python=sys.executable,
        words=words,
    )


def submit_batch(script: str, home: Path) -> tuple[str, Path]:
    """Hand the script to sbatch; return the job's id and the pattern of its logs. Raises HpcServeError."""
    make_private_folder(home)
    log_dir = make_log_dir(_log_dir(home), called="HPC_SERVE_HOME")
    job_id, _ = submit_to_slurm(script, make_private_folder(home / "batch" / "scripts"))
    return job_id, log_dir / f"{job_id}*.log"


def _log_dir(home: Path) -> Path:
    return home / "batch" / "logs"
