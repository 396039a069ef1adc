"""Holds what `plan` says that drafts gain against published pairs of runs, with drafts and without.

`python -m benchmarks.accuracy.speculation_gains` prints each pair. data/gains.jsonl has rows of one request in flight:
its runs are (drafts, mean acceptance length, milliseconds a token). The draft is a head of one layer with the model's
own sizes, because the rows do not give its config. Llama 3's row counts as Llama 3.1's, which has the same sizes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_serve.hub.hub import find_spec
from hpc_serve.plan import EngineConfig, ModelSpec, Workload
from hpc_serve.plan.hardware import cluster_named
from hpc_serve.plan.make import FoundParts, PlanRequest, make_plan
from hpc_serve.plan.model.architectures import draft_from_config

GAINS = Path(__file__).parent / "data" / "gains.jsonl"
_INPUT_TOKENS, _OUTPUT_TOKENS = 100, 256
"""Of a request; at one request in flight the gain hardly depends on them."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """One pair: how many times as fast answers were with drafts, as measured and as printed."""

    source: str
    model: str
    method: str
    drafts: int
    acceptance_length: float
    measured: float
    printed: float


def gains() -> Iterator[Gain]:
    """Yield every published pair."""
    for line in GAINS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        spec = find_spec(row["model"], environ={})[1]
        plain_s = _seconds_a_token(row, spec)
        for drafts, accepted, measured_ms in row["runs"]:
            yield Gain(
                source=row["source"],
                model=row["model"],
                method=row["method"],
                drafts=drafts,
                acceptance_length=accepted,
                measured=row["plain_tpot_ms"] / measured_ms,
                printed=plain_s / _seconds_a_token(row, spec, drafts, accepted),
            )


def _seconds_a_token(row: dict[str, Any], spec: ModelSpec, drafts: int = 0, accepted: float | None = None) -> float:
    asked = {"method": row["method"], "model": "head", "num_speculative_tokens": drafts}
    engine = EngineConfig(vllm_version=row["vllm"], speculative_config=asked if drafts else None)
    request = PlanRequest(
        model=row["model"],
        engine=engine,
        workload=Workload(max_model_len=4096),
        input_tokens=_INPUT_TOKENS,
        output_tokens=_OUTPUT_TOKENS,
        acceptance_length=accepted,
    )
    cluster = cluster_named(row["gpu"], num_nodes=1)
    draft = _head(spec, row["method"]) if drafts else None
    result = make_plan(request, FoundParts(model=spec, cluster=cluster, draft=draft))
    return result.estimates()[0].expected.tpot_s


def _head(spec: ModelSpec, method: str) -> ModelSpec:
    inner = max(spec.intermediate_size or 0, 3 * spec.hidden_size)
    config: dict[str, Any] = {
        **{"architectures": ["LlamaForCausalLM"], "hidden_size": spec.hidden_size, "intermediate_size": inner},
        **{"num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
        **{"vocab_size": spec.vocab_size, "max_position_embeddings": 4096},
        **({"draft_vocab_size": 32_000} if method == "eagle3" else {}),
    }
    return draft_from_config(config, name="head", method=method)


if __name__ == "__main__":
    ratios: dict[str, list[float]] = {}
    for one in gains():
        ratios.setdefault(f"{one.source}, {one.method}", []).append(one.measured / one.printed)
        print(
            f"{one.model:34} {one.method:7} {one.drafts} drafts, {one.acceptance_length:.2f} tokens a step: "
            f"measured × {one.measured:.2f}, printed × {one.printed:.2f}"
        )
    for source, found in ratios.items():
        print(
            f"{source}: measured by printed {min(found):.2f} to {max(found):.2f}, median {statistics.median(found):.2f}"
        )
