"""The long form: every fault on a real Slurm cluster of three nodes, with a check of the cluster after each.

Several clusters work side by side, each at one fault at a time. A cluster that a fault leaves unwell is made anew
before the next fault, and the outcome says so.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from hpc_serve.demo_model import make_demo_model
from tests.cluster import ClusterConfig, SlurmCluster
from tests.cluster.environment import visible_folders
from tests.faults.catalogue import FAULTS
from tests.faults.fault import Fault
from tests.faults.outcomes import Outcome
from tests.faults.run import run_fault
from tests.faults.slurm_service import SlurmService


def run_long(*, only: Sequence[str] = (), at_once: int, on_outcome: Callable[[Outcome], None]) -> list[Outcome]:
    """Every fault, or those named, in the order of the catalogue. Raises ClusterError where the cluster cannot be."""
    faults = [FAULTS[name] for name in only] or [fault for fault in FAULTS.values() if not fault.is_apart]
    waiting = deque(faults)
    outcomes: dict[str, Outcome] = {}

    def work(number: int) -> None:
        with SlurmCluster(ClusterConfig(name=f"f{number}-{os.getpid()}", visible=visible_folders())) as cluster:
            for fault in _taken(waiting):
                outcomes[fault.name] = _run_on(cluster, fault)
                on_outcome(outcomes[fault.name])

    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(work, number) for number in range(min(at_once, len(faults)))]
        try:
            for future in futures:
                future.result()
        except BaseException:
            waiting.clear()
            raise
    return [outcomes[fault.name] for fault in faults]


def _taken(waiting: deque[Fault]) -> Iterator[Fault]:
    """The faults that no cluster has taken yet, one by one."""
    with contextlib.suppress(IndexError):
        while True:
            yield waiting.popleft()


def _run_on(cluster: SlurmCluster, fault: Fault) -> Outcome:
    """One fault on a cluster that is well, and is left so."""
    model = cluster.shared / "model"
    if not model.exists():
        make_demo_model(model)
    outcome = run_fault(fault, partial(SlurmService, cluster, model, fault, bound_s=fault.bound_s))
    if unwell := cluster.what_is_unwell() or ("the run broke off" if outcome.broken else ""):
        cluster.down()
        cluster.up()
        said = f"{unwell}: the cluster was made anew"
        outcome = replace(outcome, unwell=f"{outcome.unwell}; {said}" if outcome.unwell else said)
    return outcome
