"""What is shown of a submission: text for people, JSON for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_serve.submit.services.services import Submission

_LOGS_SHOWN = 4


def submission_json(submission: Submission) -> dict[str, Any]:
    """A submission under stable keys, with the other replicas of its service, and in what its engine differs."""
    job, plan = submission.job, submission.plan
    ahead = [
        {"job_id": one.job_id, "predecessor": one.predecessor, "log": one.log_path}
        for one in submission.jobs
        if one.predecessor
    ]
    shared = {"shared_with": submission.shared_with, "folder": submission.folder}
    return {
        "service": job.service,
        "model": job.model,
        "cluster": job.cluster,
        "job_id": submission.job_id,
        "is_there": submission.is_there,
        "machine": job.machine,
        "replicas": [
            {"name": name, "job_id": one.job_id, "log": one.log_path}
            for one in submission.jobs
            if not one.predecessor
            for name in one.replica_names
        ],
        "script": job.script,
        "log": job.log_path,
        "num_nodes": plan.layout.num_nodes,
        "gpus_per_node": plan.layout.gpus_per_node,
        "tensor_parallel_size": plan.layout.tensor_parallel_size,
        "pipeline_parallel_size": plan.layout.pipeline_parallel_size,
        "data_parallel_size": plan.layout.data_parallel_size,
        "replicas_wanted": plan.replicas,
        "weights_note": submission.weights_note,
        "queue": submission.queue,
        "machines_note": submission.machines_note,
        **({"memory": submission.memory} if submission.memory else {}),
        **({"ahead": ahead} if ahead else {}),
        **(shared if submission.shared_with else {}),
        "other_jobs": [
            {"job_id": other.job_id, "state": other.state, "differs": list(submission.differing.get(other.job_id, ()))}
            for other in submission.others
        ],
    }


def submission_text(submission: Submission, *, gpu_note: str | None = None) -> str:
    """What was submitted, and what to type next."""
    from hpc_serve.rendezvous.record import DEFAULT_MACHINE
    from hpc_serve.submit.services.wanted_sentence import bounds_sentence

    job, plan = submission.job, submission.plan
    layout = plan.layout.sizes()
    nodes = f"{plan.layout.num_nodes} node{'s' if plan.layout.num_nodes > 1 else ''}"
    machines = (
        f"{nodes} x {plan.layout.gpus_per_node} {plan.accelerator.unit}{'s' if plan.layout.gpus_per_node > 1 else ''}"
        if job.cluster == "slurm"
        else "this machine"
    )
    count, jobs = submission.num_replicas, len(submission.jobs)
    per_job = f", {job.replicas_per_job} on one node" if job.replicas_per_job > 1 else ""
    each = f"{count} replicas{per_job}, each " if count > 1 else ""
    others = submission.others
    chain = [one.job_id for one in submission.jobs if one.predecessor]
    wanted = submission.wanted
    follows_load = wanted is not None and (wanted.least < wanted.most or wanted.idle_stop_s is not None)
    keeps_up = wanted is not None and wanted.keep_up
    what = "is there already, as" if submission.is_there else "submitted as"
    if job.machine != DEFAULT_MACHINE:
        machines += f" of {job.machine}"
    lines = [
        f"{job.service}: {what} job {submission.job_id} ({each}{machines}, {layout})",
        f"  model   {job.model}",
        *([f"  replicas {bounds_sentence(wanted)}"] if wanted is not None and follows_load else []),
        *(["  keeps up across time limits: each job submits the next before its own ends"] if keeps_up else []),
        *([f"  ahead   {len(chain)} jobs take over in time: {', '.join(chain)}"] if chain else []),
        *(
            [f"  shared  with group {submission.shared_with}, who name it {submission.folder}"]
            if submission.shared_with
            else []
        ),
        *([f"  memory  {submission.memory}"] if submission.memory else []),
        *([f"  queue   {submission.queue}"] if submission.queue else []),
        *(f"  log     {one.log_path}" for one in submission.jobs[:_LOGS_SHOWN]),
        *([f"          … and those of {jobs - _LOGS_SHOWN} more"] if jobs > _LOGS_SHOWN else []),
        f"  next    hpc-serve wait {job.service}     hpc-serve logs {job.service} --follow",
        f"          hpc-serve status {job.service}   hpc-serve stop {job.service}",
    ]
    if tools := _tools_note(job.model, job.engine_args):
        lines.append(f"  tools   {tools}")
    lines += [f"  note    {note}" for note in (submission.weights_note, submission.machines_note) if note]
    if gpu_note and job.cluster == "slurm":
        lines.append(f"  note    {gpu_note}")
    if others and not submission.is_there:
        there = ", ".join(f"job {other.name} ({other.state})" for other in others)
        ahead = {other.successor_job_id for other in others}
        before = sum(other.job_id not in ahead for other in others)
        now = max(before + count, wanted.count if wanted is not None else 0)
        lines += [
            f"  note    {job.service} has {now} replicas now; it had {before} before, {there};",
            f"          if that is too many: hpc-serve stop {submission.job_id}",
        ]
    for job_id, words in submission.differing.items():
        lines.append(f"  note    its engine is not that of job {job_id}, so answers may differ: {'; '.join(words)}")
    return "\n".join(lines)


def _tools_note(model: str, engine_args: Sequence[str]) -> str:
    """Which parsers the engine has for calls of tools and reasoning, or how to have them; "" where none is known."""
    from hpc_serve.plan.catalog import parsers_of
    from hpc_serve.vllm.arguments import read_arguments, value_of

    given = read_arguments(engine_args)
    names = ("--tool-call-parser", "--reasoning-parser")
    if has := [f"{name} {value}" for name in names if (value := value_of(given, name))]:
        return " ".join(has)
    known = parsers_of(model).vllm_args
    return f"not set up; --tools adds {' '.join(known)}" if known else ""
