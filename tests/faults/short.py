"""The short form: faults that need no Slurm, each with a service of its own on this machine, several at once.

`make test` runs it. It holds the faults for less time than the long form, and has no node, network or scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.faults.catalogue import FAULTS
from tests.faults.fault import Fault
from tests.faults.outcomes import Outcome
from tests.faults.run import run_faults
from tests.faults.service import Service

SHORT_HOLD_S = 12.0  # a client looks for replicas every 10 s
BOUND_S = 16.0
AT_ONCE = 6


def make_service(fault: Fault, folder: Path, model: Path) -> Service:
    hold_s = min(fault.hold_s, SHORT_HOLD_S)
    return Service(
        folder, model, name=fault.name, hold_s=hold_s, bound_s=BOUND_S + (hold_s if fault.hides_records else 0)
    )


def run_short(folder: Path, *, only: Sequence[str] = ()) -> list[Outcome]:
    """Every fault of the short form, or those named of all that need no Slurm."""
    faults = [FAULTS[name] for name in only] or [fault for fault in FAULTS.values() if fault.is_short]
    return run_faults(faults, make_service, folder, at_once=AT_ONCE)
