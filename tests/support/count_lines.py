"""Counts which lines of hpc_serve run in the programs that tests start. envs/venv.sh puts this file into `.venv`, where
every Python imports it; it acts only where COVERED_CHECKOUT names a checkout, as `make coverage` does.

Engines, Ray and their workers are left alone: they run nothing of hpc_serve but the gate, which has tests of its own,
and Python 3.11 calls a tracer for every call, in whatever module: 37 % more CPU time for `vllm serve`.
"""

from __future__ import annotations

import os
import sys

PROGRAMS = ("hpc-serve", "hpc_serve", "ask.py")


def is_ours(argv: list[str]) -> bool:
    """Whether a command line runs hpc_serve: its command, a module or a script of it, or code that names it."""
    return any(
        os.path.basename(word).startswith(PROGRAMS) or (" " in word and "hpc_serve" in word) for word in argv[1:4]
    )


def start(checkout: str) -> None:
    """Count until this program ends; nothing happens where coverage is not installed or its folder is closed."""
    try:
        import coverage
    except ImportError:
        return
    if os.access(f"{checkout}/.coverage", os.W_OK):
        coverage.Coverage(config_file=f"{checkout}/setup.cfg", data_suffix=True, auto_data=True).start()


if "COVERED_CHECKOUT" in os.environ and is_ours(sys.orig_argv):
    start(os.environ["COVERED_CHECKOUT"])
