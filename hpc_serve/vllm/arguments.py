"""The one reader of the arguments of `vllm serve`: words of a command line or of a file become options with values.

It reads them as vLLM's own parser does (FlexibleArgumentParser): `--name value`, `--name=value`, underscores for
dashes, short forms, `--no-name`, several values, `--name.key value` for JSON, `-O3`. Which of them may be used is
decided in `command`.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.given_files import parse_json
from hpc_serve.vllm.options import Option, completions, convert, options, read_size

ARGS_FILE = "hpc-serve-args.txt"
"""The file in a model's folder whose words are appended where that folder stands in for a model (HPC_SERVE_MODEL)."""


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
    return tuple(_read(tuple(words)))


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
        raise InvalidRequestError(f"{argument.spelling} takes no value: write it alone{_negation(option)}.")
    if argument.stray:
        raise _stray(argument)
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
    if argument.stray:
        raise _stray(argument)
    if argument.option is not None and not argument.option.takes_json:
        raise InvalidRequestError(f"{argument.name} takes no JSON, so it has no keys after a point.")


def _stray(argument: Argument) -> InvalidRequestError:
    stray = shlex.join(argument.stray)
    return InvalidRequestError(f"{stray} after {argument.words[0]} belongs to no option: vLLM would not read it.")


def _negation(option: Option) -> str:
    return f", or {option.negated[0]}" if option.negated else ""


def _read(words: Sequence[str]) -> Iterator[Argument]:
    place = 0
    while place < len(words):
        argument, place = _read_one(words, place)
        yield argument


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
    values = [value] if equals else []
    if keys:
        # vLLM takes the next word whatever it is.
        taken = 0 if equals else 1
        values += words[place : place + taken]
        place = min(place + taken, len(words))
    after = _end_of_values(words, place)
    if not keys and not equals:
        count = {"0": 0, "1": 1, "?": 1}.get(option.values, after) if option else after
        taken_to = min(place + count, after)
        values += words[place:taken_to]
        place = taken_to
    return (
        Argument(
            words=tuple(words[start:after]),
            spelling=spelling,
            option=option,
            keys=tuple(keys),
            values=tuple(values),
            stray=tuple(words[place:after]),
        ),
        after,
    )


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
