"""What the values of options may be, before a plan is made with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from hpc_serve.errors import InvalidRequestError

_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_LARGEST_GIB = 1_000_000
_Rule: TypeAlias = tuple[Callable[[Any], bool], str]
_BY_TYPE: dict[str, _Rule] = {
    "int | None": (lambda value: value >= 1, "at least 1"),
    "Mapping[str, Any] | None": (lambda value: isinstance(value, Mapping), "a JSON object, as {...}"),
}
_BY_NAME: dict[str, _Rule] = {
    "speculative_config's method": (lambda value: isinstance(value, str), "a text"),
    "speculative_config's model": (lambda value: isinstance(value, str), "a text"),
    "speculative_config's num_speculative_tokens": (lambda one: _is_count(one, 1), "a whole number from 1 to 1000"),
    "eplb_config's num_redundant_experts": (lambda value: _is_count(value, 0), "a whole number from 0 to 1000"),
    "compilation_config's mode": (lambda value: type(value) in (int, str), "a number from 0 to 3, or its name"),
    "compilation_config's cudagraph_mode": (lambda value: str(value).upper() in _MODES, ", ".join(_MODES)),
    "compilation_config's cudagraph_capture_sizes": (lambda value: _are_sizes(value), "a list of sizes"),
    "compilation_config's max_cudagraph_capture_size": (lambda value: _are_sizes([value]), "a size"),
    "optimization_level": (lambda value: value in ("0", "1", "2", "3"), "from 0 to 3"),
    "cpu_offload_gb": (lambda value: 0 <= value <= _LARGEST_GIB, f"from 0 to {_LARGEST_GIB:,} GiB"),
    "kv_offloading_size": (lambda value: 0 <= value <= _LARGEST_GIB, f"from 0 to {_LARGEST_GIB:,} GiB"),
    "gpu_memory_utilization": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
}
"""What the values of options and of keys within them must be: by the option's type, and by name."""


def check_options(options: Mapping[str, tuple[str, Any]]) -> None:
    """Raise InvalidRequestError for an option, or a key within it, whose value cannot be. None is no value.

    `options` has the type and the value of each option by its name.
    """
    rules = {name: _BY_TYPE[type_] for name, (type_, _) in options.items() if type_ in _BY_TYPE} | _BY_NAME
    for name, (is_right, wanted) in rules.items():
        option, _, key = name.partition("'s ")
        _, value = options[option]
        value = (value or {}).get(key) if key else value
        if value is not None and not is_right(value):
            raise InvalidRequestError(f"{name} is {str(value)[:40]}: it must be {wanted}.")


def at_least_one(**numbers: int | None) -> None:
    """Raise InvalidRequestError for a number below 1. None is no number."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise InvalidRequestError(f"{name} is {number}: it must be at least 1.")


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= 1000


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= 2**20 for size in value)
