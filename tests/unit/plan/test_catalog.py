"""Which of vLLM's parsers a model takes, and the script that compares the catalogue with vllm-project/recipes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.accuracy.recipes import configs, line, main, planned, recipes, summary
from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan import resolve
from hpc_serve.plan.catalog import Parsers, parser_families, parsers_of, reasoning_parsers, tool_parsers
from hpc_serve.submit.plans.planning import plan_service
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.script.render import render_script
from tests.support.recipes import report


@pytest.mark.parametrize(
    ("model", "tools", "reasoning"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3_json", None),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3_json", None),
        ("meta-llama/Meta-Llama-3.1-405B-Instruct", "llama3_json", None),
        ("/scratch/me/Llama-3.3-70B-Instruct/", "llama3_json", None),
        ("meta-llama/Llama-3.1-8B", None, None),
        ("meta-llama/Meta-Llama-3-8B-Instruct", None, None),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4_pythonic", None),
        ("Qwen/Qwen2.5-72B-Instruct", "hermes", None),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", None, None),
        ("Qwen/Qwen3-8B", "hermes", "qwen3"),
        ("Qwen/Qwen3-8B-Base", None, None),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "hermes", None),
        ("Qwen/Qwen3-Next-80B-A3B-Thinking", "hermes", "qwen3"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", "qwen3_coder", None),
        ("Qwen/Qwen3.5-27B", "qwen3_coder", "qwen3"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", None, "deepseek_r1"),
        ("deepseek-ai/DeepSeek-V3", None, None),
        ("openai/gpt-oss-120b", "openai", "openai_gptoss"),
        ("zai-org/GLM-4.5", "glm45", "glm45"),
        ("zai-org/GLM-4.5V", None, None),
        ("zai-org/GLM-5.1-FP8", "glm47", "glm45"),
        ("moonshotai/Kimi-K2.6", "kimi_k2", "kimi_k2"),
        ("moonshotai/Kimi-K3", "kimi_k3", "kimi_k3"),
        ("MiniMaxAI/MiniMax-M3", "minimax_m3", "minimax_m3"),
        ("Qwen/Qwen3-VL-8B-Instruct", "hermes", None),
        ("moonshotai/Kimi-K2-Base", None, None),
        ("swiss-ai/Apertus-70B-Instruct-2509", "apertus", None),
        ("acme/rocket-7b", None, None),
    ],
)
def test_a_model_is_known_by_its_name(model, tools, reasoning):
    assert parsers_of(model) == Parsers(tools=tools, reasoning=reasoning)


def test_deepseek_v4_has_its_chat_template_in_a_tokenizer_mode():
    assert parsers_of("deepseek-ai/DeepSeek-V4-Flash").vllm_args[1:] == (
        *("--tool-call-parser", "deepseek_v4", "--reasoning-parser", "deepseek_v4"),
        *("--tokenizer-mode", "deepseek_v4"),
    )


def test_the_data_names_vllms_parsers_and_the_tokens_they_need():
    """The program makes each parser of the installed vLLM with and without each token."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    argv = [sys.executable, "-m", "tests.support.parser_tokens"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: list(tokens) for name, tokens in tool_parsers().items()} == found["tools"]
    assert {name: list(tokens) for name, tokens in reasoning_parsers().items()} == found["reasoning"]


def test_vllm_has_every_parser_of_a_family():
    assert {one.tools for _, one in parser_families() if one.tools} <= set(tool_parsers())
    assert {one.reasoning for _, one in parser_families() if one.reasoning} <= set(reasoning_parsers())


def _script(model: str, *words: str, tools: bool = True) -> str:
    request = ServeRequest(model=model, service="x", tools=tools, engine_args=words)
    return render_script(request, plan_service(request))


def test_the_engine_has_them_where_tools_are_asked_for():
    script = _script("qwen3-8b")
    assert "\n            --enable-auto-tool-choice " in script
    assert "\n            --tool-call-parser hermes " in script
    assert "\n            --reasoning-parser qwen3" in script
    assert "--tools" in script.splitlines()[2]
    assert "parser" not in _script("qwen3-8b", tools=False)


def test_those_that_are_given_win():
    script = _script("qwen3-8b", "--tool-call-parser", "qwen3_xml", "--no-enable-auto-tool-choice")
    engine = script[script.index("vllm serve Qwen") :]
    assert "--tool-call-parser qwen3_xml" in engine
    assert "hermes" not in engine
    assert " --enable-auto-tool-choice" not in engine
    assert "--reasoning-parser qwen3" in engine


def test_tools_of_a_model_that_has_none_known_are_refused():
    with pytest.raises(InvalidRequestError, match="no parser is known for deepseek-ai/DeepSeek-V3"):
        _script("v3")
    with pytest.raises(InvalidRequestError, match=r"one of vLLM's: apertus, .*, llama3_json, .*, xlam\.$"):
        _script("v3")
    assert "--tool-call-parser deepseek_v3" in _script("v3", "--tool-call-parser", "deepseek_v3")


# -- recipes

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
