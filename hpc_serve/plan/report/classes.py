"""How far published runs like a plan were from the speed that is printed for them, in words and for --json."""

from __future__ import annotations

from typing import Any

from hpc_serve.plan.catalog import speed_accuracy
from hpc_serve.plan.speed.classes import own_classes, wide_classes
from hpc_serve.plan.speed.step import Roofline


def measured_classes(roofline: Roofline) -> dict[str, dict[str, Any]]:
    """Return the figures of a plan's classes by name: of its accelerator the narrowest with runs, and all wide ones."""
    found = speed_accuracy()["classes"]
    own = [name for name in own_classes(roofline) if name in found][:1]
    wide = [name for name in wide_classes(roofline) if name in found]
    return {name: found[name] for name in (*own, *wide)}


def class_texts(roofline: Roofline) -> list[str]:
    """Return a sentence for each class, without its full stop: "Published runs of all models on v6e had 0.4 to 1.3
    times"."""
    return [f"Published runs of {name} had {_spread(figures)}" for name, figures in measured_classes(roofline).items()]


def _spread(figures: dict[str, Any]) -> str:
    low, high = figures["measured_by_printed"]
    first, third = figures["measured_by_printed_quartiles"]
    sources = f"{figures['sources']} source{'s' * (figures['sources'] > 1)}"
    return (
        f"{low:g} to {high:g} times these tokens/s ({figures['rows']} rows of {sources}; the middle half {first:g} to "
        f"{third:g})"
    )
