"""Makes a plan from what a person asked: the smallest layout that fits, or the replicas that serve fastest.

A PlanRequest holds what the person asked. submit/plans/planning.py finds the model and the machines for it. choice/
decides whether a layout fits, speed/ how fast it is. This module decides only what they are asked: which machines,
which context, and which requests a replica is to get.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan.choice.advice import plan_notes
from hpc_serve.plan.choice.candidates import Candidate, Contexts, PlanInputs, contexts_of, minimum_gpus
from hpc_serve.plan.choice.layout import layouts_on
from hpc_serve.plan.choice.planner import NoLayoutError, ServePlan, choose
from hpc_serve.plan.engine import LONGEST_THAT_FITS, Arrivals, EngineConfig, Workload
from hpc_serve.plan.hardware import DEFAULT_GPU, AcceleratorSpec, ClusterSpec
from hpc_serve.plan.memory.loaded import loaded_model
from hpc_serve.plan.model.spec import ModelSpec
from hpc_serve.plan.speed.estimate import ReplicaSpeeds, SpeedEstimate
from hpc_serve.plan.speed.measured import MeasuredHere, MeasuredRun, known_draft
from hpc_serve.plan.speed.step import Roofline
from hpc_serve.plan.speed.throughput import Traffic

_DEFAULT_INPUT_TOKENS, _DEFAULT_OUTPUT_TOKENS = 1024, 256
_DEFAULT_TEXT_TOKENS = 512
"""Of a text to embed or to score."""
_OF_GENERATION = ("output_tokens", "longest_output_tokens", "decode_only", "prefix_hits", "acceptance_length", "target")
_OF_ANY_SPEED = ("input_tokens", "requests", "arrivals", "ideal", "usd_per_gpu_hour")
"""Options that describe generated text, and the others that say of what the speed is."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A person's request for a plan, in their own words. None: the plan decides, or there is a default.

    `gpu` names the accelerators of the nodes, as in plan/hardware.py, and `gpu_memory_bytes` is the memory of
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


def _asked_traffic(asked: PlanRequest, model: ModelSpec, max_model_len: int) -> Traffic:
    """Return each request's lengths: those asked for, else the defaults as far as the context allows.

    Raises InvalidRequestError where the lengths asked for are more than the context.
    """
    if asked.engine.is_pooling:
        return _pooling_traffic(asked, max_model_len)
    outputs = asked.output_tokens or min(_DEFAULT_OUTPUT_TOKENS, max(1, max_model_len // 5))
    inputs = asked.input_tokens or max(1, min(_DEFAULT_INPUT_TOKENS, max_model_len - outputs))
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


def _given(asked: PlanRequest, names: tuple[str, ...]) -> list[str]:
    """Return the options of these names that were asked for."""
    values = {f"--{name.replace('_', '-')}": getattr(asked, name) for name in names}
    return [option for option, value in values.items() if value and value != "steady"]


def _check_speech(asked: PlanRequest, model: ModelSpec) -> None:
    """Raise InvalidRequestError for options that a model with an encoder of sound cannot have."""
    named = _given(asked, _OF_ANY_SPEED + _OF_GENERATION)
    if asked.engine.is_pooling:
        named.append("--runner pooling")
    if named:
        raise InvalidRequestError(
            f"{model.name} transcribes audio, and its speed is not planned: leave out {', '.join(named)}."
        )


def _pooling_traffic(asked: PlanRequest, max_model_len: int) -> Traffic:
    """Return the texts that an embedder or a reranker gets. Raises InvalidRequestError for options of generation."""
    if named := _given(asked, _OF_GENERATION):
        raise InvalidRequestError(f"The model generates no text: leave out {', '.join(named)}.")
    tokens = asked.input_tokens or min(_DEFAULT_TEXT_TOKENS, max_model_len)
    if tokens > max_model_len:
        raise InvalidRequestError(f"A text has {tokens:,} tokens, and at most {max_model_len:,} are read.")
    return Traffic(input_tokens=tokens, output_tokens=1, **asked.traffic, generates=False)


@dataclass(frozen=True, kw_only=True)
class FoundParts:
    """The model and the machines that a request names.

    The engine answers to `served_model_names`. `note` is the catalogue's remark on the model, `warning` says that its
    config and its files do not agree. `draft` is the draft model that --speculative-config names. `measured` are runs
    that were measured here.
    """

    model: ModelSpec
    cluster: ClusterSpec
    draft: ModelSpec | None = None
    served_model_names: tuple[str, ...] = ()
    note: str | None = None
    warning: str | None = None
    measured: tuple[MeasuredRun, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A plan, or the error that says why there is none, and what both were made from.

    `asked` has the options that the model's entry in the catalogue adds. `contexts` are the longest contexts by layout,
    if `--max-model-len auto` asked for them. `measured` are runs here on this accelerator.
    """

    asked: PlanRequest
    found: FoundParts
    inputs: PlanInputs
    traffic: Traffic
    measured: MeasuredHere
    plan: ServePlan | None = None
    error: NoLayoutError | None = None
    contexts: Contexts = field(default_factory=dict)

    @property
    def model(self) -> ModelSpec:
        return self.inputs.model

    @property
    def accelerator(self) -> AcceleratorSpec:
        return self.inputs.cluster.accelerator

    @property
    def chosen(self) -> ServePlan:
        """The plan. Raises NoLayoutError where there is none."""
        if self.plan is None:
            assert self.error is not None
            raise self.error
        return self.plan

    def speeds(self, inputs: PlanInputs | None = None, of: Candidate | None = None) -> ReplicaSpeeds:
        """Return how fast a replica of the plan is, or of another layout; for its own inputs, or for others.

        Raises InvalidRequestError if the accelerator's speed is not known.
        """
        inputs, layout, memory = inputs or self.inputs, self.chosen.layout, self.chosen.memory
        if of is not None and of.memory is not None:
            layout, memory = of.layout, of.memory
        engine = inputs.engine_for(layout)
        return ReplicaSpeeds(
            roofline=Roofline(inputs.model, self.accelerator, engine, layout, self.measured),
            traffic=self.traffic,
            memory=memory,
            usd_per_gpu_hour=self.asked.usd_per_gpu_hour,
            is_ideal=self.asked.ideal,
        )

    def plain_speeds(self) -> ReplicaSpeeds | None:
        """Return how fast a replica is without speculation; None where the engine does not speculate."""
        if not self.asked.engine.speculative_tokens:
            return None
        engine = replace(self.inputs.engine, speculative_config=None)
        plain = self.speeds(replace(self.inputs, model=loaded_model(self.found.model, engine), engine=engine))
        return replace(plain, traffic=replace(self.traffic, acceptance_length=1.0))

    def estimates(self, inputs: PlanInputs | None = None) -> list[SpeedEstimate]:
        """Return the speeds of a replica by requests in flight; none if the speed is not known."""
        try:
            return [] if self.model.encoder_positions else self.speeds(inputs).for_table()
        except InvalidRequestError:
            return []


def make_plan(asked: PlanRequest, found: FoundParts) -> PlanResult:
    """Return the plan for a request, given its model and machines.

    If nothing fits, the result holds the NoLayoutError. Raises InvalidRequestError for numbers that contradict each
    other or the model.
    """
    if asked.ideal and asked.target is not None:
        raise InvalidRequestError(
            "--target chooses by what is expected of a real engine: leave out --ideal, or --target."
        )
    asked = replace(asked, engine=asked.engine.completed(found.model.engine_options))
    if asked.engine.runner != found.model.engine_options.get("runner", asked.engine.runner):
        raise InvalidRequestError(
            f"{found.model.name} is an embedder, a reranker or a classifier, which generates no text: leave out "
            f"--runner {asked.engine.runner}."
        )
    if found.model.encoder_positions:
        _check_speech(asked, found.model)
    model = loaded_model(found.model, asked.engine, found.draft)
    inputs, contexts = _inputs(asked, model, found.cluster)
    traffic = _asked_traffic(asked, model, inputs.max_model_len)
    if asked.input_tokens or asked.output_tokens:
        tokens = traffic.input_tokens + (traffic.output_tokens if traffic.generates else 0)
        inputs = replace(inputs, workload=replace(inputs.workload, request_tokens=tokens))
    measured = MeasuredHere(found.measured if traffic.generates else (), inputs.cluster.accelerator.name)
    is_auto, reasons = asked.workload.max_model_len == LONGEST_THAT_FITS, _context_reasons(inputs, contexts)
    planned = inputs
    try:
        if asked.target is not None:
            if asked.engines_per_node == 1:
                inputs = replace(inputs, cluster=replace(inputs.cluster, is_whole=False))
            planned, speed = _for_target(inputs, traffic, asked.target, measured)
            reasons += speed
            traffic = replace(traffic, concurrency=planned.workload.concurrency)
            inputs = replace(inputs, engine=planned.engine)
        chosen = choose(planned, served_model_names=found.served_model_names)
    except NoLayoutError as error:
        return PlanResult(asked=asked, found=found, inputs=inputs, traffic=traffic, measured=measured, error=error)
    if is_auto:
        contexts = _all_contexts(inputs.for_one_replica(), contexts, chosen)
    notes = plan_notes(model, asked.engine, on_cpus=found.cluster.accelerator.kind == "cpu")
    plan = replace(chosen, reasons=(*reasons, *chosen.reasons, *filter(None, [found.warning]), *notes))
    return PlanResult(
        asked=asked, found=found, inputs=inputs, traffic=traffic, measured=measured, plan=plan, contexts=contexts
    )


def _inputs(asked: PlanRequest, model: ModelSpec, cluster: ClusterSpec) -> tuple[PlanInputs, Contexts]:
    """Return the inputs of the plan, and for `--max-model-len auto` the longest contexts by layout.

    The context is then the model's, or the longest of any layout if the machines asked for do not hold the model's. If
    no number of nodes was asked for, the plan chooses the number first.
    """
    is_auto = asked.workload.max_model_len == LONGEST_THAT_FITS
    workload = replace(asked.workload, max_model_len=None) if is_auto else asked.workload
    inputs = PlanInputs.of(model, cluster, asked.engine, workload)
    one = inputs.for_one_replica() if is_auto else inputs
    if not is_auto or not one.cluster.num_nodes:
        return inputs, {}
    contexts = contexts_of(one, layouts_on(one.cluster.num_nodes, one.cluster, one.engine))
    longest = max((max(lengths.values()) for lengths in contexts.values()), default=model.max_model_len)
    if longest < model.max_model_len:
        inputs = PlanInputs.of(model, cluster, asked.engine, replace(workload, max_model_len=longest))
    return inputs, contexts


def _all_contexts(inputs: PlanInputs, found: Contexts, chosen: ServePlan) -> Contexts:
    """Return the contexts of all layouts on the chosen number of nodes, and of the plan's other candidates."""
    found = found or contexts_of(inputs, layouts_on(chosen.layout.num_nodes, inputs.cluster, inputs.engine))
    return found | contexts_of(inputs, (one.layout for one in chosen.candidates if one.layout not in found))


def _context_reasons(inputs: PlanInputs, contexts: Contexts) -> list[str]:
    """Say which context `--max-model-len auto` chose, unless it is the model's own."""
    if not contexts or inputs.max_model_len == inputs.model.max_model_len:
        return []
    return [
        f"--max-model-len {inputs.max_model_len}: of the model's {inputs.model.max_model_len:,} tokens, as many as "
        "these machines hold for one request."
    ]


def _for_target(
    inputs: PlanInputs, traffic: Traffic, asked: str, measured: MeasuredHere
) -> tuple[PlanInputs, list[str]]:
    """Return the inputs with the machines, sizes and replicas that meet the target, and why.

    Raises NoLayoutError where none does, InvalidRequestError where a number of replicas was asked for as well.
    """
    from hpc_serve.plan.speed.target import SpeedTarget, choose_deployment, parse_speed_target

    target, cluster, workload = parse_speed_target(asked), inputs.cluster, inputs.workload
    if workload.replicas is not None:
        raise InvalidRequestError("--target chooses the number of replicas: leave out --replicas, or --target.")
    try:
        option, reasons = choose_deployment(inputs, traffic, target, measured)
    except DoesNotFitError as error:
        raise NoLayoutError(str(error), minimum_gpus(inputs, at_most=0)) from None
    layout = option.layout
    engine = replace(
        inputs.engine_for(layout),
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
    )
    batch = -(-option.estimate.traffic.concurrency // layout.data_parallel_size)
    if target != SpeedTarget() and engine.max_num_seqs is None and traffic.concurrency == 1:
        # The target is met as long as no more requests share a step than that.
        engine = replace(engine, max_num_seqs=batch)
        reasons.append(f"--max-num-seqs {batch}: further requests wait, so that the running ones meet the target.")
    nodes = max(1, layout.num_gpus * option.replicas // cluster.node_size_of(layout.num_nodes))
    concurrency = -(-workload.concurrency // option.replicas)
    workload = replace(workload, replicas=option.replicas, concurrency=concurrency)
    return replace(inputs, cluster=replace(cluster, num_nodes=nodes), engine=engine, workload=workload), reasons
