"""Writes what every model of the catalogue is planned as: the numbers that tests/unit/plan/test_plan.py compares.

Run it when a change of a plan is meant. The difference in git then names the models and the numbers:

    python -m tests.support.plan_numbers
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_serve.hub.hub import find_spec
from hpc_serve.plan import EngineConfig, Workload
from hpc_serve.plan.as_json import result_json
from hpc_serve.plan.catalog import models
from hpc_serve.plan.make import PlanRequest
from hpc_serve.submit.plans.planning import plan_for
from tests.support.arguments import given_words

NUMBERS = Path(__file__).parents[1] / "unit" / "plan" / "plan_numbers.json"
WAYS: dict[str, dict[str, Any]] = {
    "mi300x, fp8 cache": {"gpu": "mi300x", "engine": EngineConfig(kv_cache_dtype="fp8")},
    "a100-40gb, tpot=50ms": {"gpu": "a100-40gb", "target": "tpot=50ms"},
    "b200, LoRA": {"gpu": "b200", "engine": EngineConfig(enable_lora=True, max_lora_rank=64)},
    "v5e:4x4, burst": {"gpu": "v5e:4x4", "arrivals": "burst", "workload": Workload(concurrency=32)},
    "h100-80gb, vLLM 0.12": {"engine": EngineConfig(vllm_version="0.12.0", enforce_eager=True)},
    "h100-80gb, --max-model-len auto": {"num_nodes": 1, "workload": Workload(max_model_len=-1)},
}
"""How a model is planned beside the default way: each model in one of these ways, which stays the model's own."""


def planned(name: str) -> dict[str, list[Any]]:
    """Return the headline numbers of a model by way of planning, and the digest of all that `plan --json` prints."""
    known = json.loads(NUMBERS.read_text()).get(name, {})
    possible = [way for way, asked in WAYS.items() if "target" not in asked or _has_target(name)]
    way = next((way for way in WAYS if way in known), possible[len(name) % len(possible)])
    return {"h100-80gb": _numbers(PlanRequest(model=name)), way: _numbers(PlanRequest(model=name, **WAYS[way]))}


def _has_target(name: str) -> bool:
    """Return whether a target of speed is for a model: it generates text, and its speed is planned."""
    model = find_spec(name, environ={})[1]
    return model.engine_options.get("runner") != "pooling" and not model.encoder_positions


def _numbers(asked: PlanRequest) -> list[Any]:
    document = result_json(plan_for(replace(asked, measured=False)))
    digest = hashlib.sha256(json.dumps(_rounded(document)).encode()).hexdigest()[:12]
    layout = [document[key] for key in ("tensor_parallel_size", "pipeline_parallel_size", "num_nodes")]
    return [document["parameters"], *layout, document["kv_cache_tokens"], digest]


def _rounded(value: Any) -> Any:
    """Return the document with nine digits of each fraction: the last ones are another machine's own."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def main() -> None:
    lines = [f"{json.dumps(name)}: {json.dumps(planned(name))}" for name in sorted(models())]
    NUMBERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    given_words(__doc__, 0)
    main()
