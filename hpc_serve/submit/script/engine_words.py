"""The options of `vllm serve` in a script: of the plan, of the parsers, and those that a person gave. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog.parsers import parsers_of, tool_parsers
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.vllm.arguments import names_in, without

if TYPE_CHECKING:
    from hpc_serve.plan import ServePlan


def engine_words(request: ServeRequest, plan: ServePlan) -> tuple[str, ...]:
    """The options after the model: the plan's and the parsers', but for those that the request gives again, then its.

    Raises InvalidRequestError where tools are asked for and no parser of them is known or given.
    """
    parsers, given = parsers_of(plan.model), names_in(request.engine_args)
    if request.tools and not parsers.vllm_args and "--tool-call-parser" not in given:
        raise InvalidRequestError(
            f"--tools: no parser is known for {plan.model}; name one: -- --enable-auto-tool-choice --tool-call-parser "
            f"NAME, one of vLLM's: {', '.join(sorted(tool_parsers()))}."
        )
    ours = (*plan.vllm_args, *(parsers.vllm_args if request.tools else ()))
    return (*without(ours, given), *request.engine_args)
