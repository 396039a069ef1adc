"""The options of `vllm serve`: their names, their short forms and what they take.

They are data (`data/options.json`), made from vLLM's own parser by `python -m tests.support.vllm_options`: those of the
version that hpc-serve pins, and for each later version what differs. How a command line is read with them is in
`arguments`, which of them may be used in `command`.
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
    """One option, by its entry in the data. `names` are its spellings, first the long one; `negated` switch it off.

    `values` says how many values follow: none ("0"), one ("1"), one or none ("?"), one or more ("+"). If `optional`,
    "None" stands for no value. If it `repeats`, each use adds a value. `choices` is empty where vLLM's parser takes
    any. `version` is vLLM's, "" for the option as all known versions have it.
    """

    names: tuple[str, ...]
    values: Literal["0", "1", "?", "+"]
    kind: Kind
    negated: tuple[str, ...] = ()
    optional: bool = False
    repeats: bool = False
    choices: tuple[str | int, ...] = ()
    version: str = ""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def takes_json(self) -> bool:
        return "json" in self.kind


def load_data(name: str) -> Any:
    """Load one of the data files of this package."""
    return json.loads((Path(__file__).with_name("data") / name).read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def known_versions() -> tuple[str, ...]:
    """Return the versions of vLLM with data, oldest first: the pinned one, and later ones."""
    data = _data()
    return (data["version"], *(later["version"] for later in data["later"]))


def pinned_version() -> str:
    """Return the version of vLLM that hpc-serve is tested with."""
    return known_versions()[0]


def nearest_version(version: str) -> str:
    """Return the newest version with data that is not newer than `version`. Before the pinned version it is this one.

    >>> nearest_version("0.11.2"), nearest_version("0.33.1"), nearest_version("1.0")
    ('0.32.0', '0.33.0', '0.33.0')
    """
    older = (known for known in known_versions() if _minor(known) <= _minor(version))
    return max(older, key=_minor, default=pinned_version())


def is_known(version: str) -> bool:
    """Return whether there is data of this version. The last number does not count."""
    return _minor(nearest_version(version)) == _minor(version)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@lru_cache(maxsize=8)
def options(version: str = "") -> Mapping[str, Option]:
    """Return every option of a known version, by each of its spellings.

    "" stands for all known versions: command lines are read with it. A value is a choice if one version takes it.
    """
    entries: dict[str, dict[str, Any]] = {}
    for known in (version,) if version else known_versions():
        for name, entry in _entries(known).items():
            before = entries.get(name, {}).get("choices") or ()
            choices = dict.fromkeys((*before, *(entry.get("choices") or ())))
            entries[name] = {**entry, "choices": choices, "version": version}
    found: dict[str, Option] = {}
    for entry in entries.values():
        fields: dict[str, Any] = {
            key: value if isinstance(value, (str, bool)) else tuple(value or ()) for key, value in entry.items()
        }
        option = Option(**fields)
        found |= dict.fromkeys((*option.names, *option.negated), option)
    return found


@lru_cache(maxsize=1)
def _data() -> Any:
    return load_data("options.json")


def _entries(version: str) -> dict[str, dict[str, Any]]:
    """Return the data of a version's options, by name: the pinned version's, with what differs in a later one."""
    entries = {entry["names"][0]: entry for entry in _data()["options"]}
    for later in _data()["later"]:
        if later["version"] == version:
            entries = {name: entry for name, entry in entries.items() if name not in later["gone"]}
            for change in later["options"]:
                name = change["names"][0]
                entries[name] = {**entries.get(name, {}), **change}
    return entries


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
    if option.optional and text in ("", "None"):
        return None
    try:
        value = _convert(option.kind, text)
    except ValueError:
        raise ValueError(f"it must be {_EXPECTED[option.kind]}") from None
    if option.choices and value not in option.choices:
        raise ValueError(f"{f'vLLM {option.version}'.strip()} takes {', '.join(map(str, option.choices))}")
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
