"""Decides whether a job gets another run after the end of a run. The batch script of `submit --requeue` then asks Slurm
for it.

    python -m hpc_serve.job.rerun --service NAME --most 5

It prints the job's id and ends with 0 if so, else with 1; on standard error it says why. It calls no Slurm command.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from hpc_serve.errors import HpcServeError
from hpc_serve.job.machine.allocation import read_allocation, set_up_logging
from hpc_serve.rendezvous.record import EndpointRecord, followers_of
from hpc_serve.rendezvous.store import ServiceStore, default_home

_log = logging.getLogger("hpc_serve.job.rerun")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_serve.job.rerun", description=__doc__)
    parser.add_argument("--service", required=True)
    parser.add_argument("--most", type=int, required=True, metavar="N", help="how often Slurm may run the job again")
    options = parser.parse_args(argv)
    set_up_logging(sys.stderr)
    try:
        allocation = read_allocation(os.environ)
        store = ServiceStore(default_home(os.environ))
        job_id, restart = allocation.job_id, allocation.restart
        found = store.read(options.service)
    except HpcServeError as error:
        _log.error("whether this job shall run again is not known, so Slurm is not asked: %s", error)
        return 1
    records = [record for record in found.records if (record.job_id, record.restart) == (job_id, restart)]
    ready = {record.job_id for record in found.records if record.state == "ready"}
    # A job of a chain waits for its time; a successor that was submitted for this job comes at once.
    at_once = {job.job_id for job in found.submitted if not job.time_limit_s and job.end is None}
    ended = {record.job_id for record in found.records if record.is_final}
    followers = followers_of([job_id], found.submitted)
    next_job = next((one for one in followers if one in ready or one in at_once - ended), "")
    if why_not := why_no_rerun(records, restart=restart, most=options.most, successor=next_job):
        _log.error("Slurm is not asked to run job %s again: %s", job_id, why_not)
        return 1
    reason = next(filter(None, (record.reason for record in records if is_worth_rerun(record))), "its launcher ended")
    _log.warning("asking Slurm to run job %s again (%d of %d): %s", job_id, restart + 1, options.most, reason)
    print(job_id)
    return 0


def why_no_rerun(records: Sequence[EndpointRecord], *, restart: int, most: int, successor: str = "") -> str:
    """Why a job shall not run again after its run number `restart`, from 0, failed; empty if it shall.

    `records` are those of the run's replicas, `successor` is a job that takes over. Slurm counts every run, also those
    after a preemption or a node's failure.
    """
    if successor:
        return f"job {successor} takes over from it"
    if restart >= most:
        return f"it has been run again {restart} times already, for whatever reason, and {most} are the most"
    if not any(map(was_ready, records)):
        return "no engine of it was ready in this run, so the next run would fail as well"
    if not any(map(is_worth_rerun, records)):
        return "it was asked to end"
    return ""


def was_ready(record: EndpointRecord) -> bool:
    return "start_s" in record.measured


def is_worth_rerun(record: EndpointRecord) -> bool:
    """Whether a replica that had been ready failed, or its launcher was killed, and nobody had asked it to end."""
    return was_ready(record) and record.state not in ("stopped", "draining") and not record.drain_cause


if __name__ == "__main__":
    sys.exit(main())
