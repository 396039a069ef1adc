"""Published measurements that name their model, layout and engine options: reads data/speed_cases_later.jsonl.

Rows of engines other than vLLM test the ideal roofline only, because the factors are vLLM's.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.accuracy import DATA
from benchmarks.accuracy.speed_case import (
    LONGEST_CONTEXT,
    SHORTEST_OUTPUT,
    Case,
    arriving,
    measured_ttft_s,
    model_spec,
)
from hpc_serve.errors import HpcServeError
from hpc_serve.plan import EngineConfig, MemoryEstimate, accelerator, estimate_memory
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.engine import max_num_batched_tokens
from hpc_serve.plan.speed.estimate import requests_held, running_requests
from hpc_serve.plan.speed.step import Roofline
from hpc_serve.plan.speed.throughput import Traffic

ENGINE = "vLLM"
UNKNOWN_VERSION = "0.11.0"


def load_later(name: str = "speed_cases_later.jsonl") -> list[Case]:
    """All rows of the later file, or of another one in its form."""
    return [later_case(json.loads(line)) for line in (DATA / name).read_text().splitlines()]


def later_case(row: dict[str, Any]) -> Case:
    """One row of the later file, or why it is left out."""
    source = row["source"].removesuffix("/performance/run_1/mlperf_log_summary.txt")
    engine = row["engine"]
    outputs = row["osl"]
    if outputs < SHORTEST_OUTPUT:
        return Case(id=row["id"], source=source, left_out=f"{outputs:.0f} output tokens: time to the first token")
    traffic = arriving(
        Traffic(input_tokens=round(row["isl"]), output_tokens=round(outputs), concurrency=round(row["concurrency"])),
        row,
        lengths_vary=row.get("lengths_vary", False),
    )
    try:
        roofline, memory = _prepared(json.dumps(row, sort_keys=True))
    except HpcServeError as refused:
        return Case(id=row["id"], source=source, left_out=str(refused))
    capacity = requests_held(roofline, traffic, memory)
    if capacity < 1:
        return Case(id=row["id"], source=source, left_out="no request fits beside the weights, by the memory model")
    return Case(
        id=row["id"],
        source=f"{source} ({engine})" if not engine.startswith(ENGINE) else source,
        roofline=roofline,
        memory=memory,
        traffic=traffic,
        max_model_len=_max_model_len(row),
        batch=running_requests(roofline, traffic, capacity),
        replicas=row.get("replicas", 1),
        engine=engine,
        measured=row.get("out_tok_s") or row["req_s"] * outputs,
        measured_ttft_s=measured_ttft_s(row),
        requests=row.get("num_prompts"),
        format_not_told=row.get("format_not_told", False),
    )


def _max_model_len(row: dict[str, Any]) -> int:
    model = model_spec(row["model"], row.get("quantization"))
    return min(model.max_model_len, row.get("max_model_len", LONGEST_CONTEXT))


@cache
def _prepared(text: str) -> tuple[Roofline, MemoryEstimate]:
    row = json.loads(text)
    model = model_spec(row["model"], row.get("quantization"))
    memory_bytes = int(row["memory_gb"] * 1e9) if "memory_gb" in row else None
    device = accelerator(row["accelerator"], total_bytes=memory_bytes)
    length = _max_model_len(row)
    version = row.get("engine_version", UNKNOWN_VERSION) if row["engine"].startswith(ENGINE) else UNKNOWN_VERSION
    engine = EngineConfig(
        vllm_version=version,
        use_v1=row.get("use_v1"),
        enable_expert_parallel=row.get("expert_parallel", False),
        all2all_backend=row.get("all2all_backend", "allgather_reducescatter"),
        kv_cache_dtype=row.get("kv_cache_dtype", "auto"),
        max_num_batched_tokens=row.get("max_num_batched_tokens"),
        max_num_seqs=row.get("max_num_seqs"),
        gpu_memory_utilization=row.get("gpu_memory_utilization"),
        async_scheduling=row.get("async_scheduling"),
        enforce_eager=row.get("enforce_eager", False),
        decode_context_parallel_size=row.get("dcp"),
    )
    if "max_model_len" in row and engine.max_num_batched_tokens is None:
        tokens = max_num_batched_tokens(engine, device, length)
        engine = replace(engine, max_num_batched_tokens=tokens)
    tensor, stages, data = row["tp"], row.get("pp", 1), row.get("dp", 1)
    nodes = row.get("num_nodes", 1)
    layout = Layout(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        num_nodes=nodes,
        data_parallel_size=data,
    )
    memory = estimate_memory(
        model,
        device,
        engine,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        data_parallel_size=data,
        max_model_len=length,
    )
    return Roofline(model, device, engine, layout), memory
