"""One run: a service and the load on it, one fault, what became of the requests, and whether the replicas are well."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

from tests.faults.fault import Fault
from tests.faults.outcomes import Outcome, count
from tests.faults.service import Service, hold


def run_fault(fault: Fault, make: Callable[[], Service]) -> Outcome:
    """Let a fault happen to a service that is under load; what became of the requests, or why it could not be done."""
    outcome = Outcome(fault=fault.name, sent=0)
    try:
        with contextlib.closing(make()) as service:
            outcome = _measure(fault, service)
    except Exception as error:
        if not outcome.sent:
            return replace(outcome, broken=traceback.format_exc())
        return replace(outcome, unwell=f"the service could not be ended: {error}")
    return outcome


def _measure(fault: Fault, service: Service) -> Outcome:
    service.start(fault.replicas)
    if fault.is_batch:
        outcome = fault.happens(service)
        return replace(outcome, ready=service.count_ready(fault.ready_after), ready_due=fault.ready_after)
    service.start_load()
    fault_at = time.monotonic()
    let_happen(fault, service)
    service.finish_load()
    outcome = count(
        fault.name,
        service.lines(),
        service.work_lines(),
        fault_at=service.broken_at or fault_at,
        hides_records=fault.hides_records,
        comes_and_goes=fault.comes_and_goes,
        ends_service=fault.ready_after == 0,
    )
    return replace(outcome, ready=service.count_ready(fault.ready_after), ready_due=fault.ready_after)


def let_happen(fault: Fault, service: Service) -> None:
    """Let a fault begin and last, mend it, and let the service settle."""
    begun = fault.happens(service)
    meanwhile = next(begun) if begun is not None else None
    try:
        hold(service.hold_s, meanwhile or (lambda: None))
    finally:
        if begun is not None:
            next(begun, None)
    hold(fault.settle_s)
