"""One published measurement of speed: what is predicted, what was measured, and how its requests arrive.

speed_cases.py and speed_cases_later.py read the rows of their files into these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hpc_serve.plan import MemoryEstimate, ModelSpec, model_from_config, resolve
from hpc_serve.plan.speed.estimate import ReplicaSpeeds, SpeedEstimate, speed_column
from hpc_serve.plan.speed.step import Factors, Roofline
from hpc_serve.plan.speed.throughput import Traffic

SHORTEST_OUTPUT = 10
MANY_ROUNDS = 8
"""Of requests: from so many on the first and the last round hardly count."""
LONGEST_CONTEXT = 36_000
"""The longest context that is planned for where a row does not say it."""
_QWEN3_14B = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 17408,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "model_type": "qwen3",
}
_GLM_45_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "use_qk_norm": False,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_QWEN35_27B = resolve("Qwen/Qwen3.5-27B").config
_QWEN35_9B = {
    **_QWEN35_27B,
    "text_config": {
        **_QWEN35_27B["text_config"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "linear_num_value_heads": 32,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
    },
    "vision_config": {**_QWEN35_27B["vision_config"], "out_hidden_size": 4096},
}
CONFIGS = {"Qwen/Qwen3-14B": _QWEN3_14B, "zai-org/GLM-4.5-Air": _GLM_45_AIR, "Qwen/Qwen3.5-9B": _QWEN35_9B}
"""Public config.json files of models that the catalogue does not have. The dimensions are those of
sglang/Model_Config.md of citsjtu2020/LLM-Prof (Qwen3-14B) and scripts/models of THUDM/slime (GLM-4.5-Air). Those of
Qwen3.5-9B are of a public program that checks its shapes; its layers and linear heads follow from nine billion
parameters and the series."""
CHECKPOINTS = {
    "quark-mxfp4": {
        "quant_method": "quark",
        "global_quant_config": {
            "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32},
            "input_tensors": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32},
        },
        "exclude": ["lm_head"],
    },
    "qwen-fp8": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "in_proj_a", "in_proj_b"],
    },
}
"""The `quantization_config` of checkpoints that no option of the engine describes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: what is predicted and what was measured, or why the row is left out.

    `format_not_told`: the kind of the weights' format is assumed, so the row counts in no class of one format.
    """

    id: str
    source: str
    roofline: Roofline | None = None
    memory: MemoryEstimate | None = None
    traffic: Traffic | None = None
    batch: float = 0.0
    replicas: int = 1
    engine: str = "vLLM"
    max_model_len: int = 0
    measured: float = 0.0
    measured_ttft_s: float | None = None
    requests: int | None = None
    format_not_told: bool = False
    left_out: str | None = None

    def predict(self, factors: Factors) -> SpeedEstimate:
        """The estimate for one replica."""
        assert self.roofline
        assert self.traffic
        assert self.memory
        replica = ReplicaSpeeds(roofline=self.roofline, traffic=self.traffic, memory=self.memory)
        return replica.at(self.traffic.concurrency, factors)

    @property
    def has_few_rounds(self) -> bool:
        """Whether a run kept so many requests in flight for a few rounds only, of which the last is not full."""
        traffic = self.traffic
        assert traffic
        return traffic.arrivals == "steady" and (self.requests or math.inf) < MANY_ROUNDS * traffic.concurrency

    def tokens_per_s(self, factors: Factors) -> float:
        """Predicted output tokens per second of all replicas, as `plan` prints them for requests that arrive so.

        A run of few rounds is a burst of all its requests, of which so many run at once.
        """
        assert self.roofline
        assert self.traffic
        traffic = self.traffic
        if self.has_few_rounds:
            assert self.requests
            traffic = replace(traffic, arrivals="burst", concurrency=self.requests)
        return self.replicas * speed_column(self.roofline, traffic, self.batch, factors).output_tokens_per_s

    def ttft_s(self, factors: Factors) -> float | None:
        """Predicted mean time to the first token of all requests of the run.

        Where so many are always in flight, the first of them arrive at once and wait for each other's prompts, as in a
        burst. None where the row does not say how many requests came after them.
        """
        assert self.roofline
        assert self.traffic
        traffic, steady = self.traffic, self.predict(factors).expected.ttft_s
        if traffic.arrivals == "burst" or traffic.concurrency == 1:
            return steady
        if self.requests is None:
            return None
        burst = replace(traffic, arrivals="burst")
        start = speed_column(self.roofline, burst, self.batch, factors).ttft_s
        return steady + (start - steady) * min(1.0, traffic.concurrency / self.requests)


def measured_ttft_s(row: dict[str, Any]) -> float | None:
    """The mean time to the first token in seconds, where the row has it."""
    return row["ttft_ms_mean"] / 1000 if row.get("ttft_ms_mean") else None


def arriving(traffic: Traffic, row: dict[str, Any], *, lengths_vary: bool) -> Traffic:
    """The same requests, all at once where the row has no more of them than may be in flight.

    Where answers differ in length and the row does not say how long the longest may be, the context is the limit.
    """
    requests = row.get("num_prompts", math.inf)
    if requests > row.get("concurrency", 0):
        return traffic
    limit = row.get("longest_osl") or row.get("max_model_len", LONGEST_CONTEXT) - traffic.input_tokens
    longest = max(round(limit), traffic.output_tokens) if lengths_vary else None
    return replace(traffic, concurrency=requests, arrivals="burst", longest_output_tokens=longest)


@cache
def model_spec(name: str, quantization: str | None) -> ModelSpec:
    """The model of that name, by the catalogue or `CONFIGS`, in the weights that were served."""
    config = CONFIGS.get(name) or resolve(name).config
    if quantization in CHECKPOINTS:
        return model_from_config({**config, "quantization_config": CHECKPOINTS[quantization]}, name=name)
    return model_from_config(config, name=name, quantization=quantization)
