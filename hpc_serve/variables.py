"""The environment variables that jobs hand on to the jobs that they submit.

Each part reads its variables by itself. docs/reference/environment-variables.md describes all of them, and a test holds
that page to the code.
"""

from __future__ import annotations

KEPT = (
    *("HPC_SERVE_ENV", "HPC_SERVE_MODEL", "HPC_SERVE_INTERFACE", "HPC_SERVE_TMPDIR", "HPC_SERVE_CACHE_DIR"),
    *("HPC_SERVE_CACHE_SIZE", "HPC_SERVE_CACHE_ARCHIVE_SIZE", "HPC_SERVE_PREFLIGHT", "HPC_SERVE_STALL_S"),
    *("HPC_SERVE_SILENCE_S", "HPC_SERVE_CANARY_S", "HPC_SERVE_STEP_S", "HPC_SERVE_HANG_S", "HPC_SERVE_KILL_WAIT_S"),
    *("HPC_SERVE_ADD_AFTER_S", "HPC_SERVE_LEAVE_AFTER_S", "HF_HOME"),
)
"""A script that is submitted again finds these in its environment as it did the first time."""
