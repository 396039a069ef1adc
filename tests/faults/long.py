"""The long form: every fault, one after the other, on a real Slurm cluster of three nodes that goes at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

from hpc_serve.demo_model import make_demo_model
from tests.cluster import ClusterConfig, SlurmCluster
from tests.cluster.environment import visible_folders
from tests.faults.catalogue import FAULTS
from tests.faults.outcomes import Outcome
from tests.faults.run import run_fault
from tests.faults.slurm_service import SlurmService

BOUND_S = 25.0


def run_long(*, only: Sequence[str] = (), on_outcome: Callable[[Outcome], None]) -> list[Outcome]:
    """Every fault, or those named. Raises ClusterError where the cluster cannot be."""
    outcomes = []
    with SlurmCluster(ClusterConfig(name=f"faults-{os.getpid()}", visible=visible_folders())) as cluster:
        model = cluster.shared / "model"
        make_demo_model(model)
        for fault in [FAULTS[name] for name in only] or FAULTS.values():
            outcomes.append(run_fault(fault, partial(SlurmService, cluster, model, fault, bound_s=BOUND_S)))
            on_outcome(outcomes[-1])
    return outcomes
