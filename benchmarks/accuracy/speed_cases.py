"""Published measurements that the speed estimate is fitted on: `python -m benchmarks.accuracy.speed_cases`.

data/speed_cases.jsonl has the figures, each with its source. This module decides what a row describes (catalogue entry,
replicas, lengths) and which rows are left out. speed_scores.py scores and fits. speed_cases_later.py reads rows that
say this themselves.
"""

from __future__ import annotations

import json
import re
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
from hpc_serve.plan import EngineConfig, MemoryEstimate, accelerator, estimate_memory
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.speed.estimate import requests_held, running_requests
from hpc_serve.plan.speed.step import Roofline
from hpc_serve.plan.speed.throughput import Traffic

MODELS = {
    "gpustack-deepseek": "deepseek-ai/DeepSeek-R1",
    "gpustack-glm-4.5-air": "zai-org/GLM-4.5-Air",
    "gpustack-glm-4.x": "zai-org/GLM-4.6",
    "gpustack-gpt-oss-120b": "openai/gpt-oss-120b",
    "gpustack-gpt-oss-20b": "openai/gpt-oss-20b",
    "gpustack-qwen3-14b": "Qwen/Qwen3-14B",
    "gpustack-qwen3-235b": "Qwen/Qwen3-235B-A22B",
    "gpustack-qwen3-32b": "Qwen/Qwen3-32B",
    "gpustack-qwen3-8b": "Qwen/Qwen3-8B",
    "dstack-405b": "meta-llama/Llama-3.1-405B-FP8",
    "tpu-v6e8": "meta-llama/Llama-3.3-70B-Instruct",
}
GPUS = {
    "H100": "h100-80gb",
    "H200": "h200-141gb",
    "A100": "a100-80gb",
    "MI300X": "mi300x",
    "MI325X": "mi325x",
    "L40S": "l40s",
    "TPU v6e": "v6e",
}
CHAT_INPUT_TOKENS = 300
"""gpustack's rows with shorter prompts are recorded conversations (ShareGPT). Their answers differ in length."""
MLPERF_INPUT_TOKENS = {"llama2-70b-99": 294, "llama3.1-8b": 778}
"""Mean prompt lengths of the tasks' data sets (OpenOrca, CNN-DailyMail), from the MLPerf inference rules."""


def load() -> list[Case]:
    """All rows of the file."""
    return [case(json.loads(line)) for line in (DATA / "speed_cases.jsonl").read_text().splitlines()]


def case(row: dict[str, Any]) -> Case:
    """One row of the file, or why it is left out."""
    source = source_of(row)
    reason = why_left_out(row)
    if reason:
        return Case(id=row["id"], source=source, left_out=reason)
    gpu = next(name for part, name in GPUS.items() if part in row["gpu"])
    tensor, replicas = _ranks(row)
    outputs = row.get("osl") or row["out_tok_s"] / row["req_s"]
    asked = re.search(r"--max-model-len (\d+)", row.get("command") or "")
    length = min(model_spec(*_model(row)).max_model_len, int(asked[1]) if asked else LONGEST_CONTEXT)
    roofline, memory = _prepared(*_model(row), gpu, tensor, length, *_engine(row))
    traffic = arriving(
        Traffic(
            input_tokens=round(row.get("isl") or MLPERF_INPUT_TOKENS[row["model"]]),
            output_tokens=round(outputs),
            concurrency=in_flight(row),
        ),
        row,
        lengths_vary=row["id"].startswith("gpustack") and row["isl"] < CHAT_INPUT_TOKENS,
    )
    return Case(
        id=row["id"],
        source=source,
        roofline=roofline,
        memory=memory,
        traffic=traffic,
        max_model_len=length,
        batch=running_requests(roofline, traffic, requests_held(roofline, traffic, memory)),
        replicas=replicas,
        measured=row.get("out_tok_s") or row["req_s"] * outputs,
        measured_ttft_s=measured_ttft_s(row),
        requests=row.get("num_prompts"),
    )


def source_of(row: dict[str, Any]) -> str:
    """The publication of a row: a page, a file of figures, or a task of an MLPerf round with all its submissions."""
    if row["id"].startswith("mlperf"):
        return f"mlperf {row['scenario'].split()[1]} {row['model']}"
    return str(row["source"]).removeprefix("gpustack/gpustack docs/performance-lab/").removesuffix(".md")


def why_left_out(row: dict[str, Any]) -> str | None:
    """The reason why a row cannot be compared, or None."""
    command = row.get("command") or ""
    if (row.get("osl") or SHORTEST_OUTPUT) < SHORTEST_OUTPUT:
        return f"{row['osl']:.0f} output tokens: time to the first token, not throughput"
    if "speculative" in command:
        return "speculative decoding"
    if not any(part in row["gpu"] for part in GPUS):
        return f"{row['gpu']} is not in the catalogue"
    gpus = re.match(r"(\d+) ×", row["gpu"])
    if gpus and int(gpus[1]) > 1 and "-tp" not in command:
        return f"the command asks for one GPU, the page speaks of {gpus[1]}"
    if "gpt-oss-20b" in row["id"] and "gpt-oss-120b" in command:
        return "the command serves another model than the page"
    return None


def in_flight(row: dict[str, Any]) -> int:
    """Requests in flight on average.

    Where requests arrive at a rate, the file has their peak, and the mean follows from the latencies by Little's law.
    MLPerf's offline scenario sends all requests at once.
    """
    if "concurrency" not in row:
        return 10_000
    if row.get("tpot_ms_mean") and row["concurrency"] < row["num_prompts"] and "max-concurrency" not in row["scenario"]:
        latency_ms = row["ttft_ms_mean"] + row["tpot_ms_mean"] * (row["osl"] - 1)
        return max(1, round(float(row["req_s"] * latency_ms) / 1000))
    return int(row["concurrency"])


def _ranks(row: dict[str, Any]) -> tuple[int, int]:
    """(tensor parallel size, replicas). MLPerf's submissions run one replica a GPU.

    dstack's "2FP8" are two engines of four GPUs, each with the batch of the row: "aggregate" of the four-GPU runs, by
    the README of raw_data/8xMi300x-throughput-quark-2fp8 in its repository.
    """
    if row["id"].startswith("mlperf"):
        return 1, row["n_gpus"]
    if "2FP8" in row["id"]:
        return row["n_gpus"] // 2, 2
    return row.get("tp") or row.get("n_gpus") or 1, 1


def _model(row: dict[str, Any]) -> tuple[str, str | None]:
    """(catalogue entry, quantization). MLPerf's submissions are quantised to fp8.

    dstack's "meta" is Meta's checkpoint, with a scale for each row, "amd" is AMD's Llama-3.1-405B-Instruct-FP8-KV, with
    one for each tensor.
    """
    command = row.get("command") or ""
    if row["id"].startswith("mlperf"):
        return ("meta-llama/Llama-2-70b-chat-hf" if "llama2" in row["model"] else "8b"), "fp8"
    if row["id"].startswith("dstack") and "FP8-amd" in row["id"]:
        return "meta-llama/Llama-3.1-405B-Instruct", "fp8_per_tensor"
    name = next(name for prefix, name in MODELS.items() if row["id"].startswith(prefix))
    override = "awq" if "AWQ" in command else _fp8_kind(name) if "-FP8" in command else None
    return name, override


def _fp8_kind(name: str) -> str:
    """Qwen's own checkpoints in fp8 have a scale for each block of 128 x 128, Z.ai's one for each row."""
    return "fp8_per_block" if name.startswith("Qwen/") else "fp8_per_channel"


def _engine(row: dict[str, Any]) -> tuple[str, bool, str, int | None, float | None, bool, bool]:
    """(version, expert parallel, type of the cache, tokens of a step, share of the memory, async scheduling, eager).

    dstack ran MI300X with --enforce-eager and H100 without, by the commands in its README.
    """
    command = row.get("command") or ""
    batched = re.search(r"--max-num-batched-tokens (\d+)", command)
    if row["id"].startswith("mlperf"):
        return "0.9.0", False, "fp8", None, None, False, False
    is_tpu = "tpu" in row["id"]
    version = "0.6.3" if row["id"].startswith("dstack") else "0.12.0" if is_tpu else "0.11.0"
    tokens = int(batched[1]) if batched else 512 if is_tpu else None
    utilization = re.search(r"--gpu-memory-utilization ([\d.]+)", command)
    share = float(utilization[1]) if utilization else 0.98 if is_tpu else None
    is_eager = row["id"].startswith("dstack") and "MI300X" in row["gpu"]
    return (
        version,
        "--enable-expert-parallel" in command,
        "auto",
        tokens,
        share,
        is_tpu or "--async" in command,
        is_eager,
    )


@cache
def _prepared(
    name: str,
    quantization: str | None,
    gpu: str,
    tensor: int,
    max_model_len: int,
    version: str,
    expert_parallel: bool,
    kv_cache_dtype: str,
    batched_tokens: int | None,
    gpu_memory_utilization: float | None,
    async_scheduling: bool,
    enforce_eager: bool,
) -> tuple[Roofline, MemoryEstimate]:
    model, device = model_spec(name, quantization), accelerator(gpu)
    engine = EngineConfig(
        vllm_version=version,
        enable_expert_parallel=expert_parallel,
        kv_cache_dtype=kv_cache_dtype,
        max_num_batched_tokens=batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        async_scheduling=async_scheduling,
        enforce_eager=enforce_eager,
    )
    layout = Layout(tensor_parallel_size=tensor, pipeline_parallel_size=1)
    memory = estimate_memory(
        model,
        device,
        engine,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=1,
        max_model_len=max_model_len,
    )
    return Roofline(model, device, engine, layout), memory


def main() -> None:
    """Print the table of both files."""
    from benchmarks.accuracy.speed_accuracy import every_case
    from benchmarks.accuracy.speed_scores import fit, leave_one_out, saturating_losses, table

    cases = every_case()
    print(table(cases, leave_one_out(cases)))
    print("fitted on all sources:", fit(saturating_losses(cases)))


if __name__ == "__main__":
    main()
