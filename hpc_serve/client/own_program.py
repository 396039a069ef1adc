"""Runs a command of this package as a child process, as a person would type it.

A client submits nothing itself, and knows services by their records alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_serve.errors import HpcServeError

# Python imports nothing from the folder it is started in: others may write to it. Python 3.10 has no option for that.
_PROGRAM = "import sys; sys.path[:] = filter(None, sys.path); from hpc_serve.cli.main import main; main()"
_TIMEOUT_S = 400.0  # sbatch is given a minute, and reading how the service is may wait for Slurm as well


class CommandFailedError(HpcServeError):
    """The command did not do its work; the text is what it said."""


def run_command(words: Sequence[str], home: Path) -> str:
    """Run `hpc-serve WORDS` with this home; return what it printed. Raises CommandFailedError."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, *words],
            env=os.environ | {"HPC_SERVE_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandFailedError(str(error)) from error
    if done.returncode != 0:
        raise CommandFailedError(done.stderr.strip().removeprefix("error: "))
    return done.stdout
