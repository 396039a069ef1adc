"""The options of `vllm serve` in a script: the plan's, the parsers', and a person's own. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog.parsers import parsers_of, tool_parsers
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.vllm.arguments import names_in, without

if TYPE_CHECKING:
    from hpc_serve.plan import ServePlan


def engine_words(request: ServeRequest, plan: ServePlan) -> tuple[str, ...]:
    """Return the options after the model: the plan's and the parsers', then the request's, which win.

    Raises InvalidRequestError if tools are asked for and no parser of them is known or given.
    """
    parsers, given = parsers_of(plan.model), names_in(request.engine_args)
    if request.tools and not parsers.vllm_args and "--tool-call-parser" not in given:
        raise InvalidRequestError(
            f"--tools: no parser is known for {plan.model}; name one: -- --enable-auto-tool-choice --tool-call-parser "
            f"NAME, one of vLLM's: {', '.join(sorted(tool_parsers()))}."
        )
    ours = (*plan.vllm_args, *(parsers.vllm_args if request.tools else ()))
    return (*without(ours, given), *request.engine_args)
