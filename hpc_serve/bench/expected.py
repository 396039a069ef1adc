"""Predicts a run from the plan: one replica with its part of the requests in flight, times the replicas.

If the accelerator is named, the plan is made again for the lengths of the run. Otherwise the figures that `submit`
wrote down count; they are of one length. If neither will do, the prediction says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hpc_serve.bench.run import Run
from hpc_serve.errors import HpcServeError
from hpc_serve.plan.engine import EngineConfig, Workload
from hpc_serve.plan.make import PlanRequest
from hpc_serve.plan.speed.estimate import estimate_speed
from hpc_serve.plan.speed.traffic import Speed
from hpc_serve.rendezvous.record import EndpointRecord, SubmittedJob
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.plans.planned_speed import planned_request, planned_tokens_per_s
from hpc_serve.submit.plans.planning import plan_for


class _UnknownSpeedError(HpcServeError):
    """Nothing can be predicted; the text says why."""


def predict(store: ServiceStore, run: Run, *, gpu: str | None) -> dict[str, Any]:
    """Return the prediction of a run under the keys of what is measured, or its `reason` alone if there is none.

    `gpu` names the accelerator as `plan --gpu` takes it.
    """
    try:
        lengths = _lengths(run)
        found = store.read(run.service)
        records = [record for record in found.records if record.name.removesuffix(".json") in run.replicas]
        if not records:
            raise _UnknownSpeedError("no record of its replicas is left.")
        assert run.pace.max_concurrency is not None
        in_flight = max(1, round(run.pace.max_concurrency / len(records)))
        if gpu is None:
            rates = [_written_down(record, found.submitted, lengths, in_flight) for record in records]
            return {"output_throughput": sum(rates), "mean_ttft_ms": None, "mean_tpot_ms": None}
        speeds = _planned_anew(records, gpu, lengths, in_flight)
    except HpcServeError as error:
        return {"reason": " ".join(str(error).split())[:300]}
    return {
        "output_throughput": sum(speed.output_tokens_per_s for speed in speeds),
        "mean_ttft_ms": 1e3 * statistics.fmean(speed.ttft_s for speed in speeds),
        "mean_tpot_ms": 1e3 * statistics.fmean(speed.tpot_s for speed in speeds),
    }


def _lengths(run: Run) -> tuple[int, int]:
    """Return the tokens of each prompt and of each answer of a run without a rate. Raises _UnknownSpeedError."""
    asked = {(request.input_len, request.output_len) for request in run.requests}
    if run.pace.max_concurrency is None or run.pace.is_rate:
        raise _UnknownSpeedError("the plan counts requests in flight, and this run has a rate: see --max-concurrency.")
    if len(asked) != 1:
        raise _UnknownSpeedError("the plan is of requests of one length, and these differ.")
    ((input_len, output_len),) = asked
    if input_len is None:
        raise _UnknownSpeedError("the lengths of these prompts were not known before the run.")
    return input_len, output_len


def _written_down(
    record: EndpointRecord, jobs: Sequence[SubmittedJob], lengths: tuple[int, int], in_flight: int
) -> float:
    """Return the tokens/s that a replica's job carries, if they are of requests of these lengths."""
    predicted = next((job.predicted for job in jobs if job.job_id == record.job_id), {})
    of, rate = planned_request(predicted), planned_tokens_per_s(predicted, in_flight)
    if of is None or rate is None:
        raise _UnknownSpeedError(
            "nothing of its speed was written down when it was submitted. Name its accelerator: --gpu h100-80gb."
        )
    if of != lengths:
        raise _UnknownSpeedError(
            f"what was written down is of requests of {of[0]}/{of[1]} tokens. Name its accelerator for others: "
            "--gpu h100-80gb."
        )
    return rate


def _planned_anew(records: Sequence[EndpointRecord], gpu: str, lengths: tuple[int, int], in_flight: int) -> list[Speed]:
    """Return the speed of each replica by a plan of its layout on this accelerator."""
    speeds: dict[PlanRequest, Speed] = {}
    asked = [
        PlanRequest(
            model=record.model,
            gpu=gpu,
            num_nodes=record.num_nodes,
            gpus_per_node=record.gpus_per_node or None,
            engines_per_node=record.replicas_per_job,
            engine=EngineConfig(
                tensor_parallel_size=record.tensor_parallel_size,
                pipeline_parallel_size=record.pipeline_parallel_size,
                data_parallel_size=record.data_parallel_size,
            ),
            workload=Workload(concurrency=in_flight, max_model_len=sum(lengths)),
            input_tokens=lengths[0],
            output_tokens=lengths[1],
        )
        for record in records
    ]
    for request in set(asked):
        result = plan_for(request)
        traffic = replace(result.traffic, concurrency=in_flight)
        speeds[request] = estimate_speed(result.roofline(), traffic, result.chosen.memory).expected
    return [speeds[request] for request in asked]
