"""Which of vLLM's parsers a model takes, against the names that the installed vLLM registers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog import Parsers, parser_families, parsers_of, reasoning_parsers, tool_parsers
from hpc_serve.submit.plans.planning import plan_service
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.script.render import render_script


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
