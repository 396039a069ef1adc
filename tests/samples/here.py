"""The samples that need no cluster: the real commands, run in this process, without a home and a network."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from unittest.mock import patch

from click.testing import CliRunner

from hpc_serve.cli import main

COMMANDS: Mapping[str, str] = {
    "plan": "hpc-serve plan --model 405b --gpu h100-80gb",
    "plan-compare": "hpc-serve plan --model 405b --compare h100-80gb,a100-80gb,mi300x",
}
ENVIRON = {
    "PATH": os.environ.get("PATH", ""),
    "HOME": "/nonexistent",
    "COLUMNS": "100",
    "LANG": "C.UTF-8",
    "HF_HUB_OFFLINE": "1",
}


def output(name: str) -> str:
    """Return what a sample's command prints. Raise RuntimeError if it fails."""
    words = shlex.split(COMMANDS[name])[1:]
    with patch.dict(os.environ, ENVIRON, clear=True):
        done = CliRunner().invoke(main.cli, words, prog_name="hpc-serve")
    if done.exit_code:
        raise RuntimeError(f"{COMMANDS[name]} ended with {done.exit_code}: {done.output}")
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())
