"""Predicts a run from the plan: one replica with its part of the requests in flight, times the replicas.

The plan is made again for the lengths of the run, on the accelerator that the service was submitted for or that a
person names. If neither is known, the prediction says so. It counts no earlier run: later plans are corrected by what
was measured of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hpc_serve.bench.results import notes_on
from hpc_serve.bench.run import Run
from hpc_serve.bench.service import one_line
from hpc_serve.client.replicas.pool import replica_of_file
from hpc_serve.errors import HpcServeError
from hpc_serve.plan.choice.layout import read_fields
from hpc_serve.plan.engine import LAYOUT_SIZES, Arrivals, EngineConfig, Workload
from hpc_serve.plan.hardware import cluster_named
from hpc_serve.plan.make import PlanRequest
from hpc_serve.plan.speed.estimate import SpeedEstimate, case_of
from hpc_serve.plan.speed.measured import Case, MeasuredRun
from hpc_serve.rendezvous.record import EndpointRecord, SubmittedJob
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.plans.planning import plan_for

_MADE_PROMPTS = ("random", "chat")
"""Workloads whose prompts share nothing: a cache of prefixes does not make them faster than planned."""


class NoPlanError(HpcServeError):
    """No plan is of this run: nothing is predicted, or it is not kept for later plans. The text says why."""


_Replica = tuple[EndpointRecord, SubmittedJob | None]
"""A replica of a run, with the job that `submit` wrote down for it."""


def predict(store: ServiceStore, run: Run, *, gpu: str | None) -> dict[str, Any]:
    """Return the prediction of a run under the keys of what is measured, or its `reason` alone if there is none.

    `gpu` names the accelerator as `plan --gpu` takes it.
    """
    try:
        lengths = _lengths(run)
        replicas = _replicas(store, run)
        assert run.pace.max_concurrency is not None
        in_flight = max(1, round(min(run.pace.max_concurrency, len(run.requests)) / len(replicas)))
        speeds = [_planned_anew(one, gpu, lengths, in_flight, _arrivals(run))[0].expected for one in replicas]
    except HpcServeError as error:
        return {"reason": one_line(error)}
    return {
        "output_throughput": sum(speed.output_tokens_per_s for speed in speeds),
        "mean_ttft_ms": 1e3 * statistics.fmean(speed.ttft_s for speed in speeds),
        "mean_tpot_ms": 1e3 * statistics.fmean(speed.tpot_s for speed in speeds),
    }


def measured_run(store: ServiceStore, run: Run, *, gpu: str | None) -> MeasuredRun:
    """Return a run as plans count it: beside the speed that is printed for so many in flight. Raises HpcServeError.

    A run with a remark (bench/results.py) is not kept, and none whose engines may have worked for others.
    """
    lengths, replicas = _lengths(run), _replicas(store, run)
    _check(run, replicas, gpu)
    in_flight = max(1, round(_in_flight(run) / len(replicas)))
    planned = [_planned_anew(one, gpu, lengths, in_flight, _arrivals(run)) for one in replicas]
    case = planned[0][1]
    if any(other != case for _, other in planned):
        raise NoPlanError("its replicas have several layouts.")
    return MeasuredRun(
        case=replace(case, words={**case.words, "vllm": ".".join(run.vllm.split(".")[:2]) or case.words["vllm"]}),
        tokens_per_s=sum(outcome.output_len for outcome in run.outcomes) / run.duration_s,
        printed_tokens_per_s=sum(estimate.expected.output_tokens_per_s for estimate, _ in planned),
        service=run.service,
        at=time.time(),
    )


def _arrivals(run: Run) -> Arrivals:
    """Return how the requests of a run arrive: if all may be under way at once, they come at once and no more do."""
    return "burst" if len(run.requests) <= (run.pace.max_concurrency or 0) else "steady"


def _in_flight(run: Run) -> float:
    """Return the requests of a burst, or how many were under way on average: the last ones leave places empty."""
    if _arrivals(run) == "burst":
        return len(run.requests)
    return sum(outcome.latency_s for outcome in run.outcomes) / run.duration_s


def _check(run: Run, replicas: Sequence[_Replica], gpu: str | None) -> None:
    """Raise NoPlanError if a run does not say how fast the model is on the accelerator."""
    if notes_on(run, {}):
        raise NoPlanError("there are remarks on it.")
    if run.others_tokens is None:
        raise NoPlanError("its engines do not say what they generate.")
    if not run.workload.startswith(_MADE_PROMPTS):
        raise NoPlanError("its prompts may share prefixes.")
    for record, job in replicas:
        own = _gpu_of(job)
        if record.stand_in:
            raise NoPlanError("other weights stand in for its model.")
        if gpu and own and _accelerator(own) != _accelerator(gpu):
            raise NoPlanError(f"it was submitted for {own}, not for {gpu}.")


def _gpu_of(job: SubmittedJob | None) -> str:
    """Return the accelerator that a job was submitted for. Empty if that is not known, or is any CPU."""
    return job.gpu if job and job.gpu != "cpu" else ""


def _accelerator(name: str) -> str:
    """Return the accelerator that a name or its alias stands for."""
    return cluster_named(name, total_bytes=1).accelerator.name


def _replicas(store: ServiceStore, run: Run) -> list[_Replica]:
    """Return the replicas of a run. Raises NoPlanError if no record of them is left."""
    found = store.read(run.service)
    jobs = {job.job_id: job for job in found.submitted}
    records = [record for record in found.records if replica_of_file(record.name) in run.replicas]
    if not records:
        raise NoPlanError("no record of its replicas is left.")
    return [(record, jobs.get(record.job_id)) for record in records]


def _lengths(run: Run) -> tuple[int, int]:
    """Return the tokens of each prompt and of each answer of a run without a rate. Raises NoPlanError."""
    asked = {(request.input_len, request.output_len) for request in run.requests}
    if run.pace.max_concurrency is None or run.pace.is_rate:
        raise NoPlanError("the plan counts requests in flight, and this run has a rate: see --max-concurrency.")
    if len(asked) != 1:
        raise NoPlanError("the plan is of requests of one length, and these differ.")
    ((input_len, output_len),) = asked
    if input_len is None:
        raise NoPlanError("the lengths of these prompts were not known before the run.")
    return input_len, output_len


def _planned_anew(
    replica: _Replica, gpu: str | None, lengths: tuple[int, int], in_flight: int, arrivals: Arrivals
) -> tuple[SpeedEstimate, Case]:
    """Return the speed of a replica by a plan of its layout and its options, and what the speed is of."""
    record, job = replica
    if not (name := gpu or _gpu_of(job)):
        raise NoPlanError("its accelerator is not known: --gpu names it.")
    options = read_fields(job.engine_args) if job else {}
    length = options.pop("max_model_len", sum(lengths))
    options |= {name: getattr(record, name) for name in LAYOUT_SIZES}
    result = plan_for(
        PlanRequest(
            model=record.model,
            gpu=name,
            gpu_memory_bytes=job.gpu_memory_bytes if job else None,
            num_nodes=record.num_nodes,
            gpus_per_node=record.gpus_per_node or None,
            engines_per_node=record.replicas_per_job,
            engine=EngineConfig(**options),
            workload=Workload(concurrency=in_flight, max_model_len=length),
            input_tokens=lengths[0],
            output_tokens=lengths[1],
            arrivals=arrivals,
            measured=False,
        )
    )
    estimate = result.speeds().at(in_flight)
    return estimate, case_of(estimate.roofline, estimate.traffic, estimate.batch)
