"""One run: a service of two replicas, the load on it, one fault, and what became of the requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpc_serve.demo_model import make_demo_model
from tests.faults.fault import Fault
from tests.faults.outcomes import Outcome, count
from tests.faults.service import Service

MakeService = Callable[[Fault, Path, Path], Service]


def run_fault(fault: Fault, service: Service, *, in_flight: int = 16) -> Outcome:
    """Let a fault happen to a service that is under load. Ends the service."""
    try:
        service.start()
        service.start_load(in_flight)
        fault_at = time.monotonic()
        fault.happens(service)
        service.finish_load()
        return count(
            fault.name, service.lines(), service.work_lines(), fault_at=fault_at, hides_records=fault.hides_records
        )
    finally:
        service.end()


def run_faults(
    faults: Sequence[Fault],
    make_service: MakeService,
    folder: Path,
    *,
    at_once: int,
    in_flight: int = 16,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Every fault with a service of its own in `folder`, several at once; in the order of `faults`."""
    model = folder / "model"
    make_demo_model(model)

    def run(fault: Fault) -> Outcome:
        outcome = run_fault(fault, make_service(fault, folder / fault.name, model), in_flight=in_flight)
        on_outcome(outcome)
        return outcome

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(run, faults))
