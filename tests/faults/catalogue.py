"""Every fault by its name."""

from __future__ import annotations

from tests.faults import fault, service_faults, slurm_faults

assert service_faults
assert slurm_faults  # both enter their faults

FAULTS = fault.FAULTS

# What is to be shown here too, once it is built.
MISSING = {
    "two handovers at once": "a unit test shows that one of ten submits (tests/unit/submit/test_keep_up.py)",
    "the same with real vLLM": "all engines here are stubs",
}
