"""Looks for the weights of a hub's model before its job is queued.

Missing weights are an error if the job could not fetch them, else a sentence for the person who submits. The way in
which jobs will read the weights is told as far as it is known here; the job decides it
(`job/weights/weights_place.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hpc_serve.errors import InvalidRequestError
from hpc_serve.hub.hub_requests import check_access
from hpc_serve.hub.hub_settings import read_hub_settings
from hpc_serve.hub.local_weights import cached_folder, missing_weights
from hpc_serve.job.weights.weights_place import find_weights
from hpc_serve.plan import ServePlan
from hpc_serve.sizes import GIB
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.vllm.arguments import names_in
from hpc_serve.vllm.load_strategy import foreseen_strategy

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_FROM_FILES = (None, "auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "mistral")
# Arguments that name another place or another revision of the weights.
_ELSEWHERE = frozenset({"--download-dir", "--revision", "--model-loader-extra-config"})


def check_hub_weights(
    request: ServeRequest, plan: ServePlan, environ: Mapping[str, str], *, ask_hub: bool = False
) -> str | None:
    """Return a note on the weights of a hub's model that are not in the cache; None if there is nothing to say.

    If `ask_hub` is true, the hub is asked whether they may be fetched. Raises InvalidRequestError if the job could not
    fetch them.
    """
    if not _is_on_the_hub(request, plan.model) or _ELSEWHERE & names_in(request.engine_args):
        return None
    settings = read_hub_settings(environ)
    missing = missing_weights(cached_folder(plan.model, environ))
    if missing is None:
        return None
    seen = f"{plan.model}: {settings.cache} holds {missing.words}"
    cure = f"`hpc-serve fetch {plan.model}` ({_size(plan)})"
    if request.settings.stage is not None:
        raise InvalidRequestError(
            f"{seen}, and --stage copies what the nodes see. Get them first: {cure}; or leave --stage out."
        )
    if request.offline_nodes or settings.is_offline:
        why = "offline_nodes in the site file" if request.offline_nodes else "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE"
        site = f" Your site says: {request.weights_help}." if request.weights_help else ""
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
    site = f" Your site says: {request.weights_help}." if request.weights_help else ""
    return f"{seen}, so the job fetches them first. To have them before: {cure}.{token}{site}"


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
    return _REPOSITORY.fullmatch(model) is not None and not model.startswith(("/", "."))


def _is_on_the_hub(request: ServeRequest, model: str) -> bool:
    return is_repository(model) and request.load_format in _FROM_FILES


def _size(plan: ServePlan) -> str:
    return f"about {plan.memory.weight_bytes * plan.layout.num_gpus / GIB:,.0f} GiB"
