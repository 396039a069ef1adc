"""The short form: faults that need no Slurm, each with a service of its own on this machine, several at once.

`make test` runs it. It holds the faults for less time than the long form, and has no node, network or scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from hpc_serve.demo_model import make_demo_model
from tests.faults.catalogue import FAULTS
from tests.faults.fault import Fault
from tests.faults.outcomes import Outcome
from tests.faults.run import run_fault
from tests.faults.service import Service

SHORT_HOLD_S = 12.0  # a client looks for replicas every 10 s
BOUND_S = 60.0
AT_ONCE = 8


def run_short(folder: Path, *, only: Sequence[str] = ()) -> list[Outcome]:
    """Every fault of the short form, or those named of all that need no Slurm; in the order of the catalogue."""
    model = folder / "model"
    make_demo_model(model)
    faults = [FAULTS[name] for name in only] or [fault for fault in FAULTS.values() if fault.is_short]

    def run(fault: Fault) -> Outcome:
        hold_s = min(fault.hold_s, SHORT_HOLD_S)
        make = partial(Service, folder / fault.name, model, fault, hold_s=hold_s, bound_s=BOUND_S)
        return run_fault(fault, make)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(run, faults))
