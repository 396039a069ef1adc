"""The folder and the environment in which a job's script was submitted, for a program in the job that submits it again.

sbatch hands on the environment of whoever calls it. The script has added its own to that, and Slurm its devices; handed
on from job to job, both would pile up.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

_log = logging.getLogger(__name__)
# What Slurm gives a job for its own GPUs: another job has others.
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")


def take_over_submission_environ() -> None:
    """Go to the folder, and take on the environment, in which the script that started this program was submitted."""
    try:
        lines = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        lines = []
    pairs = (line.partition(b"=") for line in lines)
    of_script = {os.fsdecode(name): os.fsdecode(value) for name, equals, value in pairs if equals}
    environ = submission_environ(os.environ, of_script)
    os.environ.clear()
    os.environ.update(environ)
    try:
        os.chdir(environ.get("SLURM_SUBMIT_DIR", "."))
    except OSError as error:
        _log.warning("the next job is submitted from %s: %s", os.getcwd(), error)


def submission_environ(environ: Mapping[str, str], of_script: Mapping[str, str]) -> dict[str, str]:
    """The environment that the script was given. `environ` is that of a program which it has started.

    Where sbatch is found by the program's PATH alone, which modules may have made, that is kept.
    """
    base = dict(of_script) if "SLURM_JOB_ID" in of_script else dict(environ)
    for name in _DEVICES:
        base.pop(name, None)
    if shutil.which("sbatch", path=base.get("PATH", os.defpath)) is None:
        base["PATH"] = environ.get("PATH", os.defpath)
    return base
