"""The script that counts which models of vllm-project/recipes plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.accuracy.recipes import configs, line, main, planned, recipes, summary
from hpc_serve.plan import resolve
from tests.support.recipes import report

RECIPE = """\
meta:
  title: "T"
  tasks:
{tasks}
  related_recipes:
    - "x/y"
model:
  model_id: "{model}"
  parameter_count: "{says}"
  min_vllm_version: "0.19.1"
features:
  tool_calling:
    args:
      - "--tool-call-parser"
      - "kimi_k2"
variants:
  fp8:
    model_id: {variant}
    precision: fp8
"""


def write(folder: Path, model: str, tasks: tuple[str, ...], *, says: str = "8B", variant: str = "none/none") -> None:
    file = folder / "models" / f"{model}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    kinds = "\n".join(f"    - {task}" for task in tasks)
    file.write_text(RECIPE.format(model=model, tasks=kinds, says=says, variant=variant))


def test_recipes_are_counted_by_what_becomes_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkout, folder = tmp_path / "recipes", tmp_path / "configs"
    folder.mkdir()
    write(checkout, "meta-llama/Llama-3.1-8B", ("text",))
    write(checkout, "a/own", ("text", "multimodal"), variant="a/own-FP8")
    write(checkout, "a/unknown", ("text",), says="Undisclosed")
    write(checkout, "a/absent", ("text",))
    write(checkout, "a/picture", ("omni",))
    write(checkout, "a/both", ("text", "omni"))
    write(checkout, "a/Big-ASR", ("multimodal",))
    (folder / "a--own-FP8_config.json").write_text(json.dumps(dict(resolve("70b").config)))
    (folder / "a__unknown.json").write_text(json.dumps({"architectures": ["NobodyForCausalLM"]}))
    (folder / "a--own-FP8_hf_quant_config.json").write_text("{}")

    results = [planned(recipe, configs([folder])) for recipe in recipes(checkout)]

    assert [result.recipe.model.split("/")[1] for result in results] == ["absent", "own", "unknown", "Llama-3.1-8B"]
    assert [result.parameters for result in results] == [None, 70_553_706_496, None, 8_030_261_248]
    assert "NobodyForCausalLM" in results[2].refusal
    assert summary(results) == (
        "4 recipes for text, with images or without. 3 of them have a config here: 2 plan (67 %), 1 are refused by "
        "name. 1 have no config here."
    )
    assert line(results[3]).endswith("8B  8.0B +0.4 %")
    main([str(checkout), str(folder)])
    assert capsys.readouterr().out.endswith(summary(results) + "\n")


def test_the_catalogue_is_compared_with_recipes(tmp_path: Path) -> None:
    for model in ("moonshotai/Kimi-K2.5", "Qwen/Qwen3-8B", "a/absent"):
        write(tmp_path, model, ("text",))
    assert report(list(recipes(tmp_path))).splitlines() == [
        "missing: a/absent (8B)",
        "parsers: Qwen/Qwen3-8B tools: hermes here, kimi_k2 there",
        "parsers: Qwen/Qwen3-8B reasoning: qwen3 here, none there",
        "parsers: a/absent tools: none here, kimi_k2 there",
        "parsers: moonshotai/Kimi-K2.5 reasoning: kimi_k2 here, none there",
        "least vLLM: Qwen/Qwen3-8B: 0.8.5 here, 0.19.1 there",
        "",
        "3 recipes for text, with images or without; missing: 1, parsers: 4, least vLLM: 1.",
    ]
