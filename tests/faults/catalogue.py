"""Every fault by its name."""

from __future__ import annotations

from tests.faults import fault, service_faults, slurm_faults

assert service_faults
assert slurm_faults  # both enter their faults

FAULTS = fault.FAULTS
