"""The options of `vllm serve` in the version that hpc-serve pins: their names, their short forms and what they take.

They are data (`data/options.json`), made from vLLM's own parser by `python -m tests.support.vllm_options`. How a
command line is read with them is in `arguments`, which of them may be used in `allowed`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from hpc_serve.given_files import parse_json

Kind = Literal[
    "switch", "text", "integer", "number", "size", "size or auto", "name", "json", "json or text", "json with sizes"
]
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([kKmMgGtT])")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_JSON_STRING = re.compile(r'("(?:[^"\\]|\\.)*")')
_EXPECTED: Mapping[str, str] = {
    "integer": "a whole number",
    "number": "a number",
    "size": "a whole number, or one with k, m, g (powers of 1000) or K, M, G (powers of 1024)",
    "size or auto": "a whole number, or one with k (1000) or K (1024), or auto",
    "json": "JSON",
    "json or text": "JSON",
    "json with sizes": "JSON",
}


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option. `name` is its first long spelling; `negated` are the spellings that switch it off.

    `values` says how many values follow: none ("0"), one ("1"), one or none ("?"), one or more ("+"). If
    `is_optional`, "None" stands for no value. `choices` is empty where vLLM's parser takes any.
    """

    name: str
    spellings: tuple[str, ...]
    negated: tuple[str, ...]
    values: Literal["0", "1", "?", "+"]
    kind: Kind
    is_optional: bool
    repeats: bool
    choices: tuple[str | int, ...]

    @property
    def takes_json(self) -> bool:
        return "json" in self.kind


def load_data(name: str) -> Any:
    """Load one of the data files of this package."""
    return json.loads((Path(__file__).with_name("data") / name).read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def pinned_version() -> str:
    """Return the version of vLLM that has these options."""
    return str(load_data("options.json")["version"])


@lru_cache(maxsize=1)
def options() -> Mapping[str, Option]:
    """Return every option, by each of its spellings."""
    found: dict[str, Option] = {}
    for entry in load_data("options.json")["options"]:
        negated = tuple(entry.get("negated", ()))
        option = Option(
            name=entry["names"][0],
            spellings=(*entry["names"], *negated),
            negated=negated,
            values=entry["values"],
            kind=entry["kind"],
            is_optional=entry.get("optional", False),
            repeats=entry.get("repeats", False),
            choices=tuple(entry.get("choices", ())),
        )
        found |= dict.fromkeys(option.spellings, option)
    return found


def completions(spelling: str) -> tuple[str, ...]:
    """Return the spellings that vLLM's parser would complete `spelling` to: argparse's abbreviations, and `-n2` for `-n
    2`.

    >>> completions("--max-num-seq"), completions("-t"), completions("-n2")
    (('--max-num-seqs',), ('-tp',), ('-n',))
    """
    if len(spelling) < 2 or spelling == "--" or spelling in options():
        return ()
    joined = (spelling[:2],) if spelling[1] != "-" and spelling[:2] in options() else ()
    return (*joined, *(known for known in options() if known.startswith(spelling)))


def convert(option: Option, text: str) -> Any:
    """Convert one value as vLLM's parser does. Raises ValueError, which says what the value must be.

    >>> convert(options()["--max-num-batched-tokens"], "8k"), convert(options()["--max-model-len"], "32K")
    (8000, 32768)
    """
    if option.is_optional and text in ("", "None"):
        return None
    try:
        value = _convert(option.kind, text)
    except ValueError:
        raise ValueError(f"it must be {_EXPECTED[option.kind]}") from None
    if option.choices and value not in option.choices:
        raise ValueError(f"vLLM {pinned_version()} takes {', '.join(map(str, option.choices))}")
    return value


def _convert(kind: Kind, text: str) -> Any:
    if kind == "integer":
        return int(text)
    if kind == "number":
        return float(text)
    if kind == "size or auto" and text.strip().lower() in ("auto", "-1"):
        return -1
    if kind in ("size", "size or auto"):
        return read_size(text)
    if kind == "name":
        return text.lower().replace("-", "_")
    if kind == "json with sizes":
        return parse_json(_expand_sizes(text))
    if kind == "json" or (kind == "json or text" and text.strip().startswith("{") and text.strip().endswith("}")):
        return parse_json(text)
    return text


def read_size(text: str) -> int:
    """Read a number as vLLM does: `8k` is 8,000 and `8K` is 8,192. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return int(text)
    number, suffix = match.groups()
    return int(float(number) * _DECIMAL[suffix]) if suffix in _DECIMAL else int(number) * _BINARY[suffix]


def _expand_sizes(text: str) -> str:
    """Replace sizes as `80g` by numbers outside of strings, as vLLM does in the JSON of its own settings."""
    parts = _JSON_STRING.split(text)
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(rf"\b{_SIZE.pattern}\b", lambda match: str(read_size(match[0])), parts[index])
    return "".join(parts)
