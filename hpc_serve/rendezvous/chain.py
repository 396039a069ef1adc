"""Chains of jobs that were submitted ahead: which come before a job, and which after it. Pure.

Slurm decides when each begins. job/run/takeover.py decides what a job does about the jobs before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpc_serve.rendezvous.record import SubmittedJob


def predecessors_of(job_id: str, submitted: Sequence[SubmittedJob]) -> list[SubmittedJob]:
    """Return the jobs from which a job takes over, the nearest first."""
    known = {job.job_id: job for job in submitted}
    found: list[SubmittedJob] = []
    before = known[job_id].predecessor if job_id in known else ""
    while before in known and before != job_id and known[before] not in found:
        found.append(known[before])
        before = known[before].predecessor
    return found


def followers_of(job_ids: Sequence[str], submitted: Sequence[SubmittedJob]) -> list[str]:
    """Return the jobs that take over from these, and from those in turn, in order; not these themselves."""
    after = {job.predecessor: job.job_id for job in submitted if job.predecessor}
    found: list[str] = []
    for job_id in job_ids:
        while (job_id := after.get(job_id, "")) and job_id not in found:
            found.append(job_id)
    return [job_id for job_id in found if job_id not in job_ids]
