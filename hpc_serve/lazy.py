"""Names of a package that are imported when they are first used, so that importing the package is quick."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, places: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package: `places` has the module below it that has each name.

    An empty place: the name is a module itself.
    """

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = places[name]
        module = import_module(f"{package}.{place or name}")
        return getattr(module, name) if place else module

    return get, lambda: sorted({*vars(sys.modules[package]), *places})
