"""What a person asks of a plan, and the requests that the replica is to get."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.engine import Arrivals, EngineConfig, Workload
from hpc_serve.plan.hardware.cluster import DEFAULT_GPU
from hpc_serve.plan.model.spec import ModelSpec
from hpc_serve.plan.speed.drafts import known_draft
from hpc_serve.plan.speed.traffic import Traffic

DEFAULT_INPUT_TOKENS, DEFAULT_OUTPUT_TOKENS = 1024, 256
DEFAULT_TEXT_TOKENS = 512
"""Of a text to embed or to score."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A person's request for a plan, in their own words. None: the plan decides, or there is a default.

    `gpu` names the accelerators of the nodes, as in plan/hardware/cluster.py, and `gpu_memory_bytes` is the memory of
    one. `engines_per_node` engines divide one node. Each uses all of its part unless a size of the layout is asked for.
    `target` is text that plan/speed/target.py reads. `input_tokens` and `output_tokens` are the tokens of one request,
    `longest_output_tokens` those of the longest answer if answers differ. `arrivals`: how requests come. So many
    `requests` come at once, and some may wait. `prefix_hits`: the share of each prompt that is in the cache.
    `acceptance_length`: tokens of a step with accepted drafts. `decode_only`: prompts are read elsewhere. `ideal`:
    print only the figures that no engine can beat. `measured`: speeds count runs that were measured here. If
    `allow_unknown_config_keys` is set, a config may have sizes that the planner does not know.
    """

    model: str
    gpu: str = DEFAULT_GPU
    gpu_memory_bytes: int | None = None
    num_nodes: int | None = None
    gpus_per_node: int | None = None
    engines_per_node: int = 1
    engine: EngineConfig = field(default_factory=EngineConfig)
    workload: Workload = field(default_factory=Workload)
    target: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    longest_output_tokens: int | None = None
    requests: int | None = None
    arrivals: Arrivals = "steady"
    decode_only: bool = False
    prefix_hits: float | None = None
    acceptance_length: float | None = None
    ideal: bool = False
    measured: bool = True
    usd_per_gpu_hour: float | None = None
    allow_unknown_config_keys: bool = False

    @property
    def traffic(self) -> dict[str, Any]:
        """How many requests there are, and how they come, by Traffic's names."""
        if self.requests:
            return {"concurrency": self.requests, "arrivals": "burst"}
        return {"concurrency": self.workload.concurrency, "arrivals": self.arrivals}


def asked_traffic(asked: PlanRequest, model: ModelSpec, max_model_len: int) -> Traffic:
    """Return each request's lengths: those asked for, else the defaults as far as the context allows.

    Raises InvalidRequestError where the lengths asked for are more than the context.
    """
    if asked.engine.is_pooling:
        return _pooling_traffic(asked, max_model_len)
    outputs = asked.output_tokens or min(DEFAULT_OUTPUT_TOKENS, max(1, max_model_len // 5))
    inputs = asked.input_tokens or max(1, min(DEFAULT_INPUT_TOKENS, max_model_len - outputs))
    if inputs + outputs > max_model_len:
        raise InvalidRequestError(
            f"{inputs:,} tokens in and {outputs:,} out are {inputs + outputs:,}, but a request has at most "
            f"{max_model_len:,}; use a longer --max-model-len, or fewer tokens."
        )
    if asked.prefix_hits and not asked.engine.caches_prefixes:
        raise InvalidRequestError("--prefix-hits: the engine keeps no prefixes (--no-enable-prefix-caching).")
    longest = asked.longest_output_tokens
    if longest is not None and asked.traffic["arrivals"] != "burst":
        raise InvalidRequestError(
            "The longest answer matters where all requests arrive at once: add --requests N, or leave out "
            "--longest-output-tokens."
        )
    return Traffic(
        input_tokens=inputs,
        output_tokens=outputs,
        **asked.traffic,
        longest_output_tokens=longest,
        decode_only=asked.decode_only,
        prefix_hits=asked.prefix_hits or 0.0,
        acceptance_length=_acceptance_length(asked, model),
    )


def _acceptance_length(asked: PlanRequest, model: ModelSpec) -> float:
    """Return the tokens that a step gives a request: as asked for, else as published for the draft model.

    1 without speculation, or if nothing is published. Raises InvalidRequestError where there are not so many drafts.
    """
    drafts = asked.engine.speculative_tokens
    if asked.acceptance_length is None:
        known = known_draft(model.name, asked.engine)
        return known.acceptance_length(drafts) if known else 1.0
    if not drafts:
        raise InvalidRequestError("--acceptance-length: without --speculative-config a step gives one token.")
    if not 1 <= asked.acceptance_length <= 1 + drafts:
        raise InvalidRequestError(
            f"--acceptance-length {asked.acceptance_length:g}: with {drafts} drafts (num_speculative_tokens of "
            f"--speculative-config) a step gives 1 to {1 + drafts} tokens."
        )
    return asked.acceptance_length


def _options_of_generation(asked: PlanRequest) -> list[str]:
    """Return the options asked for that describe generated text."""
    given = {
        "--output-tokens": asked.output_tokens,
        "--longest-output-tokens": asked.longest_output_tokens,
        "--decode-only": asked.decode_only,
        "--prefix-hits": asked.prefix_hits,
        "--acceptance-length": asked.acceptance_length,
        "--target": asked.target,
    }
    return [option for option, value in given.items() if value]


def check_speech(asked: PlanRequest, model: ModelSpec) -> None:
    """Raise InvalidRequestError for options that a model with an encoder of sound cannot have."""
    named = [*(["--input-tokens"] if asked.input_tokens else []), *_options_of_generation(asked)]
    if asked.engine.is_pooling:
        named.append("--runner pooling")
    if named:
        raise InvalidRequestError(
            f"{model.name} transcribes audio, and its speed is not planned: leave out {', '.join(named)}."
        )


def _pooling_traffic(asked: PlanRequest, max_model_len: int) -> Traffic:
    """Return the texts that an embedder or a reranker gets. Raises InvalidRequestError for options of generation."""
    if named := _options_of_generation(asked):
        raise InvalidRequestError(f"The model generates no text: leave out {', '.join(named)}.")
    tokens = asked.input_tokens or min(DEFAULT_TEXT_TOKENS, max_model_len)
    if tokens > max_model_len:
        raise InvalidRequestError(f"A text has {tokens:,} tokens, and at most {max_model_len:,} are read.")
    return Traffic(input_tokens=tokens, output_tokens=1, **asked.traffic, generates=False)
