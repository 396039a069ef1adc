"""Takes over from the jobs before this one in a chain (`submit --chain`): once this replica is ready, those drain.

Which jobs come before is written down at the submission. How a replica drains is decided in its own job.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from hpc_serve.errors import HpcServeError
from hpc_serve.job.run.record_keeper import RecordKeeper
from hpc_serve.rendezvous.chain import predecessors_of
from hpc_serve.rendezvous.drain import DrainRequest, ask_to_drain, drain_file, read_drain_request
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ServiceStore

_log = logging.getLogger(__name__)
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
