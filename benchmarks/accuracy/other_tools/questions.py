"""What each row is asked of a tool, and what is compared: the truth and ours, in the tool's units.

Rows of memory_cases.py are asked for the weights and the cache of a GPU, rows of vLLM in speed_cases.py for tokens per
second. A row's model is given as its config, its machine as memory of a GPU, name and number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from benchmarks.accuracy.memory_cases import Asked, asked, load_cases, load_later_cases, score
from benchmarks.accuracy.other_tools.headers import Tensor, checkpoint_tensors
from benchmarks.accuracy.speed_case import CONFIGS, Case
from benchmarks.accuracy.speed_cases import load
from benchmarks.accuracy.speed_cases_later import ENGINE, load_later
from hpc_serve.plan import resolve
from hpc_serve.plan.engine import gpu_memory_utilization, max_num_batched_tokens, max_num_seqs
from hpc_serve.plan.speed.step import Factors
from hpc_serve.units import GIB

FIGURES = ("weights", "cache", "token", "speed")
"""Weights of a GPU and cache of a GPU in GiB, bytes of the cache of a GPU for one token, output tokens per second."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: what is asked (of memory or speed), the truth by figure, and what ours says.

    `fits` is ours, `ran` whether vLLM started; None: it cannot be known.
    """

    id: str
    question: dict[str, Any]
    truth: dict[str, float] = field(default_factory=dict)
    ours: dict[str, float] = field(default_factory=dict)
    fits: bool | None = None
    ran: bool | None = None


def memory_rows(*, with_headers: bool = False) -> list[Row]:
    """The rows of memory that are scored. `with_headers`: each question holds the tensors of the checkpoint's files."""
    return [
        _memory_row(case, about, with_headers=with_headers)
        for case, about in (*load_cases(), *load_later_cases())
        if "leave_out" not in about
    ]


def _memory_row(case: dict[str, Any], about: dict[str, Any], *, with_headers: bool) -> Row:
    scored, measured, one = score(case, about), case["measured"], asked(case, about)
    truth, ours = {}, {}
    if "weights" in scored.figures:
        ours["weights"], truth["weights"] = scored.figures["weights"]
    cache_gib = measured.get("kv_cache_gib_per_gpu", 0)
    if "kv" in scored.figures and cache_gib > 0:
        ours["cache"], truth["cache"] = scored.figures["kv"]
        tokens = measured.get("kv_cache_tokens") or 16 * measured.get("gpu_blocks", 0)
        if tokens:
            estimate = one.estimate()
            truth["token"] = cache_gib * GIB / tokens
            ours["token"] = estimate.kv_cache_bytes / estimate.kv_cache_tokens
    return Row(
        id=scored.id,
        question=_memory_question(scored.id, case, about, one, with_headers=with_headers),
        truth=truth,
        ours=ours,
        fits=scored.fits,
        ran=None if scored.fits is None else not scored.refused,
    )


def _memory_question(
    name: str, case: dict[str, Any], about: dict[str, Any], one: Asked, *, with_headers: bool
) -> dict[str, Any]:
    engine = one.engine
    loaded = "LoRA" if case.get("enable_lora") else "a draft model" if about.get("draft") else None
    return {
        "id": name,
        "config": one.config,
        "tensors": _tensors(one.config) if with_headers else None,
        "accelerator": one.gpu.name,
        "gpu_gib": one.gpu.total_bytes / GIB,
        "utilization": gpu_memory_utilization(engine),
        "tp": one.tensor_parallel_size,
        "pp": one.pipeline_parallel_size,
        "max_model_len": one.max_model_len,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "max_num_seqs": max_num_seqs(engine, one.gpu),
        "max_num_batched_tokens": max_num_batched_tokens(engine, one.gpu, one.max_model_len),
        "expert_parallel": engine.enable_expert_parallel,
        "loaded_otherwise": about.get("quantization") or ("float32" if case.get("dtype") == "float32" else None),
        "beside": loaded,
    }


def _tensors(config: dict[str, Any]) -> list[Tensor] | None:
    try:
        return checkpoint_tensors(config)
    except (AttributeError, KeyError, TypeError, ValueError):  # transformers has no such model
        return None


def speed_rows(scored: Sequence[tuple[Case, Factors]]) -> list[Row]:
    """The rows of speed of vLLM, each with what ours says by the factors that it is scored by."""
    return [
        Row(
            id=case.id,
            question=_speed_question(case),
            truth={"speed": case.measured},
            ours={"speed": case.tokens_per_s(factors)},
        )
        for case, factors in scored
        if case.engine.startswith(ENGINE)
    ]


def speed_questions() -> Iterator[dict[str, Any]]:
    """What is asked for each row of speed, without scoring any."""
    for case in (*load(), *load_later()):
        if not case.left_out and case.engine.startswith(ENGINE):
            yield _speed_question(case)


def _speed_question(case: Case) -> dict[str, Any]:
    roofline, traffic = case.roofline, case.traffic
    assert roofline
    assert traffic
    engine, layout = roofline.engine, roofline.layout
    return {
        "id": case.id,
        "config": _config(roofline.model.name),
        "quantization": roofline.model.quantization.method,
        "accelerator": roofline.accelerator.name,
        "tp": layout.tensor_parallel_size,
        "pp": layout.pipeline_parallel_size,
        "replicas": case.replicas,
        "input_tokens": traffic.input_tokens,
        "output_tokens": traffic.output_tokens,
        "in_flight": min(traffic.concurrency, max_num_seqs(engine, roofline.accelerator)),
        "kv_cache_dtype": engine.kv_cache_dtype,
        "max_num_batched_tokens": max_num_batched_tokens(engine, roofline.accelerator, case.max_model_len),
        "expert_parallel": engine.enable_expert_parallel,
    }


@cache
def _config(name: str) -> dict[str, Any]:
    return CONFIGS.get(name) or dict(resolve(name).config)
