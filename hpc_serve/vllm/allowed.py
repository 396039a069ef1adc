"""Which options of `vllm serve` may be used, and where they may come from. It decides; `arguments` has read.

`data/classes.json` puts every option of the pinned version into one class: "free"; "owner" (on the command line or in
the script, not in a file of arguments: it names code or opens the engine); "ours" (the launcher sets it); "refused".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.vllm.arguments import ARGS_FILE, Argument, check_keys, check_value, read_arguments, value_of
from hpc_serve.vllm.options import completions, known_versions, load_data, nearest_version, options, pinned_version

OVERRULE = "--allow-unknown-vllm-options"
"""The option of `submit` and `render` that accepts options which the pinned version does not know."""
# The launcher reads these from the engine's command line; an abbreviation would hide them.
_READ_BY_LAUNCHER = (
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "--data-parallel-hybrid-lb",
    "--served-model-name",
    "--port",
    "--api-server-count",
    "--distributed-executor-backend",
)


def check_arguments(words: Iterable[str], *, allow_unknown: bool, version: str = "") -> None:
    """Raise InvalidRequestError for words that the engine must not get. The value of a refused option is not repeated.

    Without `allow_unknown`, vLLM of this version must have every option and accept its value; "" is the pinned version,
    and the nearest one with data decides. With `allow_unknown`, options and values of another version pass: for the
    launcher, and if a person says so. A refused option stays refused.
    """
    version = nearest_version(version or pinned_version())
    arguments = read_arguments(words)
    for argument in arguments:
        if argument.spelling == "--":
            raise InvalidRequestError("`--` ends the options for vLLM, and the launcher adds more: leave it out.")
        _check_not_refused(argument)
        _check_no_credential(argument)
        check_keys(argument)
        option = options(version).get(argument.spelling)
        if argument.option is None or (option is None and not allow_unknown):
            _check_unknown(argument, allow_unknown, version)
        elif not allow_unknown:
            _check_value(replace(argument, option=option))
    for name, reason in _classes()["only_one"].items():
        if (size := value_of(arguments, name)) is not None and size != 1:
            raise InvalidRequestError(f"{name} {size} cannot be given to the engine: {reason}.")


def options_of_others(words: Iterable[str], version: str) -> Iterator[tuple[str, str]]:
    """Yield the options that vLLM of this version lacks, each with a known version that has it.

    An option that no known version has is not among them.

    >>> list(options_of_others(["--monokernel", "--seed", "1", "--not-known"], "0.32.0"))
    [('--monokernel', '0.33.0')]
    """
    for argument in read_arguments(words):
        if argument.option is not None and argument.spelling not in options(nearest_version(version)):
            yield argument.spelling, _owner(argument.spelling)


def _owner(spelling: str) -> str:
    return next(version for version in reversed(known_versions()) if spelling in options(version))


def check_file_arguments(words: Iterable[str]) -> None:
    """Raise InvalidRequestError for words that a file of arguments may not hold.

    A file may hold what is "free" in the pinned version: an option that nobody has looked at could name code.
    """
    words = tuple(words)
    check_arguments(words, allow_unknown=True)
    for argument in read_arguments(words):
        if argument.option is None:
            raise InvalidRequestError(
                f"{ARGS_FILE} holds {argument.spelling or argument.words[0]!r}, which vLLM {pinned_version()} does not "
                "have: a file may hold only options that are known to name no code. Give it on the command line."
            )
        if reason := _classes()["owner"].get(argument.name):
            raise InvalidRequestError(
                f"{ARGS_FILE} holds {argument.name}, and {reason}: give it on the command line, or in the script."
            )
        _check_keys(argument)


def classes() -> Mapping[str, str]:
    """Return the class of every option, by its name: free, owner, ours, refused or only_one."""
    return {name: kind for kind in ("free", "owner", "ours", "refused", "only_one") for name in _classes()[kind]}


@lru_cache(maxsize=1)
def _classes() -> Mapping[str, Any]:
    data: Mapping[str, Any] = load_data("classes.json")
    return data


def _check_not_refused(argument: Argument) -> None:
    for name in (argument.name, *_meant(argument)):
        if reason := _classes()["ours"].get(name) or _classes()["refused"].get(name):
            raise InvalidRequestError(f"{name} cannot be given to the engine: {reason}.")


def _check_no_credential(argument: Argument) -> None:
    from hpc_serve.redact import holds_credential  # compiles many patterns

    if any(map(holds_credential, argument.words)):
        raise InvalidRequestError(
            f"{argument.spelling.partition('.')[0] or 'a word'} holds a password or a token, which would stand in the "
            "script and in the process list of every node: give it in a file that the engine reads, or in a variable "
            "that you export before you submit (for traces: OTEL_EXPORTER_OTLP_HEADERS)."
        )


def _meant(argument: Argument) -> tuple[str, ...]:
    """Return the options that vLLM may complete an unknown spelling to."""
    if argument.option is not None:
        return ()
    return tuple(dict.fromkeys(options()[spelling].name for spelling in completions(argument.spelling)))


def _check_unknown(argument: Argument, allow_unknown: bool, version: str) -> None:
    spelling, meant = argument.spelling, _meant(argument)
    if allow_unknown and not any(name in _READ_BY_LAUNCHER for name in meant):
        return
    if not spelling:
        raise InvalidRequestError(f"{' '.join(argument.words)!r} belongs to no option of vllm serve.")
    if meant:
        raise InvalidRequestError(
            f"{spelling} is not the full name of an option: write {' or '.join(meant[:3])}, and its value as a "
            "separate word. vLLM completes abbreviations, hpc-serve does not guess."
        )
    hint = f", {_owner(spelling)} has it" if argument.option is not None else ""
    raise InvalidRequestError(
        f"vLLM {version} has no option {spelling}{_hint(spelling) or hint} (for another version of vLLM: {OVERRULE})."
    )


def _check_value(argument: Argument) -> None:
    try:
        check_value(argument)
    except InvalidRequestError as error:
        if argument.option is not None and argument.option.choices:
            raise InvalidRequestError(f"{error} For another version of vLLM: {OVERRULE}.") from None
        raise


def _hint(spelling: str) -> str:
    if successor := _classes()["successors"].get(spelling):
        return f": {successor}"
    import difflib  # seldom needed, and never by the launcher

    near = difflib.get_close_matches(spelling, options(), n=1, cutoff=0.75)
    return f": did you mean {near[0]}?" if near and near[0] != spelling else ""


def _check_keys(argument: Argument) -> None:
    free = _classes()["free_keys"].get(argument.name)
    if free is None:
        return
    given = value_of([argument], argument.name)
    for key in given if isinstance(given, dict) else ():
        if key not in free:
            raise InvalidRequestError(
                f"{ARGS_FILE} holds {argument.name} with the key {key!r}, which may name code or a folder to write to: "
                "give it on the command line, or in the script."
            )
    if not isinstance(given, dict):
        raise InvalidRequestError(f"{ARGS_FILE} holds {argument.name} with something that is no JSON object.")
