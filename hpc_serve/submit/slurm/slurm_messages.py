"""Explains Slurm's words to a person: why a job waits, how it ended, what to do about a refusal. Pure.

Slurm's own word always stands beside the sentence, because the help pages of sites use it. The sentences on reasons,
ends and refusals are data: pending.ini, ends.ini and refusals.ini.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hpc_serve.exit_codes import exit_code_words
from hpc_serve.submit.slurm.slurm import GONE, JobState, Partition

_BEYOND_PARTITION = ("PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit")
# Limits of what one job may have: no other job's end makes room for it.
_PER_JOB_LIMIT = re.compile(r"(QOS|Assoc)(Max\w*Per(Job|Node)|Min\w+)(Limit)?|QOSMin\w+|MaxMemPerLimit")
# Hours of a budget that are used up; those of running jobs (RunMinutes) come free as these end.
_USED_UP_BUDGET = re.compile(r"(QOS|Assoc)Grp\w*?(?<!Run)(Minutes|Mins)(Limit)?")
_LIMIT_OWNERS = {"QOS": "QOS", "Assoc": "account", "MaxJobs": "account"}
_NO_OUTPUT_FILE = 53  # not a signal: what slurmd reports if it cannot set up the script's output
_OUT_OF_MEMORY = 125  # no signal: Slurm's mark on a job or step in which the kernel killed a process for memory
_REFUSED = 1  # no signal either: the exit status of a job that slurmctld refused, so that it never had a node


@cache
def _sections(name: str) -> configparser.RawConfigParser:
    file = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=(";",))
    file.read_string((Path(__file__).parent / name).read_text(encoding="utf-8"))
    return file


def pending_sentence(reason: str) -> str:
    """Why a job waits, for a person, with Slurm's own word in parentheses."""
    if reason.startswith("ReqNodeNotAvail"):
        nodes = reason.partition("UnavailableNodes:")[2]
        return f"nodes it needs are down, drained or reserved{f': {nodes}' if nodes else ''} (ReqNodeNotAvail)"
    if reason.startswith("Nodes required for job are DOWN"):
        return "nodes it needs are down, drained, or kept for other partitions"
    if not (meaning := _meaning(reason)):
        return f"waiting; Slurm's reason is {reason}"
    stays = "; it will not start by itself" if pending_cure(reason, "") else ""
    return f"{meaning}{stays} ({reason})" if reason else meaning


def _meaning(reason: str) -> str:
    if not reason:
        return "waiting for the scheduler to look at it"
    if known := _sections("pending.ini").get(reason, "means", fallback=""):
        return known
    owner = next((owner for prefix, owner in _LIMIT_OWNERS.items() if reason.startswith(prefix)), None)
    if owner is None:
        return ""
    if _PER_JOB_LIMIT.fullmatch(reason):
        return f"its {owner} does not allow one job so much, or so little"
    is_used_up = _USED_UP_BUDGET.fullmatch(reason)
    return f"the hours of its {owner} are used up" if is_used_up else f"a limit of its {owner} is reached"


def pending_cure(reason: str, job_id: str, partitions: Sequence[Partition] = ()) -> str:
    """Return a cure if a job waits for ever for this `reason`; "" if the wait may end by itself.

    A limit of a whole account or QOS comes free as other jobs end. A limit of a single job, and a used-up budget, do
    not.
    """
    cure = _sections("pending.ini").get(reason, "cure", fallback="")
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
    cure = pending_cure(job.reason, job.job_id, partitions)
    return f"{_meaning(job.reason)} ({job.reason}). It asks for {job.asks}. {cure}"


def ended_sentence(job: JobState) -> str:
    """Return how a job ended, for a person, with Slurm's own word."""
    if job.state == "CANCELLED":
        by = f" by user {job.cancelled_by}" if job.cancelled_by else ""
        again = " again" if job.restart else ""
        return f"it was cancelled{by}{'' if job.has_begun else f' before it began{again}'} (CANCELLED)"
    if job.state == "FAILED":
        return f"{_failed_sentence(job)} (FAILED)"
    if job.state == GONE:
        return "its process has ended" if job.source == "process" else _end(GONE)
    return f"{_end(job.state)} ({job.state})"


def _end(state: str) -> str:
    return _sections("ends.ini").get(state, "means", fallback="it ended")


def _failed_sentence(job: JobState) -> str:
    if job.signal == _REFUSED and not job.has_begun:
        is_why = _sections("pending.ini").has_option(job.reason, "cure")
        return f"Slurm refused it when it was submitted{f': {_meaning(job.reason)}' if is_why else ''}"
    if job.signal == _NO_OUTPUT_FILE:
        return f"the node could not open its output file {job.batch_log or ''}".rstrip()
    if job.signal == _OUT_OF_MEMORY:
        return _end("OUT_OF_MEMORY")
    if job.signal:
        return f"its script was ended by signal {job.signal}"
    if job.exit_code:
        words = exit_code_words(job.exit_code)
        return f"its script exited with code {job.exit_code}{f': {words}' if words else ''}"
    return f"Slurm could not run it: {job.reason or 'it gives no reason'}"


def refusal_hint(stderr: str, partitions: Sequence[Partition]) -> str:
    """Return a cure for sbatch's refusal, from the site's partitions; "" if sbatch's own words say it all."""
    names = ", ".join(dict.fromkeys(p.name + (" (default)" if p.is_default else "") for p in partitions))
    about = {"names": names, "limits": _time_limits(partitions), "offers": _offers(partitions)}
    refusals = _sections("refusals.ini")
    for name in refusals.sections():
        if re.search(refusals[name]["said"], stderr, re.IGNORECASE):
            has_other = not partitions and "unknown" in refusals[name]
            return refusals[name]["unknown" if has_other else "cure"].format(**about)
    return ""


def _time_limits(partitions: Sequence[Partition]) -> str:
    return ", ".join(dict.fromkeys(f"{p.name} {p.time_limit}" for p in partitions))


def _offers(partitions: Sequence[Partition]) -> str:
    if not partitions:
        return ""
    kinds = (f"{p.name}: {p.num_nodes} nodes with {p.gres or 'no GPUs'}" for p in partitions)
    return f"Partitions here: {'; '.join(dict.fromkeys(kinds))}. "
