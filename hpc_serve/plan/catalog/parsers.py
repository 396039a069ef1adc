"""Names vLLM's parsers for tool calls and for reasoning that a model takes, by the model's name: data (parsers.json).

The data also lists all parsers, and the tokens that each needs in a tokenizer. A person decides whether a service has
them.

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
    """vLLM's names of the parsers. None: the model has no such output, or its parser is not known.

    `tokenizer` is the --tokenizer-mode that has the chat template of such a model.
    """

    tools: str | None = None
    reasoning: str | None = None
    tokenizer: str | None = None

    @property
    def vllm_args(self) -> tuple[str, ...]:
        """The options of `vllm serve` that switch them on."""
        tools = ("--enable-auto-tool-choice", "--tool-call-parser", self.tools) if self.tools else ()
        reasoning = ("--reasoning-parser", self.reasoning) if self.reasoning else ()
        return (*tools, *reasoning, *(("--tokenizer-mode", self.tokenizer) if self.tokenizer else ()))


def parsers_of(model: str) -> Parsers:
    """Return the parsers of a model by its repository or folder.

    >>> parsers_of("Qwen/Qwen3-8B").vllm_args[1:]
    ('--tool-call-parser', 'hermes', '--reasoning-parser', 'qwen3')
    """
    name = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return next((parsers for names, parsers in families() if names.match(name)), Parsers())


@lru_cache(maxsize=1)
def families() -> tuple[tuple[re.Pattern[str], Parsers], ...]:
    """Return pairs of an expression for the last part of a name, and the parsers of the models with such a name."""
    return tuple(
        (re.compile(entry["names"]), Parsers(**{key: entry.get(key) for key in ("tools", "reasoning", "tokenizer")}))
        for entry in load_data("parsers.json")["families"]
    )


def tool_parsers() -> Mapping[str, tuple[str, ...]]:
    """Return the parsers of tool calls that vLLM has, each with the tokens that it needs in a tokenizer."""
    return {name: tuple(tokens) for name, tokens in load_data("parsers.json")["tokens"]["tools"].items()}


def reasoning_parsers() -> Mapping[str, tuple[str, ...]]:
    """Return the parsers of reasoning that vLLM has, each with the tokens that it needs in a tokenizer."""
    return {name: tuple(tokens) for name, tokens in load_data("parsers.json")["tokens"]["reasoning"].items()}
