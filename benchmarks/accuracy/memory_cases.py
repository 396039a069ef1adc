"""Compares the memory estimate with figures that real vLLM runs printed: `python -m benchmarks.accuracy.memory_cases`.

data/memory_cases.jsonl has the figures with their sources. data/memory_case_models.json says which catalogue entry or
config a case describes, what had to be assumed, and why a case is left out. data/memory_cases_later.jsonl has what
newer versions printed, and each of its cases describes itself.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.accuracy import DATA
from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan import (
    EngineConfig,
    MemoryEstimate,
    ModelSpec,
    accelerator,
    estimate_memory,
    model_from_config,
    resolve,
)
from hpc_serve.plan.hardware import AcceleratorSpec
from hpc_serve.plan.memory.loaded import loaded_model
from hpc_serve.plan.model.architectures import draft_from_config
from hpc_serve.units import GIB


@dataclass(frozen=True, kw_only=True)
class Score:
    """One case: the figures by name as (predicted, measured), the verdicts, or why it is left out."""

    id: str
    is_v0: bool = False
    version: tuple[int, int] = (0, 0)
    figures: dict[str, tuple[float, float]]
    fits: bool | None = None
    refused: bool = False
    ran: bool = False
    left_out: str | None = None
    note: str = ""

    def error(self, name: str) -> float | None:
        """Relative error of a figure, in per cent."""
        if name not in self.figures:
            return None
        predicted, measured = self.figures[name]
        return 100 * (predicted - measured) / measured


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the planner is asked of a case: a config, machines and options."""

    config: dict[str, Any]
    model: ModelSpec
    gpu: AcceleratorSpec
    engine: EngineConfig
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    max_model_len: int

    def estimate(self) -> MemoryEstimate:
        """The planner's answer. Raises DoesNotFitError, InvalidRequestError."""
        return estimate_memory(
            self.model,
            self.gpu,
            self.engine,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            data_parallel_size=self.data_parallel_size,
            max_model_len=self.max_model_len,
        )


def load_cases() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(figures, what they describe) of every case."""
    models = json.loads((DATA / "memory_case_models.json").read_text())
    lines = (DATA / "memory_cases.jsonl").read_text().splitlines()
    return [(case, models[case["id"]]) for case in map(json.loads, lines)]


def load_later_cases() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The same, of vLLM 0.19 and later."""
    lines = (DATA / "memory_cases_later.jsonl").read_text().splitlines()
    return [(case, case["about"]) for case in map(json.loads, lines)]


def score(case: dict[str, Any], about: dict[str, Any]) -> Score:
    """Predict what one case measured."""
    measured = case["measured"]
    refused = "error" in measured
    if "leave_out" in about:
        return Score(id=case["id"], figures={}, refused=refused, left_out=about["leave_out"])
    one = asked(case, about)
    try:
        estimate = one.estimate()
    except (DoesNotFitError, InvalidRequestError) as error:
        return Score(id=case["id"], figures={}, fits=False, refused=refused, note=str(error))
    only_weights = about.get("only") == ["weights"]
    return Score(
        id=case["id"],
        is_v0=one.engine.is_v0,
        version=one.engine.version,
        figures=_figures(case, about, estimate),
        fits=None if only_weights else estimate.holds(1),
        refused=refused,
        ran=not refused and not only_weights,
    )


def asked(case: dict[str, Any], about: dict[str, Any]) -> Asked:
    """What the planner is asked of a case that is not left out."""
    engine = _engine(case, about)
    config = about.get("config") or dict(resolve(about["model"]).config)
    config = {**config, **about.get("overrides", {})}
    if "quantization_config" in about:
        config["quantization_config"] = about["quantization_config"]
    model = model_from_config(config, name=case["model"], dtype=_dtype(case), quantization=about.get("quantization"))
    max_model_len = case.get("max_model_len") or about.get("max_model_len") or model.max_model_len
    draft = about.get("draft")
    if draft is not None:
        model = loaded_model(model, engine, draft_from_config(draft["config"], name="draft", method=draft["method"]))
    elif engine.enable_eplb:
        model = loaded_model(model, engine)
    model = replace(model, max_model_len=max(max_model_len, model.max_model_len))
    gib = about.get("gpu_mem_gib") or case.get("gpu_mem_gib")
    return Asked(
        config=config,
        model=model,
        gpu=accelerator(about.get("accelerator", "h100-80gb"), total_bytes=int(gib * GIB) if gib else None),
        engine=engine,
        tensor_parallel_size=case.get("tp", 1),
        pipeline_parallel_size=about.get("pp") or case.get("pp", 1),
        data_parallel_size=case.get("dp", 1),
        max_model_len=max_model_len,
    )


def _dtype(case: dict[str, Any]) -> str:
    return case["dtype"] if case.get("dtype") in ("bfloat16", "float16", "float32") else "auto"


def _engine(case: dict[str, Any], about: dict[str, Any]) -> EngineConfig:
    """The engine of a case. Where the case has no version, the form of its log shows the generation."""
    version = case.get("vllm_version") or about.get("vllm_version", "")
    text = json.dumps(case)
    speaks_v0 = "model weights take" in text or "GPU blocks" in text or "Loading model weights took" in text
    is_v0 = "V0" in version or (not version and speaks_v0)
    digits = version.split()[0].split("/")[0] if version[:1].isdigit() else ("0.7.0" if is_v0 else "0.11.0")
    return EngineConfig(
        vllm_version=digits.replace(".x", ".0"),
        use_v1=False if is_v0 else None,
        gpu_memory_utilization=about.get("gpu_memory_utilization") or case.get("gpu_memory_utilization"),
        kv_cache_dtype=case.get("kv_cache_dtype", "auto"),
        max_num_seqs=case.get("max_num_seqs"),
        max_num_batched_tokens=about.get("max_num_batched_tokens") or case.get("max_num_batched_tokens"),
        enforce_eager=bool(case.get("enforce_eager")),
        enable_expert_parallel=bool(about.get("enable_expert_parallel")),
        enable_eplb="eplb_config" in about,
        eplb_config=about.get("eplb_config"),
    )


def _figures(case: dict[str, Any], about: dict[str, Any], estimate: MemoryEstimate) -> dict[str, tuple[float, float]]:
    """Predicted and measured. With LoRA the printed weights include slots of unknown size, so they are not compared."""
    measured = case["measured"]
    figures: dict[str, tuple[float, float]] = {}
    if "weights_gib_per_gpu" in measured and not case.get("enable_lora") and "weights" not in about.get("skip", ()):
        figures["weights"] = (estimate.model_loading_bytes / GIB, measured["weights_gib_per_gpu"])
    if about.get("only") == ["weights"]:
        return figures
    if "kv_cache_gib_per_gpu" in measured:
        figures["kv"] = (estimate.kv_cache_bytes / GIB, measured["kv_cache_gib_per_gpu"])
    elif "gpu_blocks" in measured:
        size = measured["gpu_blocks"] * 16 * estimate.kv_bytes_per_token / GIB
        figures["kv"] = (estimate.kv_cache_bytes / GIB, size)
    elif "state_blocks" in measured:
        figures["kv"] = (estimate.num_blocks, measured["state_blocks"])
    elif "kv_cache_tokens" in measured:
        figures["kv"] = (estimate.kv_cache_tokens, measured["kv_cache_tokens"])
    for name, key in (
        ("activation", "activation_peak_gib"),
        ("non-torch", "non_torch_gib"),
        ("cuda-graph", "cuda_graph_estimate_gib"),
    ):
        if key in measured:
            value = getattr(estimate, name.replace("-", "_") + "_bytes") / GIB
            figures[name] = (value, measured[key])
    return figures


def median_error(scores: list[Score], name: str) -> float:
    """Median absolute error of a figure over the cases that have it, in per cent."""
    return statistics.median(abs(error) for one in scores if (error := one.error(name)) is not None)


SCORED_SINCE = (0, 8)
"""The version of vLLM from which on the accuracy is promised."""


def promised(scores: list[Score], name: str) -> tuple[int, float, float]:
    """(cases, median, 90th percentile) of a figure's absolute errors since `SCORED_SINCE`, in per cent."""
    errors = [abs(error) for one in scores if one.version >= SCORED_SINCE and (error := one.error(name)) is not None]
    return len(errors), statistics.median(errors), statistics.quantiles(errors, n=10, method="inclusive")[8]


def promised_line(scores: list[Score]) -> str:
    """The same in words, of weights and of KV cache."""
    parts = []
    for name, title in (("weights", "weights"), ("kv", "KV cache")):
        count, median, ninetieth = promised(scores, name)
        parts.append(f"{title} {median:.2f} % in the median and {ninetieth:.1f} % at the 90th percentile of {count}")
    return "vLLM {}.{} and later: ".format(*SCORED_SINCE) + ", ".join(parts)


def table(scores: list[Score]) -> str:
    """A table: predicted and measured by case, medians by generation, and what is left out."""
    lines = [f"{'case':42} {'weights GiB':>22} {'KV cache GiB':>24} {'activation':>13} {'non-torch':>11}  verdict"]
    for one in scores:
        if one.left_out:
            continue
        lines.append(
            f"{one.id[:42]:42} {_cell(one, 'weights'):>22} {_cell(one, 'kv'):>24} "
            f"{_pair(one, 'activation'):>13} {_pair(one, 'non-torch'):>11}  {_verdict(one)}"
        )
    generations = (
        ("V1 engine", [one for one in scores if not one.is_v0]),
        ("before V1", [one for one in scores if one.is_v0]),
    )
    for title, group in (*(one for one in generations if one[1]), ("all", scores)):
        lines.append(
            f"{title}: median absolute error of weights {median_error(group, 'weights'):.2f} %, "
            f"of KV cache {median_error(group, 'kv'):.2f} %"
        )
    left = [one for one in scores if one.left_out]
    lines.append(f"scored {len(scores) - len(left)} of {len(scores)}" + ("; left out:" if left else ""))
    lines += [f"  {one.id}: {one.left_out}" for one in left]
    return "\n".join(lines)


def _cell(one: Score, name: str) -> str:
    error = one.error(name)
    return "" if error is None else f"{_pair(one, name)} {error:+6.2f}%"


def _pair(one: Score, name: str) -> str:
    return f"{one.figures[name][0]:.2f} / {one.figures[name][1]:.2f}" if name in one.figures else ""


def _verdict(one: Score) -> str:
    predicted = "" if one.fits is None else "fits" if one.fits else "refused"
    happened = "refused" if one.refused else "ran"
    return f"{predicted or '-'} / {happened}"


if __name__ == "__main__":
    earlier, later = ([score(*one) for one in cases] for cases in (load_cases(), load_later_cases()))
    print(table(earlier))
    print("\nvLLM 0.19 and later")
    print(table(later))
    print(f"\n{promised_line([*earlier, *later])}")
