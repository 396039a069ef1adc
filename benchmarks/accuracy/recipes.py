"""Counts which models of vllm-project/recipes plan: `python -m benchmarks.accuracy.recipes CHECKOUT CONFIGS...`.

CHECKOUT is a copy of that repository, CONFIGS are folders of config.json files named after their models
(`org--name_config.json`, `org__name.json` or `org/name/config.json`). A model is sized by its own config, by that of a
variant (the same model, quantised; the recipe names it, or its name is the model's with -FP8 or -NVFP4), by the
catalogue's, or by data/published_configs.json. Recipes for pictures, sound and embeddings are out of scope.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy import published_configs
from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan import model_from_config
from hpc_serve.plan.catalog import find

_IN_SCOPE = {"text", "multimodal"}
_SOUND = re.compile(r"whisper|-ASR|Voxtral|Transcribe", re.IGNORECASE)
"""Recipes of models for speech, which call themselves multimodal."""
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One model that the recipes list: its name, its variants' names, and its size as the recipe says it ("671B").

    `min_vllm`, `tools` and `reasoning` are its least version and its parsers; "" where it names none.
    """

    model: str
    variants: tuple[str, ...]
    says: str
    min_vllm: str = ""
    tools: str = ""
    reasoning: str = ""

    @property
    def published(self) -> float | None:
        """Parameters as the recipe says them."""
        found = re.fullmatch(r"([\d.]+)([KMBT])", self.says)
        return float(found[1]) * _SUFFIXES[found[2]] if found else None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a recipe. `parameters`: it plans. `refusal`: why not. Neither: no config of it is here."""

    recipe: Recipe
    parameters: int | None = None
    refusal: str = ""


def recipes(checkout: Path) -> Iterator[Recipe]:
    """The models with text or images in, and text out."""
    for file in sorted(checkout.glob("models/*/*.yaml")):
        text = file.read_text(encoding="utf-8")
        tasks = re.search(r"^  tasks:\n((?:    - .*\n)+)", text, re.MULTILINE)
        kinds = set(re.findall(r"- [\"']?(\w+)", tasks[1])) if tasks else set()
        if not kinds or not kinds <= _IN_SCOPE or _SOUND.search(file.stem):
            continue
        names = re.findall(r"^\s+model_id:\s*[\"']?([^\s\"']+)", text, re.MULTILINE)
        yield Recipe(
            model=names[0],
            variants=tuple(names[1:]),
            says=_first(r"^  parameter_count:\s*[\"']?([^\s\"']+)", text),
            min_vllm=_first(r"^  min_vllm_version:\s*[\"']?([\d.]+)", text),
            tools=_first(r"--tool-call-parser[\"']?\s+(?:-\s+)?[\"']?(\w+)", text),
            reasoning=_first(r"--reasoning-parser[\"']?\s+(?:-\s+)?[\"']?(\w+)", text),
        )


def _first(pattern: str, text: str) -> str:
    """The first group of the first match, or "" without one."""
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else ""


Configs = dict[str, list[dict[str, Any]]]
"""Configs by the name of their model, in small letters: without its organisation, and without how it is quantised."""


def configs(folders: list[Path]) -> Configs:
    """The files in these folders, and the configs of this project."""
    found: Configs = {}
    for folder in folders:
        for file in sorted(folder.rglob("*.json")):
            if file.name == "config.json":
                name = "/".join(file.parent.parts[-2:])
            elif file.stem.endswith("_hf_quant_config"):
                continue
            else:
                name = re.sub(r"--|__", "/", file.stem.removesuffix("_config"), count=1)
            found.setdefault(_short(name), []).append(json.loads(file.read_text(encoding="utf-8")))
    for entry in published_configs():
        found.setdefault(_short(entry["name"]), []).append(entry["config"])
    return found


def _short(name: str) -> str:
    return re.sub(r"-(?:FP8|NVFP4|BF16)$", "", name.rsplit("/", 1)[-1], flags=re.IGNORECASE).lower()


def planned(recipe: Recipe, known: Configs) -> Result:
    """Size one recipe's model. A config that is refused does not hide another one that is not."""
    result = Result(recipe=recipe)
    for name in (recipe.model, *recipe.variants):
        entry = find(name)
        for config in (*known.get(_short(name), ()), *([dict(entry.config)] if entry else ())):
            try:
                parameters = model_from_config(config, name=name).parameters
            except InvalidRequestError as error:
                result = Result(recipe=recipe, refusal=result.refusal or str(error))
            else:
                return Result(recipe=recipe, parameters=parameters)
    return result


def summary(results: list[Result]) -> str:
    """The counts in one sentence."""
    plan = sum(result.parameters is not None for result in results)
    refused = sum(bool(result.refusal) for result in results)
    with_config = plan + refused
    share = f" ({100 * plan / with_config:.0f} %)" if with_config else ""
    return (
        f"{len(results)} recipes for text, with images or without. {with_config} of them have a config here: "
        f"{plan} plan{share}, {refused} are refused by name. {len(results) - with_config} have no config here."
    )


def line(result: Result) -> str:
    """One model: what it has by our count, beside what the recipe says, or why it does not plan."""
    name, says = result.recipe.model, result.recipe.says
    if result.parameters is None:
        return f"{'refused' if result.refusal else 'no config':<10} {name:<52} {says:>6}  {result.refusal[:120]}"
    published = result.recipe.published
    difference = f"{100 * (result.parameters / published - 1):+.1f} %" if published else ""
    return f"{'plans':<10} {name:<52} {says:>6}  {result.parameters / 1e9:,.1f}B {difference}"


def main(arguments: list[str]) -> None:
    if not arguments:
        raise SystemExit(__doc__)
    files = configs([Path(folder) for folder in arguments[1:]])
    results = [planned(recipe, files) for recipe in recipes(Path(arguments[0]))]
    for result in results:
        print(line(result))
    print(f"\n{summary(results)}")


if __name__ == "__main__":
    main(sys.argv[1:])
