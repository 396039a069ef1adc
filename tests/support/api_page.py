"""The page of the calls for programs, by inspection: signatures, docstrings, examples."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Sequence
from typing import Any

import hpc_serve.client
from hpc_serve.client import Endpoint, ReplicaAnswer, ReplicaStatus, ServiceStatus, tell_all
from tests.support.markdown import block, page, told

_WIDE = 88
_VALUES = (Endpoint, ReplicaAnswer, ServiceStatus, ReplicaStatus)


def python_api() -> str:
    """The calls for programs: signatures, docstrings, examples."""
    parts: Sequence[tuple[str, Any, Iterable[Any]]] = (
        ("Use a service", hpc_serve.client, (*_of(hpc_serve), tell_all, *_VALUES)),
        ("Plan", hpc_serve.plan, _of(hpc_serve.plan)),
        ("Submit", hpc_serve.submit, _of(hpc_serve.submit)),
        ("Measure", hpc_serve.bench, _of(hpc_serve.bench)),
    )
    lines = [
        block("import hpc_serve\n\nhelp(hpc_serve)", "python"),
        "Each name is imported when it is first used. The package is typed. Every example of this page runs in a test.",
        "All [errors](exit-codes.md#errors-in-python) are subclasses of `hpc_serve.errors.HpcServeError`.",
    ]
    for title, package, names in parts:
        lines += [f"## {title}", *told(package.__doc__ or "")]
        for one in names:
            shown = (
                "hpc_serve" if package is hpc_serve.client and one.__name__ in hpc_serve.__all__ else package.__name__
            )
            lines += [f"### {one.__name__}", _signature(one, f"{shown}.{one.__name__}"), *told(one.__doc__ or "")]
    return page("Python API", lines)


def _of(package: Any) -> list[Any]:
    """The calls that a package names, then the values; not its modules."""
    found = (getattr(package, name) for name in package.__all__)
    return sorted((one for one in found if not inspect.ismodule(one)), key=inspect.isclass)


def _signature(one: Any, name: str) -> str:
    words = []
    for parameter in inspect.signature(one).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" = {_shown(parameter.default)}"
        words.append(f"{stars}{parameter.name}: {parameter.annotation}{default}")
    returned = inspect.signature(one).return_annotation
    end = ")" if isinstance(one, type) or returned in (None, inspect.Signature.empty) else f") -> {returned}"
    text = f"{name}({', '.join(words)}{end}"
    if len(text) > _WIDE:
        text = "\n".join([f"{name}(", *(f"    {word}," for word in words), end])
    return block(text, "python")


def _shown(default: Any) -> str:
    if default is os.environ:
        return "os.environ"
    return "…" if repr(default) == "<factory>" else repr(default)
