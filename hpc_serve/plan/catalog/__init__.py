"""Facts about models, accelerators and vLLM's parsers as data, and how a name finds its entry.

The JSON files hold the facts, each with its source. A new model or accelerator is one entry in one of them. Whether a
service has a model's parsers is what a person asks for.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from hpc_serve.errors import InvalidRequestError, UnknownModelError

SPEED_ACCURACY = Path(__file__).with_name("speed_accuracy.json")
"""How near printed speeds are to published measurements. benchmarks/accuracy/speed_accuracy.py writes it."""


@dataclass(frozen=True, kw_only=True)
class CatalogModel:
    """A model known by name.

    `name` is the repository as `vllm serve` takes it, `min_vllm` the first version for it. `engine` are the options,
    by EngineConfig's names, that vLLM serves it with.
    """

    name: str
    config: Mapping[str, Any]
    source: Sequence[str]
    aliases: Sequence[str] = ()
    published_parameters: int | None = None
    note: str | None = None
    min_vllm: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)


def speed_accuracy() -> dict[str, Any]:
    """Return published measurements, and how near the estimates are, by arrivals, kind of accelerator and class."""
    return load_data(SPEED_ACCURACY.name)


@lru_cache(maxsize=1)
def models() -> dict[str, CatalogModel]:
    """Return every known model, by its repository name."""
    return {entry["name"]: CatalogModel(**entry) for entry in load_data("models.json")["models"]}


def find(name: str) -> CatalogModel | None:
    """Return the entry of an alias or repository name (case does not matter), or None."""
    return _index().get(name.lower())


def resolve(name: str) -> CatalogModel:
    """Return the entry of an alias or repository name. Raises UnknownModelError with the closest names.

    >>> resolve("405b").name
    'meta-llama/Llama-3.1-405B-Instruct'
    """
    found = find(name)
    if found is None:
        raise UnknownModelError(f"{name!r} is not in the catalogue.{did_you_mean(name)}")
    return found


def did_you_mean(name: str) -> str:
    """Return the words " Did you mean …?" with up to three close names.

    If no name is close, say where all names are listed.
    """
    close = difflib.get_close_matches(name.lower(), _index(), n=3, cutoff=0.6)
    if not close:
        tails = {key.rsplit("/", 1)[-1]: key for key in _index()}
        close = [tails[tail] for tail in difflib.get_close_matches(name.lower(), tails, n=3, cutoff=0.6)]
    named = dict.fromkeys(key if key in _index()[key].aliases else _index()[key].name for key in close)
    if named:
        return f" Did you mean {', '.join(named)}?"
    return " `hpc-serve models` lists those there are; a folder or a path to a config.json will do as well."


@lru_cache(maxsize=1)
def _index() -> dict[str, CatalogModel]:
    index = {entry.name.lower(): entry for entry in models().values()}
    for entry in models().values():
        for alias in entry.aliases:
            index.setdefault(alias.lower(), entry)
    return index


@lru_cache(maxsize=1)
def accelerator_entries() -> dict[str, dict[str, Any]]:
    """Return every known accelerator's facts, by its name and its aliases."""
    entries = load_data("accelerators.json")["accelerators"]
    return {name: entry for entry in entries for name in (entry["name"], *entry["aliases"])}


def is_accelerator(name: str) -> bool:
    """Return whether the catalogue has an accelerator of that name."""
    return name.lower().replace("_", "-") in accelerator_entries()


def accelerator_entry(name: str) -> dict[str, Any]:
    """Return the facts of one accelerator. Raises InvalidRequestError with the closest names."""
    entries = accelerator_entries()
    key = name.lower().replace("_", "-")
    if key in entries:
        return entries[key]
    if re.fullmatch(r"\d+(x\d+)+", key):
        raise InvalidRequestError(f"{name!r} is the shape of a TPU slice: write the chip before it, as in v6e:{key}.")
    close = difflib.get_close_matches(key, entries, n=3, cutoff=0.5)
    hint = f"Did you mean {', '.join(close)}?" if close else f"Known: {', '.join(sorted(entries))}."
    raise InvalidRequestError(f"{name!r} is not an accelerator in the catalogue. {hint}")


def architectures() -> Mapping[str, Mapping[str, Any]]:
    """Return what is known of each architecture by its name in a config; `_about` in the file explains the keys."""
    found: Mapping[str, Mapping[str, Any]] = load_data("architectures.json")["architectures"]
    return found


def config_fields() -> Mapping[str, Any]:
    """Return the fields of configs to check, and the fields that change no size of any model."""
    return load_data("config_fields.json")


def config_keys() -> Mapping[str, Any]:
    """Return the fields that change no weight in transformers, `generic` and by architecture: measured by the tests."""
    return load_data("config_keys.json")


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
    return next((parsers for names, parsers in parser_families() if names.match(name)), Parsers())


@lru_cache(maxsize=1)
def parser_families() -> tuple[tuple[re.Pattern[str], Parsers], ...]:
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


@cache
def load_data(filename: str) -> dict[str, Any]:
    """Return what a JSON file of this package holds."""
    return dict(json.loads(Path(__file__).with_name(filename).read_text(encoding="utf-8")))
