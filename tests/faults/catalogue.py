"""Every fault by its name."""

from __future__ import annotations

from tests.faults import batch_row, fault, service_faults, slurm_faults

assert batch_row
assert service_faults
assert slurm_faults  # both enter their faults

FAULTS = fault.FAULTS
