"""Which of vLLM's parsers for calls of tools, and for reasoning, a model takes, by its name: data (parsers.json).

The data also says which parsers there are, and which tokens each needs in a tokenizer. Whether a service has them is
what a person asks for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from hpc_serve.plan.catalog import load_data


@dataclass(frozen=True, kw_only=True)
class Parsers:
    """The names that vLLM gives them; None: the model has no such thing, or what it takes is not known."""

    tools: str | None = None
    reasoning: str | None = None

    @property
    def vllm_args(self) -> tuple[str, ...]:
        """The options of `vllm serve` that switch them on."""
        tools = ("--enable-auto-tool-choice", "--tool-call-parser", self.tools) if self.tools else ()
        return (*tools, *(("--reasoning-parser", self.reasoning) if self.reasoning else ()))


def parsers_of(model: str) -> Parsers:
    """The parsers of a model by its repository or folder.

    >>> parsers_of("Qwen/Qwen3-8B").vllm_args[1:]
    ('--tool-call-parser', 'hermes', '--reasoning-parser', 'qwen3')
    """
    name = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return next((parsers for names, parsers in families() if names.match(name)), Parsers())


@lru_cache(maxsize=1)
def families() -> tuple[tuple[re.Pattern[str], Parsers], ...]:
    """What the last part of a name must match, and the parsers of what does."""
    return tuple(
        (re.compile(entry["names"]), Parsers(tools=entry.get("tools"), reasoning=entry.get("reasoning")))
        for entry in load_data("parsers.json")["families"]
    )


def tool_parsers() -> Mapping[str, tuple[str, ...]]:
    """Return the parsers of tool calls that vLLM has, each with the tokens that it needs in a tokenizer."""
    return {name: tuple(tokens) for name, tokens in load_data("parsers.json")["tokens"]["tools"].items()}


def reasoning_parsers() -> Mapping[str, tuple[str, ...]]:
    """Return the parsers of reasoning that vLLM has, each with the tokens that it needs in a tokenizer."""
    return {name: tuple(tokens) for name, tokens in load_data("parsers.json")["tokens"]["reasoning"].items()}
