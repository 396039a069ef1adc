"""Checks the files that a job needs on the login node, so that no job waits hours in the queue to miss them.

It looks at weights, the tokenizer and the Python environment, and changes nothing. Models, layouts and options are
checked when the request and its plan are made. Missing weights of a hub's model are an error if the job could not fetch
them, else a sentence for the person who submits. The way in which jobs will read the weights is told as far as it is
known here; the job decides it (`job/weights/weights_place.py`).

The preflight of nodes is a separate job: here are its request, and the report that its launcher has left. It has the
script of a service, but ends before an engine starts. `hpc_serve.job.preflight` decides what it checks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import InvalidRequestError
from hpc_serve.hub.hub import check_access
from hpc_serve.hub.local_weights import (
    PATTERNS,
    cached_folder,
    find_stand_in,
    missing_weights,
    read_hub_settings,
    tokenizer_tokens,
)
from hpc_serve.hub.needed_files import FROM_FILES, REPOSITORY
from hpc_serve.job.weights.weights_place import find_weights
from hpc_serve.plan import ServePlan
from hpc_serve.rendezvous.fields import record_file_name
from hpc_serve.rendezvous.store import PreflightReport, ServiceStore, preflight_file, read_preflight
from hpc_serve.submit.plans.planning import Planned
from hpc_serve.submit.request.options import Environment
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.units import GIB
from hpc_serve.vllm.arguments import read_arguments, value_of
from hpc_serve.vllm.load_strategy import foreseen_strategy

# -- the preflight of nodes

_LONGEST_NAME = 63


def preflight_request(request: ServeRequest, *, time: str | None = None) -> ServeRequest:
    """Return the request of a job that checks the nodes that `request` would get. The job has a separate name.

    It has one replica and a short time limit: `time`, or 15 minutes.
    """
    return replace(
        request,
        service=f"preflight-{request.service}"[:_LONGEST_NAME],
        preflight_only=True,
        replicas=1,
        replicas_per_job=1,
        max_replicas=None,
        idle_stop_s=None,
        keep_up=False,
        chain=1,
        overlap_s=None,
        slurm=replace(request.slurm, time=time or "00:15:00"),
    )


def report_of(store: ServiceStore, status: ReplicaStatus) -> PreflightReport | None:
    """Return the preflight report of a replica's run; None if there was no preflight."""
    try:
        name = record_file_name(status.job_id, status.restart, status.replica)
    except InvalidRequestError:
        return None
    return read_preflight(preflight_file(store, status.service, name))


# -- the files on the login node

# Arguments that name another place or another revision of the weights.
_ELSEWHERE = frozenset({"--download-dir", "--revision", "--model-loader-extra-config"})


def check_before_plan(request: ServeRequest, environ: Mapping[str, str]) -> None:
    """Raises InvalidRequestError where there is no Python environment, or HPC_SERVE_MODEL names no model's folder."""
    try:
        _check_environment(request.environment, environ)
    except OSError as error:
        raise InvalidRequestError(f"The Python environment cannot be read: {error}.") from error
    if stand_in := find_stand_in(environ):
        load_format = value_of(read_arguments(stand_in.args), "--load-format") or request.load_format
        _check_folder(Path(stand_in.folder), f"HPC_SERVE_MODEL={stand_in.folder}", load_format)


def check_files(planned: Planned, environ: Mapping[str, str], *, ask_hub: bool = False) -> str | None:
    """Look for the model's files where the job will. Return a note on weights that it still has to fetch, or None.

    If `ask_hub` is true, the hub is asked whether they may be fetched. Raises InvalidRequestError if the model is a
    folder that the job could not load, if the job could not fetch the weights, or if a parser needs a token that the
    tokenizer lacks, if the tokenizer is here.
    """
    model, stand_in, note = planned.plan.model, environ.get("HPC_SERVE_MODEL"), None
    if not stand_in and model.startswith("/"):
        _check_folder(Path(model), f"the model's folder {model}", planned.request.load_format)
    elif not stand_in:
        try:
            note = _check_hub(planned.request, planned.plan, environ, ask_hub=ask_hub)
        except OSError as error:
            note = f"{model}: its weights cannot be looked for: {error}"
    if not planned.needed_tokens:
        return note
    named = stand_in or (model if model.startswith("/") else None)
    folder = Path(named) if named else cached_folder(model, environ)
    tokens = tokenizer_tokens(folder) if folder is not None else None
    for option, (parser, needed) in planned.needed_tokens.items():
        if tokens is not None and (lacking := [token for token in needed if token not in tokens]):
            raise InvalidRequestError(
                f"{option} {parser} needs the token {lacking[0]}, and the tokenizer in {folder} has none: the engine "
                f"would end. Leave --tools out, or name the parser of the model's card after `--`: {option} NAME."
            )
    return note


def _check_hub(request: ServeRequest, plan: ServePlan, environ: Mapping[str, str], *, ask_hub: bool) -> str | None:
    """Return a note on the weights of a hub's model that are not in the cache; None if there is nothing to say.

    Raises InvalidRequestError if the job could not fetch them, and OSError.
    """
    if not is_repository(plan.model) or request.load_format not in (None, *FROM_FILES):
        return None
    if _ELSEWHERE & request.engine_option_names:
        return None
    settings = read_hub_settings(environ)
    missing = missing_weights(cached_folder(plan.model, environ))
    if missing is None:
        return None
    seen = f"{plan.model}: {settings.cache} holds {missing.words}"
    size = plan.memory.weight_bytes * plan.layout.num_gpus / GIB
    cure = f"`hpc-serve fetch {plan.model}` (about {size:,.0f} GiB)"
    site = f" Your site says: {request.weights_help}." if request.weights_help else ""
    if request.settings.stage is not None:
        raise InvalidRequestError(
            f"{seen}, and --stage copies what the nodes see. Get them first: {cure}; or leave --stage out."
        )
    if request.offline_nodes or settings.is_offline:
        why = "offline_nodes in the site file" if request.offline_nodes else "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE"
        raise InvalidRequestError(
            f"{seen}, and the job could not fetch them ({why}). Get them first, where the hub can be reached: {cure}; "
            f"if they are elsewhere, set HF_HOME, or name their folder as the model.{site}"
        )
    if ask_hub:
        try:
            check_access(plan.model, environ)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{seen}. {error}") from None
    token = "" if settings.token else " There is no token (`hf auth login`, HF_TOKEN); a gated model needs one."
    return f"{seen}, so the job fetches them first. To have them before: {cure}.{token}{site}"


def _check_folder(folder: Path, called: str, load_format: str | None) -> None:
    try:
        if not folder.is_dir():
            raise InvalidRequestError(f"{called} is not a folder here; weights must be on a file system the nodes see.")
        if not (folder / "config.json").is_file():
            raise InvalidRequestError(f"{called} holds no config.json: it is no model as Hugging Face lays them out.")
        missing = missing_weights(folder) if load_format != "dummy" else None
        if missing is not None and missing.files:
            raise InvalidRequestError(f"{called} holds {missing.words}: copy or download them again.")
        if missing is not None:
            raise InvalidRequestError(
                f"{called} holds no weights ({', '.join(PATTERNS)}); for random ones, add `-- --load-format dummy`."
            )
    except OSError as error:
        raise InvalidRequestError(f"{called} cannot be read: {error}.") from error


def _check_environment(environment: Environment, environ: Mapping[str, str]) -> None:
    if environment.kind == "auto":
        named = environ.get("HPC_SERVE_ENV")
        folder = Path(named) if named else Path.cwd() / ".venv"
        activate = folder / "bin" / "activate"
        if not activate.is_file():
            raise InvalidRequestError(
                f"There is no Python environment in {folder} (no bin/activate): set HPC_SERVE_ENV, or venv, conda or "
                "apptainer in the site file, to one that has hpc-serve and vLLM in it and that the nodes see."
            )
        if not named and activate.stat().st_uid not in (0, os.geteuid()):
            raise InvalidRequestError(
                f"The Python environment in {folder} belongs to another user, so nothing in it is run: set "
                "HPC_SERVE_ENV to use it, or to one of your own."
            )
        return
    path = str(environment.path)
    # Names of registries are the runtime's to find.
    is_file = {"apptainer": ":" not in path, "pyxis": path.startswith(("/", "./")), "charliecloud": True, "venv": True}
    needed = Path(path, "bin/activate") if environment.kind == "venv" else Path(path)
    if is_file.get(environment.kind) and not needed.exists():
        raise InvalidRequestError(f"The site file names the {environment.kind} {path}, but {needed} is not there.")


def foreseen_loading(model: str, words: Sequence[str], environ: Mapping[str, str], *, ranks_per_node: int) -> str:
    """By which strategy jobs will read a model's weights, and why, as far as this machine can tell."""
    try:
        place = find_weights(model, tuple(words), environ)
    except (OSError, ValueError) as error:
        return f"known once the job sees them: {error}"
    return foreseen_strategy(words, place, ranks_per_node=ranks_per_node)


def is_repository(model: str) -> bool:
    """Return whether a model's name is that of a repository of the hub.

    >>> is_repository("meta-llama/Llama-3.1-8B-Instruct"), is_repository("./llama")
    (True, False)
    """
    return REPOSITORY.fullmatch(model) is not None and not model.startswith(("/", "."))
