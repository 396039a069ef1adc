"""The short form of the fault suite: no fault may cost more than what is known of today's product."""

from __future__ import annotations

from tests.faults.expected import surpasses
from tests.faults.short import run_short
from tests.faults.table import remarks, table


def test_no_fault_costs_more_than_is_known(tmp_path, show_table):
    outcomes = run_short(tmp_path)
    show_table(f"{table(outcomes)}\n{remarks(outcomes)}")
    assert all(outcome.answered for outcome in outcomes)
    assert not {outcome.fault: over for outcome in outcomes if (over := surpasses(outcome))}
