"""The record of a replica, as its head writes it: published early, renewed on a lease, left with the reason of its end.

`rendezvous.record` defines the fields, and `progress` how far a start is. A ready replica of a chain (`submit --chain`)
also takes over here: it asks the jobs before it to drain. Which jobs come before is written down at the submission. How
a replica drains is decided in its own job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hpc_serve.errors import HpcServeError
from hpc_serve.job.machine.allocation import Allocation
from hpc_serve.job.machine.network import LOOPBACK, PortsInUseError, reachable_addresses
from hpc_serve.job.progress import StartStages
from hpc_serve.job.run.node import Node
from hpc_serve.job.run.parts import Outcome, outcome_of
from hpc_serve.rendezvous.fields import array_of
from hpc_serve.rendezvous.ownership import user_name
from hpc_serve.rendezvous.record import EndpointRecord, NodeRecord, Progress, SubmittedJob, predecessors_of
from hpc_serve.rendezvous.start_times import last_start, remember_start
from hpc_serve.rendezvous.store import (
    DrainRequest,
    ServiceStore,
    ask_to_drain,
    default_home,
    drain_file,
    read_drain_request,
    read_entry,
)

_log = logging.getLogger(__name__)
_WRITE_INTERVAL_S = 1.0
_START_INTERVAL_S = 5.0
_LAST_RECORD_S = 20.0


def publish_failure(
    service: str, allocation: Allocation | None, error: HpcServeError, environ: Mapping[str, str]
) -> None:
    """Publish the record of a run that ended before it had one, so that `status` can say why.

    A run that its script starts again gets its record then: until a command is read, the service has no model.
    """
    end = _end_of(outcome_of(error), environ)
    if allocation is None or end["state"] != "failed":
        return
    record = replace(_run_record(service, allocation, environ), **end)
    with contextlib.suppress(HpcServeError, OSError):
        store = ServiceStore(default_home(environ))
        store.write(record, makes_folders=allocation.restart == 0)


def _end_of(outcome: Outcome, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the record's fields after a failed run: it is over, or its script starts it again with other ports."""
    if outcome.exit_code == PortsInUseError.exit_code and environ.get("HPC_SERVE_ATTEMPTS_LEFT", "0") != "0":
        return {"state": "starting", "stage": "starting again with other ports", "reason": outcome.reason}
    return {
        "state": "failed",
        "reason": outcome.reason,
        "failed_part": outcome.failed_part,
        "exit_code": outcome.exit_code,
        "last_log_lines": outcome.last_log_lines,
    }


def first_record(node: Node) -> EndpointRecord:
    """Return the record with which the server of this node begins.

    The servers of a job with one on each node are counted as its replicas.
    """
    allocation, command = node.allocation, node.command
    hosts = [LOOPBACK] if allocation.cluster == "local" else [node.address, *reachable_addresses()]
    counted: dict[str, Any] = {"replica": allocation.node_rank, "replicas_per_job": allocation.num_nodes}
    return replace(
        _run_record(node.options.service, allocation, node.environ),
        model=command.model,
        stand_in=command.stand_in,
        served_model_names=command.served_model_names,
        stage="starting",
        hosts=tuple(dict.fromkeys(hosts)),
        nodes=(NodeRecord(name=allocation.node_name, address=node.address),),
        tensor_parallel_size=command.tensor_parallel_size,
        pipeline_parallel_size=command.pipeline_parallel_size,
        data_parallel_size=command.data_parallel_size,
        gpus_per_node=node.options.gpus_per_node,
        cache=node.cache.words,
        loading=node.loading,
        **(counted if command.serves_on_each_node else {}),
    )


def _run_record(service: str, allocation: Allocation, environ: Mapping[str, str]) -> EndpointRecord:
    """Return the record of a run before its command is read."""
    now = time.time()
    return EndpointRecord(
        service=service,
        model="",
        cluster=allocation.cluster,
        job_id=allocation.job_id,
        restart=allocation.restart,
        replica=allocation.share.index,
        replicas_per_job=allocation.share.count,
        user=user_name(),
        hosts=(),
        port=0,
        num_nodes=allocation.num_nodes,
        started_at=now,
        updated_at=now,
        state_since=now,
        log_dir=environ.get("HPC_SERVE_LOG_DIR"),
    )


def _planned_bytes(store: ServiceStore, record: EndpointRecord) -> int | None:
    """Return the weights of all ranks by the plan, as far as `submit` wrote it down: about the size of their files."""
    with contextlib.suppress(HpcServeError):
        path = store.service_dir(record.service) / "submitted" / f"{array_of(record.job_id)}.json"
        job = read_entry(path, SubmittedJob, record.service, [])
        of_rank = job.predicted.get("weight_bytes", 0.0) if job is not None else 0.0
        ranks = record.tensor_parallel_size * record.pipeline_parallel_size * record.data_parallel_size
        return int(of_rank * ranks) or None
    return None


class RecordKeeper:
    """The only writer of one record. `update` changes the record, `renew` writes it until cancelled.

    `stages` follows its start, and is told of lines and of what is read; it begins anew with each start of the engine.
    """

    def __init__(self, store: ServiceStore, record: EndpointRecord) -> None:
        self.store = store
        self.record = record
        self._counter = record.counter
        self._changed = asyncio.Event()
        self._writing = threading.Lock()
        self.phrase_prefix = ""
        """Words before each phrase, while an engine is started again."""
        self._problem = ""
        self._past = last_start(store.home, record)
        self._planned_bytes = _planned_bytes(store, record)
        self.stages = self._begin_start("nodes")
        self._note_start()
        self._write()

    def update(self, **changes: Any) -> None:
        """Change fields. A change of state is written at once, any other within a second."""
        changed = replace(self.record, **changes)
        if changed == self.record:
            return
        if changed.state != self.record.state:
            is_first = changed.state == "ready" and "start_s" not in changed.measured
            if is_first:
                start_s = time.time() - changed.started_at
                changed = replace(changed, measured={**changed.measured, "start_s": start_s})
            if changed.state == "ready" and not self.stages.is_over:
                self.stages.finish()
            self.record = replace(changed, state_since=time.time())
            self._note_start()
            self._write()
            if is_first:
                self._remember_start()
        else:
            self.record = changed
            self._changed.set()

    def start_again(self, **changes: Any) -> None:
        """Change fields as the engine is started again: its stages begin anew."""
        self._past = last_start(self.store.home, replace(self.record, **changes))
        self.stages = self._begin_start("engine")
        self.update(**changes)

    def set_phrase(self, phrase: str, done: int | None = None, total: int | None = None) -> None:
        """Publish a phrase as the record's `stage`, unless it is a slow rank's, of a stage that the start is past."""
        if self.stages.note_phrase(phrase, done, total) or self.stages.is_over:
            progress = Progress(done=done, total=total) if done is not None and total is not None else None
            self.update(stage=self.phrase_prefix + phrase, progress=progress)

    def add_figures(self, figures: Mapping[str, float]) -> None:
        """Add figures that the engine has logged."""
        if figures:
            self.update(measured={**self.record.measured, **figures})
            self.stages.checkpoint_bytes = self._checkpoint_bytes

    async def renew(self) -> None:
        """Write the record after a change, and every third of the lease without one; while it starts more often."""
        while True:
            interval_s = _START_INTERVAL_S if self.record.state == "starting" else self.record.lease_s / 3
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), interval_s)
            self._changed.clear()
            self._note_start()
            await asyncio.to_thread(self._write)
            await asyncio.sleep(_WRITE_INTERVAL_S)

    def _begin_start(self, first: str) -> StartStages:
        stages = StartStages(self._past, first=first)
        stages.checkpoint_bytes = self._checkpoint_bytes
        return stages

    @property
    def _checkpoint_bytes(self) -> int | None:
        return int(self.record.measured.get("checkpoint_bytes", 0)) or self._planned_bytes

    def _note_start(self) -> None:
        """Say in the record how far the start is. One that has failed is ready at no time."""
        if self.record.state == "starting" or self.stages.is_over:
            self.record = replace(self.record, start=self.stages.record(time.time()))
        elif self.record.start is not None:
            start = replace(self.record.start, time_left_s=None, weights_left_s=None)
            self.record = replace(self.record, start=start)

    def _remember_start(self) -> None:
        """Write down what this start took, for the next one."""
        try:
            remember_start(self.store.home, self.stages.past_start(self.record, time.time()))
        except (HpcServeError, OSError) as error:
            _log.warning("cannot write down how long this start took: %s", error)

    def publish_end(self, outcome: Outcome, environ: Mapping[str, str]) -> None:
        """Say how the run ends, before its parts are taken down."""
        if outcome.is_failure:
            self.update(progress=None, **_end_of(outcome, environ))
        else:
            self.update(state="draining", stage="stopping", progress=None, reason=outcome.reason)

    async def finish(self, within_s: float = _LAST_RECORD_S) -> None:
        """Say that it has stopped, if it was to stop, once nothing of the run is left.

        What has changed is written again and again for `within_s` seconds: a full disk may have room by then.

        A last record that is missing leaves the replica `ready` for everybody, until its lease has run out.
        """
        if self.record.state == "draining":
            self.update(state="stopped", stage="stopped", progress=None, exit_code=0)
        if self._changed.is_set():
            await asyncio.to_thread(self._write)
        deadline = time.monotonic() + within_s
        while self._problem and time.monotonic() < deadline:
            await asyncio.sleep(_WRITE_INTERVAL_S)
            await asyncio.to_thread(self._write)

    def _write(self) -> None:
        # A renewal is written from a thread: it must not replace a newer change.
        with self._writing:
            self._counter += 1
            record = replace(self.record, counter=self._counter, updated_at=time.time())
            problem = ""
            try:
                self.store.write(record, makes_folders=self._counter == 1)
            except OSError as error:  # a service that works goes on when the shared filesystem is full or absent
                problem = str(error)
            if problem and problem != self._problem:
                _log.warning("cannot write the record: %s The replica goes on serving.", problem)
            elif self._problem and not problem:
                _log.info("the record is written again")
            self._problem = problem


# -- the jobs before this one

_POLL_S = 1.0
_LOOK_S = 30.0  # a job before this one may be run again by Slurm
_WAY_DOWN_S = 20.0  # from the last answer to the end of a job


async def take_over(store: ServiceStore, keeper: RecordKeeper) -> None:
    """While this replica is ready, ask those before it to drain. Returns if there can be none."""
    complaint = ""
    while True:
        if keeper.record.state != "ready":
            await asyncio.sleep(_POLL_S)
            continue
        try:
            if not await asyncio.to_thread(drain_predecessors, store, keeper.record):
                return
        except (HpcServeError, OSError) as error:
            if str(error) != complaint:
                complaint = str(error)
                _log.warning("the jobs before this one are not asked to drain: %s", error)
        await asyncio.sleep(_LOOK_S)


def drain_predecessors(store: ServiceStore, own: EndpointRecord, *, now: Callable[[], float] = time.time) -> bool:
    """Ask the same replica of each job before this one to drain, unless it is over. Returns whether there are any.

    Raises StoreError, RecordError.
    """
    found = store.read(own.service)
    before = predecessors_of(own.job_id, found.submitted)
    earlier = {job.job_id: job for job in before if job.time_limit_s}  # of others, the reconciler knows the end
    last = {
        record.job_id: record
        for record in sorted(found.records, key=lambda record: record.restart)
        if record.job_id in earlier and record.replica == own.replica
    }
    for record in last.values():
        path = drain_file(store, record.service, record.name)
        if record.is_final or read_drain_request(path) is not None:
            continue
        ends_at = record.started_at + earlier[record.job_id].time_limit_s
        deadline_s = max(1.0, ends_at - now() - _WAY_DOWN_S)
        by = f"hpc-serve chain: job {own.job_id} has taken over"
        ask_to_drain(path, DrainRequest(by=by, cause="handover", deadline_s=deadline_s, requested_at=now()))
        _log.info("job %s was asked to drain: this one has taken over", record.job_id)
    return bool(earlier)
