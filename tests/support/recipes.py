"""Compares the catalogue with vllm-project/recipes: names that are missing, parsers and least versions that differ.

CHECKOUT is a copy of that repository. Recipes for pictures, sound and embeddings are out of scope. The program changes
nothing: a person decides which side is right, and writes the source into the data.

    python -m tests.support.recipes CHECKOUT
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.accuracy.recipes import Recipe, recipes
from hpc_serve.plan.catalog import find, parsers_of
from tests.support.arguments import given_words

PARTS = ("missing", "parsers", "least vLLM")


def differences(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Each difference of one recipe: its part, and a line that says what both sides have."""
    entry = find(recipe.model)
    if entry is None:
        others = [name for name in recipe.variants if find(name)]
        yield "missing", f"{recipe.model} ({recipe.says or 'no size'})" + (f", here: {others[0]}" if others else "")
    ours = parsers_of(recipe.model)
    for kind, here, there in (("tools", ours.tools, recipe.tools), ("reasoning", ours.reasoning, recipe.reasoning)):
        if (here or "") != there:
            yield "parsers", f"{recipe.model} {kind}: {here or 'none'} here, {there or 'none'} there"
    if entry is not None and recipe.min_vllm and entry.min_vllm != recipe.min_vllm:
        yield "least vLLM", f"{recipe.model}: {entry.min_vllm or 'none'} here, {recipe.min_vllm} there"


def report(found: list[Recipe]) -> str:
    """All differences by part, and the counts in a last line."""
    every = [difference for recipe in found for difference in differences(recipe)]
    lines = [f"{part}: {line}" for part in PARTS for of, line in every if of == part]
    counts = ", ".join(f"{part}: {sum(of == part for of, _ in every)}" for part in PARTS)
    return "\n".join([*lines, "", f"{len(found)} recipes for text, with images or without; {counts}."])


if __name__ == "__main__":
    (checkout,) = given_words(__doc__, 1)
    print(report(list(recipes(Path(checkout)))))
