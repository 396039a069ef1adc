"""Clusters of test sessions: how they are named, and how those of ended sessions are removed."""

from __future__ import annotations

import os
from pathlib import Path

from tests.cluster.cluster import SlurmCluster
from tests.cluster.config import ClusterConfig

SESSION_PREFIX = "test-"


def session_name() -> str:
    """Return the name of this process's cluster."""
    return f"{SESSION_PREFIX}{os.getpid()}"


def remove_leftovers() -> list[str]:
    """Take down the clusters of processes that no longer exist; return their names."""
    removed = []
    for state in sorted(ClusterConfig().root.glob(f"{SESSION_PREFIX}*")):
        pid = state.name.removeprefix(SESSION_PREFIX).partition("-")[0]  # a second cluster is called test-PID-2
        if not Path(f"/proc/{pid}").exists():
            SlurmCluster.named(state.name).down()
            removed.append(state.name)
    return removed
