"""The runs that `bench` measured on this site, in one small file of the home. Plans are corrected by them.

The file is a help and no more. A damaged file counts as none, and of two runs that are kept at once one is lost.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from hpc_serve.errors import HpcServeError
from hpc_serve.plan.speed.measured import MeasuredRun
from hpc_serve.rendezvous.files import make_private_folder, read_json, write_json

FILE = "measured_runs.json"
MOST_RUNS = 100


@dataclass(frozen=True, kw_only=True)
class _Runs:
    runs: tuple[MeasuredRun, ...] = ()


def measured_runs(home: Path) -> tuple[MeasuredRun, ...]:
    """Return the runs that are kept and make sense, the oldest first."""
    with contextlib.suppress(HpcServeError, OSError):
        return tuple(run for run in read_json(_Runs, home / FILE).runs if run.is_sane)
    return ()


def keep_run(home: Path, run: MeasuredRun) -> None:
    """Keep a run beside the MOST_RUNS latest. Raises StoreError."""
    make_private_folder(home, tighten=False)
    write_json(home / FILE, _Runs(runs=(*measured_runs(home), run)[-MOST_RUNS:]))
