"""Explains Slurm's words to a person: why a job waits, how it ended, what to do about a refusal. Pure.

Slurm's own word always stands beside the sentence, because the help pages of sites use it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpc_serve.exit_codes import exit_code_words
from hpc_serve.submit.slurm.slurm import GONE, JobState, Partition

_PENDING_REASONS = {
    "": "waiting for the scheduler to look at it",
    "Resources": "waiting for free nodes",
    "Priority": "waiting behind jobs of higher priority",
    "Dependency": "waiting for another job, or for its time after one",
    "DependencyNeverSatisfied": "waiting for a job that can no longer end as required; it will never start",
    "BeginTime": "waiting for its begin time (or for the pause after a requeue)",
    "JobHeldUser": "held by its owner; `scontrol release` lets it go",
    "JobHeldAdmin": "held by an administrator",
    "JobHoldMaxRequeue": "held after it was requeued too often; it will not start by itself",
    "AccountingPolicy": "it is over a limit of its account or QOS; it will not start by itself",
    "QOSNotAllowed": "its partition does not take its QOS; it will not start by itself",
    "launch failed requeued held": "requeued and held after a failed launch; it will not start by itself",
    "Licenses": "waiting for a licence",
    "Reservation": "waiting for its reservation to begin",
    "ReservationDeleted": "its reservation no longer exists; it will not start by itself",
    "PartitionDown": "its partition is down",
    "PartitionConfig": "it asks for what its partition does not have; it will not start by itself",
    "PartitionInactive": "its partition is inactive",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows; it will not start by itself",
    "PartitionTimeLimit": "it asks for more time than its partition allows; it will not start by itself",
    "AccountNotAllowed": "its account may not use this partition or QOS; it will not start by itself",
    "BadConstraints": "no node can ever satisfy its constraints; it will not start by itself",
    "InvalidAccount": "its account is not valid; it will not start by itself",
    "InvalidQOS": "its QOS is not valid; it will not start by itself",
    "NodeDown": "a node it needs is down",
    "JobArrayTaskLimit": "the array's limit of tasks at once is reached",
    "Prolog": "the nodes are being prepared (prolog)",
    "Cleaning": "its last run is still being cleared up before it starts again",
    "BurstBufferStageIn": "waiting for its data to be staged in",
    "DeadLine": "its deadline has passed; it will not start",
}
# Reasons that stay until a person acts, and what that person can do. {job} is the job's id.
_NEVER_BY_ITSELF = {
    "DependencyNeverSatisfied": "Submit it without that dependency.",
    "ReservationDeleted": "Submit it with another --reservation, or without one.",
    "PartitionConfig": "Submit it with fewer --nodes, a shorter --time, or to another --partition.",
    "PartitionNodeLimit": "Submit it with fewer --nodes, or to another --partition.",
    "PartitionTimeLimit": "Submit it with a shorter --time, or to another --partition.",
    "AccountNotAllowed": "Submit it with another --account or --partition: `sacctmgr show associations user=$USER`.",
    "AccountingPolicy": "Submit it with less, or with another --account or --qos.",
    "BadConstraints": "Submit it with other --constraint, --gpus-per-node, --mem or --cpus-per-task.",
    "InvalidAccount": "Submit it with another --account: `sacctmgr show associations user=$USER` lists yours.",
    "InvalidQOS": "Submit it with another --qos: `sacctmgr show associations user=$USER format=account,qos`.",
    "QOSNotAllowed": "Submit it with another --qos, or to another --partition.",
    "DeadLine": "Submit it again with a later --deadline.",
    "launch failed requeued held": "See `scontrol show job {job}`; `scontrol release {job}` tries once more.",
    "JobHoldMaxRequeue": "See `scontrol show job {job}`; `scontrol release {job}` tries once more.",
}
_BEYOND_PARTITION = ("PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit")
# Limits of what one job may have: no other job's end makes room for it.
_PER_JOB_LIMIT = re.compile(r"(QOS|Assoc)(Max\w*Per(Job|Node)|Min\w+)(Limit)?|QOSMin\w+|MaxMemPerLimit")
# Hours of a budget that are used up; those of running jobs (RunMinutes) come free as these end.
_USED_UP_BUDGET = re.compile(r"(QOS|Assoc)Grp\w*?(?<!Run)(Minutes|Mins)(Limit)?")
_LIMIT_OWNERS = {"QOS": "QOS", "Assoc": "account", "MaxJobs": "account"}
_NO_OUTPUT_FILE = 53  # not a signal: what slurmd reports if it cannot set up the script's output
_OUT_OF_MEMORY = 125  # no signal: Slurm's mark on a job or step in which the kernel killed a process for memory
_REFUSED = 1  # no signal either: the exit status of a job that slurmctld refused, so that it never had a node

_ENDS = {
    "COMPLETED": "its script ended without an error",
    "TIMEOUT": "Slurm ended it at its time limit",
    "NODE_FAIL": "a node of it failed",
    "OUT_OF_MEMORY": "it used more memory than it had asked Slurm for",
    "PREEMPTED": "it was preempted by a job of higher priority",
    "BOOT_FAIL": "its nodes did not boot",
    "DEADLINE": "its deadline passed",
    "REVOKED": "it was started on another cluster of the federation",
    GONE: "Slurm does not know the job any more, so how it ended is not known",
}


def pending_sentence(reason: str) -> str:
    """Why a job waits, for a person, with Slurm's own word in parentheses."""
    word = reason.partition(",")[0].strip()
    if word == "ReqNodeNotAvail":
        nodes = reason.partition("UnavailableNodes:")[2]
        return f"nodes it needs are down, drained or reserved{f': {nodes}' if nodes else ''} ({word})"
    if reason.startswith("Nodes required for job are DOWN"):
        return "nodes it needs are down, drained, or kept for other partitions"
    if sentence := _PENDING_REASONS.get(reason):
        return f"{sentence} ({reason})" if reason else sentence
    for prefix, owner in _LIMIT_OWNERS.items():
        if reason.startswith(prefix):
            if _PER_JOB_LIMIT.fullmatch(reason):
                return (
                    f"its {owner} does not allow one job so much, or so little; it will not start by itself ({reason})"
                )
            if _USED_UP_BUDGET.fullmatch(reason):
                return f"the hours of its {owner} are used up; it will not start by itself ({reason})"
            return f"a limit of its {owner} is reached ({reason})"
    return f"waiting; Slurm's reason is {reason}"


def pending_cure(reason: str, job_id: str, partitions: Sequence[Partition] = ()) -> str:
    """Return a cure if a job waits for ever for this `reason`; "" if the wait may end by itself.

    A limit of a whole account or QOS comes free as other jobs end. A limit of a single job, and a used-up budget, do
    not.
    """
    cure = _NEVER_BY_ITSELF.get(reason, "")
    if not cure and _PER_JOB_LIMIT.fullmatch(reason):
        cure = "Submit it with what the limit allows (--nodes, --time, --mem), or with another --qos or --account."
    if not cure and _USED_UP_BUDGET.fullmatch(reason):
        cure = "Submit it with another --account or --qos, or ask your site for more hours."
    if reason in ("PartitionTimeLimit", "PartitionConfig") and partitions:
        cure += f" Time limits here: {_time_limits(partitions)}."
    if reason in ("PartitionNodeLimit", "PartitionConfig"):
        cure += f" {_offers(partitions)}`scontrol show partition` lists MaxNodes and MinNodes."
    return cure.format(job=job_id).strip()


def refusal(job: JobState, partitions: Sequence[Partition]) -> str:
    """Return why a job that Slurm took will never start, and a cure; "" if Slurm does not say so.

    Only limits of a single job count. A budget comes back, and a partition that is down comes up.
    """
    is_beyond = job.reason in _BEYOND_PARTITION or _PER_JOB_LIMIT.fullmatch(job.reason)
    if not (job.is_pending and is_beyond) or job.waits_for_one_of_several_partitions:
        return ""
    sentence = pending_sentence(job.reason).replace("; it will not start by itself", "")
    return f"{sentence}. It asks for {job.asks}. {pending_cure(job.reason, job.job_id, partitions)}"


def ended_sentence(job: JobState) -> str:
    """Return how a job ended, for a person, with Slurm's own word."""
    if job.state == "CANCELLED":
        by = f" by user {job.cancelled_by}" if job.cancelled_by else ""
        again = " again" if job.restart else ""
        return f"it was cancelled{by}{'' if job.has_begun else f' before it began{again}'} (CANCELLED)"
    if job.state == "FAILED":
        return f"{_failed_sentence(job)} (FAILED)"
    if job.state == GONE:
        return "its process has ended" if job.source == "process" else _ENDS[GONE]
    return f"{_ENDS.get(job.state, 'it ended')} ({job.state})"


def _failed_sentence(job: JobState) -> str:
    if job.signal == _REFUSED and not job.has_begun:
        why = f": {_PENDING_REASONS[job.reason].partition(';')[0]}" if job.reason in _NEVER_BY_ITSELF else ""
        return f"Slurm refused it when it was submitted{why}"
    if job.signal == _NO_OUTPUT_FILE:
        return f"the node could not open its output file {job.batch_log or ''}".rstrip()
    if job.signal == _OUT_OF_MEMORY:
        return _ENDS["OUT_OF_MEMORY"]
    if job.signal:
        return f"its script was ended by signal {job.signal}"
    if job.exit_code:
        words = exit_code_words(job.exit_code)
        return f"its script exited with code {job.exit_code}{f': {words}' if words else ''}"
    return f"Slurm could not run it: {job.reason or 'it gives no reason'}"


def refusal_hint(stderr: str, partitions: Sequence[Partition]) -> str:
    """Return a cure for sbatch's refusal, from the site's partitions; "" if sbatch's own words say it all."""
    names = ", ".join(dict.fromkeys(p.name + (" (default)" if p.is_default else "") for p in partitions))
    said = stderr.lower()
    if "invalid partition" in said or "no partition specified" in said:
        return f"Partitions here: {names}." if names else "`sinfo` lists the partitions."
    if "invalid account" in said or "account/partition combination" in said:
        return "`sacctmgr show associations user=$USER` lists your accounts; set --account (or in the site file)."
    if "invalid qos" in said:
        return "`sacctmgr show associations user=$USER format=account,qos` lists what you may use; set --qos."
    if "accounting/qos policy" in said:
        return "It is over a limit of your account or QOS: fewer nodes or less --time, or another --qos."
    if "time limit" in said:
        return f"Time limits here: {_time_limits(partitions)}; set --time." if partitions else "Set a shorter --time."
    if "invalid generic resource" in said or "invalid gres" in said:
        return f"{_offers(partitions)}gpu_directive and gres_type in the site file say how this site names its GPUs."
    if "node configuration is not available" in said or "node count specification invalid" in said:
        return f"{_offers(partitions)}See --partition, --nodes, --gpus-per-node, and mem in the site file."
    if "invalid feature" in said:
        return "`sinfo --format=%f` lists the features that --constraint may name."
    if "access/permission denied" in said or "user's group not permitted" in said:
        return f"You may not use that partition. Partitions here: {names}." if names else ""
    return ""


def _time_limits(partitions: Sequence[Partition]) -> str:
    return ", ".join(dict.fromkeys(f"{p.name} {p.time_limit}" for p in partitions))


def _offers(partitions: Sequence[Partition]) -> str:
    if not partitions:
        return ""
    kinds = (f"{p.name}: {p.num_nodes} nodes with {p.gres or 'no GPUs'}" for p in partitions)
    return f"Partitions here: {'; '.join(dict.fromkeys(kinds))}. "
