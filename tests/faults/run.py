"""One run: a service of two replicas, the load on it, one fault, and what became of the requests."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable

from tests.faults.fault import Fault
from tests.faults.outcomes import Outcome, count
from tests.faults.service import Service


def run_fault(fault: Fault, make: Callable[[], Service]) -> Outcome:
    """Let a fault happen to a service that is under load; what became of the requests, or why it could not be done."""
    try:
        with contextlib.closing(make()) as service:
            return _measure(fault, service)
    except Exception:
        return Outcome(fault=fault.name, sent=0, broken=traceback.format_exc())


def _measure(fault: Fault, service: Service) -> Outcome:
    service.start()
    service.start_load()
    fault_at = time.monotonic()
    fault.happens(service)
    service.finish_load()
    return count(
        fault.name, service.lines(), service.work_lines(), fault_at=fault_at, hides_records=fault.hides_records
    )
