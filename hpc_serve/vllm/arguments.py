"""The options of `vllm serve`, and the one reader of its arguments: words of a command line or of a file become values.

The options are data (`data/options.json`), made from vLLM's own parser by `python -m tests.support.vllm_options`: those
of the version that hpc-serve pins, and for each later version what differs. Arguments are read as vLLM's parser does
(FlexibleArgumentParser): `--name value`, `--name=value`, underscores for dashes, short forms, `--no-name`, several
values, `--name.key value` for JSON, `-O3`. Which of them may be used is decided in `command`.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hpc_serve.errors import InvalidRequestError
from hpc_serve.given_files import parse_json

ARGS_FILE = "hpc-serve-args.txt"
"""The file in a model's folder whose words are appended where that folder stands in for a model (HPC_SERVE_MODEL)."""

# -- options

Kind = Literal[
    "switch", "text", "integer", "number", "size", "size or auto", "name", "json", "json or text", "json with sizes"
]
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([kKmMgGtT])")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_JSON_STRING = re.compile(r'("(?:[^"\\]|\\.)*")')
_EXPECTED = {
    "integer": "a whole number",
    "number": "a number",
    "size": "a whole number, or one with k, m, g (powers of 1000) or K, M, G (powers of 1024)",
    "size or auto": "a whole number, or one with k (1000) or K (1024), or auto",
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


@cache
def load_data(name: str) -> Any:
    """Return what one of the data files of this package holds."""
    return json.loads((Path(__file__).with_name("data") / name).read_text(encoding="utf-8"))


@cache
def known_versions() -> tuple[str, ...]:
    """Return the versions of vLLM with data, oldest first: the pinned one, and later ones."""
    data = load_data("options.json")
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


@cache
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
        given: dict[str, Any] = {key: one if isinstance(one, (str, bool)) else tuple(one) for key, one in entry.items()}
        option = Option(**given)
        found |= dict.fromkeys((*option.names, *option.negated), option)
    return found


def _entries(version: str) -> dict[str, dict[str, Any]]:
    """Return the data of a version's options, by name: the pinned version's, with what differs in a later one."""
    data = load_data("options.json")
    entries = {entry["names"][0]: entry for entry in data["options"]}
    for later in data["later"]:
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
        raise ValueError(f"it must be {_EXPECTED.get(option.kind, 'JSON')}") from None
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
    count = float(number) if suffix.islower() else int(number)  # powers of 1024 take no fraction
    return int(count * _UNITS[suffix])


def _expand_sizes(text: str) -> str:
    """Replace sizes as `80g` by numbers outside of strings, as vLLM does in the JSON of its own settings."""
    parts = _JSON_STRING.split(text)
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(rf"\b{_SIZE.pattern}\b", lambda match: str(read_size(match[0])), parts[index])
    return "".join(parts)


# -- arguments


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One use of an option. `words` are as written; `spelling` has dashes for underscores and no value.

    `option` is None where the pinned version has none of that spelling. `keys` are those of `--name.key.key`. `stray`
    are words that follow and that the option does not take.
    """

    words: tuple[str, ...]
    spelling: str
    option: Option | None = None
    keys: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    stray: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The option's name, whichever way it is spelt here."""
        return self.option.name if self.option else self.spelling


def read_args_file(text: str) -> tuple[str, ...]:
    """Return the words in a file of arguments: quoted as in a shell, `#` begins a comment. Raises InvalidRequestError.

    >>> read_args_file("--dtype bfloat16  # not dummy")
    ('--dtype', 'bfloat16')
    """
    try:
        return tuple(shlex.split(text, comments=True))
    except ValueError as error:
        raise InvalidRequestError(f"{ARGS_FILE} cannot be read as arguments of vllm serve: {error}.") from error


def read_arguments(words: Iterable[str]) -> tuple[Argument, ...]:
    """Return the words after `vllm serve MODEL` as arguments; every word is in exactly one of them, in order.

    >>> [argument.name for argument in read_arguments(["-tp", "2", "--max_num_seqs=4", "--enforce-eager"])]
    ['--tensor-parallel-size', '--max-num-seqs', '--enforce-eager']
    """
    given, found, place = tuple(words), [], 0
    while place < len(given):
        argument, place = _read_one(given, place)
        found.append(argument)
    return tuple(found)


def value_of(arguments: Iterable[Argument], name: str) -> Any:
    """Return the value that `vllm serve` reads for the option `name` (its long name); None if it is not given.

    The last use wins.

    Switches are True or False, options of several values are tuples, JSON is what it holds. Raises InvalidRequestError
    for a value that the pinned version does not take.
    """
    used = [argument for argument in arguments if argument.option is not None and argument.option.name == name]
    if not used:
        return None
    if dotted := [argument for argument in used if argument.keys]:
        spelling = dict.fromkeys(argument.spelling for argument in dotted).popitem()[0]
        return _merged(argument for argument in dotted if argument.spelling == spelling)
    last = used[-1]
    option = options()[name]
    if option.values == "0":
        return last.spelling not in option.negated
    if option.repeats:
        return tuple(value for argument in used for value in _converted(argument))
    values = _converted(last)
    if option.values == "+":
        return values
    return values[0] if values else (True if option.values == "?" else None)


def without(words: Iterable[str], names: Collection[str]) -> tuple[str, ...]:
    """Return the words without the options of these names.

    >>> without(["--max-model-len", "8192", "-tp", "2"], {"--tensor-parallel-size"})
    ('--max-model-len', '8192')
    """
    kept = (argument for argument in read_arguments(words) if argument.name not in names)
    return tuple(word for argument in kept for word in argument.words)


def names_in(words: Iterable[str]) -> frozenset[str]:
    """Return the names of the options that are used."""
    return frozenset(argument.name for argument in read_arguments(words))


def differing(one: Iterable[str], other: Iterable[str]) -> tuple[str, ...]:
    """Return the options that two commands give differently, in words: the first command's, then the second's.

    >>> differing(["--max-num-seqs", "4"], ["--max-num-seqs=8", "--enforce-eager"])
    ('--max-num-seqs 4, not --max-num-seqs=8', 'no --enforce-eager')
    """
    mine, others = _by_name(one), _by_name(other)
    words = []
    for name in dict.fromkeys((*mine, *others)):
        ours, theirs = mine.get(name, ()), others.get(name, ())
        if [_said(argument) for argument in ours] == [_said(argument) for argument in theirs]:
            continue
        said, instead = (" ".join(word for one in found for word in one.words) for found in (ours, theirs))
        words.append(f"{said}, not {instead}" if ours and theirs else said or f"no {instead}")
    return tuple(words)


def _said(argument: Argument) -> tuple[object, ...]:
    """Return the meaning of an argument, the same for every spelling."""
    is_off = argument.option is not None and argument.spelling in argument.option.negated
    return (is_off, argument.keys, argument.values, argument.stray)


def _by_name(words: Iterable[str]) -> dict[str, tuple[Argument, ...]]:
    found: dict[str, tuple[Argument, ...]] = {}
    for argument in read_arguments(words):
        found[argument.name] = (*found.get(argument.name, ()), argument)
    return found


def check_value(argument: Argument) -> None:
    """Raise InvalidRequestError for values that vLLM's parser does not take after this option."""
    option = argument.option
    assert option is not None
    if option.values == "0" and "=" in argument.words[0]:
        instead = f", or {option.negated[0]}" if option.negated else ""
        raise InvalidRequestError(f"{argument.spelling} takes no value: write it alone{instead}.")
    _check_stray(argument)
    if not argument.keys:
        _converted(argument)


def check_keys(argument: Argument) -> None:
    """Raise InvalidRequestError for a `--name.key` that takes words from the options beside it.

    vLLM takes the word after `--name.key` for its value, even an option, and gives further ones to the option before.
    """
    if not argument.keys:
        return
    written = argument.words[0]
    if not argument.values or ("=" not in written and _begins_option(argument.values[0])):
        raise InvalidRequestError(f"{written} needs a value: write {written}=VALUE.")
    _check_stray(argument)
    if argument.option is not None and not argument.option.takes_json:
        raise InvalidRequestError(f"{argument.name} takes no JSON, so it has no keys after a point.")


def _check_stray(argument: Argument) -> None:
    if stray := shlex.join(argument.stray):
        raise InvalidRequestError(f"{stray} after {argument.words[0]} belongs to no option: vLLM would not read it.")


def _read_one(words: Sequence[str], place: int) -> tuple[Argument, int]:
    """Return the argument that begins at `place`, and where the next one does."""
    start, word = place, words[place]
    place += 1
    if not _begins_option(word):
        place = _end_of_values(words, start)
        return Argument(words=tuple(words[start:place]), spelling="", stray=tuple(words[start:place])), place
    head, equals, value = _optimization_level(word).partition("=")
    spelling, *keys = _with_dashes(head).split(".")
    option = options().get(spelling)
    end = place
    if keys and not equals:
        end = min(place + 1, len(words))  # vLLM takes the next word whatever it is
    after = _end_of_values(words, end)
    if not keys and not equals:
        count = {"0": 0, "1": 1, "?": 1}.get(option.values, after) if option else after
        end = min(place + count, after)
    argument = Argument(
        words=tuple(words[start:after]),
        spelling=spelling,
        option=option,
        keys=tuple(keys),
        values=(*([value] if equals else []), *words[place:end]),
        stray=tuple(words[end:after]),
    )
    return argument, after


def _end_of_values(words: Sequence[str], place: int) -> int:
    while place < len(words) and not _begins_option(words[place]):
        place += 1
    return place


def _begins_option(word: str) -> bool:
    """Return whether vLLM's parser takes `word` for an option: any word with a dash first, but for "-", -1 and "-a
    b"."""
    if not word.startswith("-") or word == "-":
        return False
    head = _with_dashes(_optimization_level(word).partition("=")[0])
    if "." in head or head in options() or completions(head):
        return True  # a point makes it one: vLLM reads even -0.5 so
    return not re.fullmatch(r"-\d+", word) and " " not in word


def _with_dashes(head: str) -> str:
    """Replace underscores by dashes: `--max_num_seqs` is `--max-num-seqs`.

    Keys after a point and short forms stay as they are.
    """
    if not head.startswith("--"):
        return head
    name, point, keys = head.partition(".")
    return name.replace("_", "-") + point + keys


def _optimization_level(word: str) -> str:
    """Replace -O3 and -O=3 by --optimization-level=3, as vLLM does before it reads anything else."""
    if word.startswith("-O") and word != "-O":
        return f"--optimization-level={word[2:].removeprefix('=')}"
    return "--optimization-level" if word == "-O" else word


def _converted(argument: Argument) -> tuple[Any, ...]:
    assert argument.option is not None
    if not argument.values and argument.option.values in ("1", "+"):
        raise InvalidRequestError(f"{argument.spelling} needs a value.")
    try:
        return tuple(convert(argument.option, value) for value in argument.values)
    except ValueError as error:
        shown = " ".join(argument.values)
        raise InvalidRequestError(f"{argument.spelling} is {shown!r}: {error}.") from None


def _merged(arguments: Iterable[Argument]) -> dict[str, Any]:
    """Merge `--name.key value` words into JSON. Keys merge, lists (`--name.key+ a`) grow, and the last use wins."""
    merged: dict[str, Any] = {}
    for argument in arguments:
        value: Any = argument.values[0] if argument.values else ""
        *outer, last = argument.keys
        if last.endswith("+"):
            last, value = last[:-1], value.split(",")
        else:
            value = _json_or_size(value)
        place = merged
        for key in outer:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        if isinstance(value, list) and isinstance(place.get(last), list):
            value = place[last] + value
        place[last] = value
    return merged


def _json_or_size(text: str) -> Any:
    for read in (parse_json, read_size):
        with contextlib.suppress(ValueError):
            return read(text)
    return text
