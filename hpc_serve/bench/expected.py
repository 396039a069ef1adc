"""Predicts a run from the plan: one replica with its part of the requests in flight, times the replicas.

If the accelerator is named, the plan is made again for the lengths of the run. Otherwise the figures that `submit`
wrote down count; they are of one length. If neither will do, the prediction says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpc_serve.bench.outcome import Prediction, Run
from hpc_serve.errors import HpcServeError
from hpc_serve.plan.engine import EngineConfig, Workload
from hpc_serve.plan.make import PlanRequest
from hpc_serve.plan.speed.estimate import estimate_speed
from hpc_serve.plan.speed.traffic import Speed
from hpc_serve.rendezvous.record import EndpointRecord, SubmittedJob
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.plans.planned_speed import planned_request, planned_tokens_per_s
from hpc_serve.submit.plans.planning import plan_for


def predict(store: ServiceStore, run: Run, *, gpu: str | None) -> Prediction:
    """Return the prediction of a run; `gpu` names the accelerator as `plan --gpu` takes it."""
    asked = {(request.input_len, request.output_len) for request in run.requests}
    if run.pace.max_concurrency is None or run.pace.is_rate:
        return Prediction(reason="the plan counts requests in flight, and this run has a rate: see --max-concurrency.")
    if len(asked) != 1:
        return Prediction(reason="the plan is of requests of one length, and these differ.")
    ((input_len, output_len),) = asked
    if input_len is None:
        return Prediction(reason="the lengths of these prompts were not known before the run.")
    try:
        found = store.read(run.service)
    except HpcServeError as error:
        return Prediction(reason=f"the service's records cannot be read: {error}")
    records = [record for record in found.records if record.name.removesuffix(".json") in run.replicas]
    if not records:
        return Prediction(reason="no record of its replicas is left.")
    in_flight = max(1, round(run.pace.max_concurrency / len(records)))
    if gpu is None:
        return _written_down(records, found.submitted, (input_len, output_len), in_flight)
    return _planned_anew(records, gpu, input_len, output_len, in_flight)


def _written_down(
    records: Sequence[EndpointRecord], jobs: Sequence[SubmittedJob], lengths: tuple[int, int], in_flight: int
) -> Prediction:
    """Return the prediction by the figures that the jobs carry, if those are of requests of these lengths."""
    figures: dict[str, Mapping[str, float]] = {job.job_id: job.predicted for job in jobs}
    rates = []
    for record in records:
        predicted = figures.get(record.job_id, {})
        of, rate = planned_request(predicted), planned_tokens_per_s(predicted, in_flight)
        if of is None or rate is None:
            return Prediction(
                reason="nothing of its speed was written down when it was submitted. Name its accelerator: "
                "--gpu h100-80gb."
            )
        if of != lengths:
            return Prediction(
                reason=f"what was written down is of requests of {of[0]}/{of[1]} tokens. Name its accelerator for "
                "others: --gpu h100-80gb."
            )
        rates.append(rate)
    return Prediction(output_rate=sum(rates))


def _planned_anew(
    records: Sequence[EndpointRecord], gpu: str, input_len: int, output_len: int, in_flight: int
) -> Prediction:
    """Return the prediction by a plan of each replica's layout on this accelerator."""
    speeds: dict[tuple[int, ...], Speed] = {}
    for record in records:
        if (layout := _layout(record)) in speeds:
            continue
        asked = PlanRequest(
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
            workload=Workload(concurrency=in_flight, max_model_len=input_len + output_len),
            input_tokens=input_len,
            output_tokens=output_len,
        )
        try:
            result = plan_for(asked)
            traffic = replace(result.traffic, concurrency=in_flight)
            speeds[layout] = estimate_speed(result.roofline(), traffic, result.chosen.memory).expected
        except HpcServeError as error:
            return Prediction(reason=" ".join(str(error).split())[:300])
    of_each = [speeds[_layout(record)] for record in records]
    return Prediction(
        output_rate=sum(speed.output_tokens_per_s for speed in of_each),
        ttft_ms=1e3 * statistics.fmean(speed.ttft_s for speed in of_each),
        tpot_ms=1e3 * statistics.fmean(speed.tpot_s for speed in of_each),
    )


def _layout(record: EndpointRecord) -> tuple[int, ...]:
    sizes = record.tensor_parallel_size, record.pipeline_parallel_size, record.data_parallel_size
    return *sizes, record.num_nodes, record.gpus_per_node, record.replicas_per_job
