"""Finds the model and the machines that a request names, has the plan made for them, and says what the engine is told.

Finding a model reads files and may ask the hub. plan/make.py makes the plan itself, and is pure; `hpc-serve plan`,
`render` and `submit` all ask for it here. Plans are corrected by the runs that `bench` measured on this site, which lie
in one small file of the home. The file is a help and no more. A damaged file counts as none, and of two runs that are
kept at once one is lost.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hpc_serve.errors import DoesNotFitError, HpcServeError, InvalidRequestError
from hpc_serve.hub.hub import find_spec
from hpc_serve.plan.catalog import parsers_of, reasoning_parsers, tool_parsers
from hpc_serve.plan.choice.advice import Remedy
from hpc_serve.plan.choice.layout import is_quantized_by_vllm
from hpc_serve.plan.choice.planner import NoLayoutError, ServePlan
from hpc_serve.plan.engine import EngineConfig, Workload
from hpc_serve.plan.hardware import cluster_named, part_of_node
from hpc_serve.plan.make import FoundParts, PlanRequest, PlanResult, make_plan
from hpc_serve.plan.speed.measured import MeasuredRun
from hpc_serve.rendezvous.files import make_private_folder, read_json, write_json
from hpc_serve.rendezvous.store import default_home
from hpc_serve.submit.request.options import spellings
from hpc_serve.submit.request.request import OPTIONS, ServeRequest
from hpc_serve.vllm.arguments import read_arguments, value_of, without

# -- the measured runs

FILE = "measured_runs.json"
MOST_RUNS = 100


@dataclass(frozen=True, kw_only=True)
class _Runs:
    runs: tuple[MeasuredRun, ...] = ()


def measured_runs(home: Path) -> tuple[MeasuredRun, ...]:
    """Return the runs that are kept and make sense, the oldest first."""
    with contextlib.suppress(HpcServeError, OSError):
        return tuple(run for run in read_json(_Runs, home / FILE).runs if run.is_sane)
    return ()


def keep_run(home: Path, run: MeasuredRun) -> None:
    """Keep a run beside the MOST_RUNS latest. Raises StoreError."""
    make_private_folder(home, tighten=False)
    write_json(home / FILE, _Runs(runs=(*measured_runs(home), run)[-MOST_RUNS:]))


# -- plans

_OWN_OPTIONS = {name: one.name for one in OPTIONS if one.metadata["of_plan"] for name in spellings(one)}
"""Options of remedies that are of the request, by its names; the others are vLLM's."""
_NOT_VLLMS = ("int8", "int4", "nvfp4")  # what `plan` takes as a size alone
# Arguments for another tokenizer than the one beside the weights, or for none.
_OTHER_TOKENIZER = frozenset(
    {"--tokenizer", "--tokenizer-mode", "--tokenizer-revision", "--revision", "--skip-tokenizer-init"}
)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A request with its plan. `plan.vllm_args` are all options of the engine, the request's own among them.

    The replicas of --target share the nodes of --exclusive in `request`, if they fill them evenly. `result` is what the
    plan was made from. `needed_tokens` has the parser that each option names, and the tokens that it needs in the
    tokenizer. `machines_note` says how many GPUs of a node stay idle.
    """

    request: ServeRequest
    plan: ServePlan
    result: PlanResult
    needed_tokens: Mapping[str, tuple[str, tuple[str, ...]]]
    machines_note: str | None


def plan_service(request: ServeRequest, *, stand_in: str | None = None) -> ServePlan:
    """Return the plan for a service. Raises UnknownModelError, InvalidRequestError, DoesNotFitError.

    `stand_in` (HPC_SERVE_MODEL) is the folder that is loaded in place of the model, or None.
    """
    return plan_request(request, stand_in=stand_in).plan


def plan_request(request: ServeRequest, *, stand_in: str | None = None) -> Planned:
    """Return the request with its plan. Raises what `plan_service` raises."""
    try:
        result = _result(request, stand_in)
        plan = result.chosen
    except NoLayoutError as error:
        error.suggestions = tuple(filter(None, (_accepted(one, request, stand_in) for one in error.suggestions)))
        if (per_job := request.replicas_per_job) > 1:
            error.args = (f"An engine has 1/{per_job} of a node with --replicas-per-job {per_job}. {error.args[0]}",)
        raise
    shared = _sharing(request, plan) if request.replicas_per_job == 1 else None
    if request.target is not None and shared is not None:
        request, shared = shared, None
    note = _idle_gpus_note(request, plan, shared)
    words = _engine_words(request, plan)
    return Planned(
        request=request,
        plan=replace(plan, vllm_args=words),
        result=result,
        needed_tokens=_needed_tokens(words),
        machines_note=note,
    )


def _result(request: ServeRequest, stand_in: str | None) -> PlanResult:
    """Return the result of planning, also if nothing fits. Raises InvalidRequestError for a quantization that vLLM
    cannot make itself."""
    asked = asked_plan(request)
    both_sizes = request.tensor_parallel_size is not None and request.pipeline_parallel_size is not None
    # A layout asked for is checked against what is loaded; a layout to be chosen is that of the model named.
    result = plan_for(asked, stand_in=stand_in if both_sizes else None)
    needs_checkpoint = stand_in is None and not is_quantized_by_vllm(asked.engine, result.model)
    if asked.engine.quantization in _NOT_VLLMS or (needs_checkpoint and not request.allow_unknown_vllm_options):
        raise InvalidRequestError(
            f"vLLM makes no {asked.engine.quantization} of this checkpoint: name one that is quantised so (--model, or "
            "HPC_SERVE_MODEL); its own config says how."
        )
    return result


def _accepted(remedy: Remedy, request: ServeRequest, stand_in: str | None) -> Remedy | None:
    """The remedy if the request with it is taken, and fits; the checkpoint alone where it names one. None otherwise."""
    words = without(request.engine_args, remedy.options)
    own = {_OWN_OPTIONS[name]: value for name, value in remedy.options.items() if name in _OWN_OPTIONS}
    values: dict[str, Any] = {name: value if name == "gpu" else int(value) for name, value in own.items()}
    others = [word for pair in remedy.options.items() if pair[0] not in _OWN_OPTIONS for word in pair]
    try:
        if _result(replace(request, engine_args=(*words, *others), **values), stand_in).plan:
            return remedy
    except (InvalidRequestError, DoesNotFitError):
        if "--quantization" in remedy.options:
            return remedy.as_checkpoint()
    return None


def _engine_words(request: ServeRequest, plan: ServePlan) -> tuple[str, ...]:
    """Return the options after the model: the plan's and the parsers', then the request's, which win.

    Raises InvalidRequestError if tools are asked for and no parser of them is known or given.
    """
    parsers, given = parsers_of(plan.model), request.engine_option_names
    if request.tools and not parsers.vllm_args and "--tool-call-parser" not in given:
        raise InvalidRequestError(
            f"--tools: no parser is known for {plan.model}; name one: -- --enable-auto-tool-choice --tool-call-parser "
            f"NAME, one of vLLM's: {', '.join(sorted(tool_parsers()))}."
        )
    ours = (*plan.vllm_args, *(parsers.vllm_args if request.tools else ()))
    return (*without(ours, given), *request.engine_args)


def _needed_tokens(words: Sequence[str]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the parser that each option names, with the tokens that it needs in the model's own tokenizer."""
    given = read_arguments(words)
    if _OTHER_TOKENIZER & {argument.name for argument in given}:
        return {}
    parsers = {"--tool-call-parser": tool_parsers()} if value_of(given, "--enable-auto-tool-choice") else {}
    parsers["--reasoning-parser"] = reasoning_parsers()
    named = {option: value_of(given, option) for option in parsers}
    return {option: (name, parsers[option].get(name, ())) for option, name in named.items() if name}


def _idle_gpus_note(request: ServeRequest, plan: ServePlan, shared: ServeRequest | None) -> str | None:
    """Say how many GPUs of its node a job leaves idle that has the node alone. None: none.

    `shared` is the request with as many replicas in each job as fill the node.
    """
    idle, size = _idle_gpus(request, plan), _node_size(request, plan)
    if not idle:
        return None
    fill = f"; --replicas-per-job {shared.replicas_per_job} fills the node with replicas" if shared else ""
    return f"{idle} of {size} GPUs of each node stay idle (--exclusive): --no-exclusive leaves them to others{fill}."


def _sharing(request: ServeRequest, plan: ServePlan) -> ServeRequest | None:
    """Return the request with as many replicas in each job as fill its node. None where that cannot be."""
    size, used = _node_size(request, plan), plan.layout.gpus_per_node
    count = request.replicas or (plan.replicas if request.target else size // used)
    if not _idle_gpus(request, plan) or size % used or count % (size // used):
        return None
    each = -(-request.concurrency // plan.replicas)
    try:
        return replace(request, replicas_per_job=size // used, replicas=count, num_nodes=None, concurrency=each)
    except InvalidRequestError:
        return None


def _idle_gpus(request: ServeRequest, plan: ServePlan) -> int:
    """GPUs of a node that a job with one node, which it has alone, does not use."""
    is_alone = request.slurm.exclusive and request.cluster == "slurm" and plan.accelerator.kind == "gpu"
    used = plan.layout.gpus_per_node * request.replicas_per_job
    return max(0, _node_size(request, plan) - used) if is_alone and plan.layout.num_nodes == 1 else 0


def _node_size(request: ServeRequest, plan: ServePlan) -> int:
    return request.gpus_per_node or plan.accelerator.gpus_per_node


def asked_plan(request: ServeRequest) -> PlanRequest:
    """Return the plan's request. The engine's own words win over our options, as on vLLM's command line."""
    flags = {
        "tensor_parallel_size": request.tensor_parallel_size,
        "pipeline_parallel_size": request.pipeline_parallel_size,
        "max_model_len": request.max_model_len,
    }
    engine = {**flags, **request.engine_options}
    as_they_are: dict[str, Any] = {
        option.name: getattr(request, option.name) for option in fields(PlanRequest) if hasattr(request, option.name)
    }
    return PlanRequest(
        **as_they_are,
        engines_per_node=request.replicas_per_job,
        workload=Workload(max_model_len=engine.pop("max_model_len"), concurrency=request.concurrency),
        engine=EngineConfig(**engine),
    )


def plan_for(asked: PlanRequest, *, stand_in: str | None = None) -> PlanResult:
    """Find the model and the machines that are named, and plan for them. Raises UnknownModelError, InvalidRequestError.

    If `stand_in` is given, the model keeps its name and has the weights of that folder.
    """
    found, model, draft = find_spec(
        asked.model, asked.engine, stand_in=stand_in, allow_unknown_keys=asked.allow_unknown_config_keys
    )
    cluster = cluster_named(
        asked.gpu, total_bytes=asked.gpu_memory_bytes, num_nodes=asked.num_nodes, gpus_per_node=asked.gpus_per_node
    )
    if asked.engines_per_node > 1:
        cluster = part_of_node(cluster, asked.engines_per_node, is_whole=not asked.engine.has_asked_layout)
    parts = FoundParts(
        model=model,
        cluster=cluster,
        draft=draft,
        served_model_names=found.served_model_names,
        note=found.note,
        warning=found.warning,
        measured=measured_runs(default_home(os.environ)) if asked.measured else (),
    )
    return make_plan(asked, parts)
