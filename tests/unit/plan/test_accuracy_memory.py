"""The planner and other tools against figures of real vLLM runs: `python -m benchmarks.accuracy.memory_cases`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.accuracy.memory_cases import Score, load_cases, load_later_cases, median_error, promised, score, table
from benchmarks.accuracy.other_tools import table as other_tools
from benchmarks.accuracy.other_tools.__main__ import ANSWERS, document, tools
from benchmarks.accuracy.other_tools.headers import checkpoint_tensors
from benchmarks.accuracy.other_tools.questions import Row, memory_rows, speed_questions
from benchmarks.accuracy.other_tools.table import Tool, ninetieth, summaries, summary_lines, verdicts
from hpc_serve.plan import model_from_config, resolve

PAGE = " ".join((Path(__file__).parents[3] / "docs/evidence/accuracy.md").read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def scores() -> list[Score]:
    return [score(case, about) for case, about in load_cases()]


def test_accuracy(scores: list[Score], show_table: Callable[[str], None]) -> None:
    show_table(table(scores))
    scored = [one for one in scores if not one.left_out]
    v1 = [one for one in scored if not one.is_v0]
    assert len(scored) >= 30
    for group in (scored, v1):
        assert median_error(group, "weights") <= 1
        assert median_error(group, "kv") <= 5


def test_the_accuracy_that_is_promised_since_0_8(scores: list[Score]) -> None:
    every = [*scores, *(score(case, about) for case, about in load_later_cases())]
    count, median, ninetieth = promised(every, "weights")
    assert count >= 30
    assert max(median, ninetieth) <= 1
    assert f"of weights per GPU is {median:.2f} % in the median and {ninetieth:.1f} % at the 90th percentile" in PAGE
    count, median, ninetieth = promised(every, "kv")
    assert count >= 30
    assert median <= 3
    assert ninetieth <= 10
    assert f"that of the KV cache {median:.1f} % and {ninetieth:.1f} %." in PAGE


def test_nothing_that_ran_is_called_impossible(scores: list[Score]) -> None:
    assert [one.id for one in scores if one.ran and one.fits is False] == []
    assert sum(one.ran for one in scores) >= 20


def test_nothing_that_vllm_refused_is_called_fine(scores: list[Score]) -> None:
    assert [one.id for one in scores if one.refused and one.fits] == []
    assert sum(one.refused and one.fits is False for one in scores) >= 7


def test_every_case_left_out_says_why(scores: list[Score]) -> None:
    assert all(one.left_out != "" for one in scores)
    assert {one.id for one in scores} == {case["id"] for case, _ in load_cases()}


def test_versions_since_0_19() -> None:
    scores = [score(case, about) for case, about in load_later_cases()]
    assert len(scores) == 31
    assert [one.id for one in scores if one.fits == one.refused] == []
    assert median_error(scores, "weights") <= 0.1
    assert median_error(scores, "kv") <= 1
    for name, most in (("activation", 0.05), ("non-torch", 0.05)):
        pairs = [one.figures[name] for one in scores if name in one.figures]
        assert len(pairs) >= 10
        assert all(abs(predicted - measured) <= most for predicted, measured in pairs), name


def test_engines_with_experts_over_ranks() -> None:
    """Data-parallel ranks on one node, with redundant experts and without, and expert parallelism alone."""
    cases = load_later_cases()
    scores = [score(*one) for one in cases if one[0].get("dp", 1) > 1 or "enable_expert_parallel" in one[1]]
    assert len(scores) == 7
    weights, caches = (
        [abs(error) for one in scores if (error := one.error(name)) is not None] for name in ("weights", "kv")
    )
    assert max(weights) <= 1
    assert statistics.median(caches) <= 5
    told = f"off by {statistics.median(weights):.1f} % in the median and at most {max(weights):.1f} %"
    assert f"{told}, the cache by {statistics.median(caches):.1f} %." in PAGE


# -- other tools: `python -m benchmarks.accuracy.other_tools` prints the table

ROOT = Path(__file__).parents[3]
ROWS = [
    Row(id="a", question={}, truth={"weights": 10}, ours={"weights": 10.1}, fits=True, ran=True),
    Row(id="b", question={}, truth={"weights": 20}, ours={"weights": 20}, fits=False, ran=False),
    Row(id="c", question={}, truth={"weights": 30}, ours={"weights": 60}),
]
ONE = Tool(
    name="one",
    version="1.0",
    date="2026-11-22",
    answers={"a": {"weights": 9.0, "fits": False}, "b": {"weights": 30.0, "fits": True}, "c": {"refused": "Error: no"}},
)


def test_a_tool_is_compared_on_the_rows_that_it_answers() -> None:
    (found,) = summaries(ROWS, [ONE])
    assert (found.answered, found.rows, found.near) == (2, 3, 1)
    assert (found.median, found.ninetieth) == pytest.approx((30, 50))
    assert (found.our_median, found.our_ninetieth, found.our_near) == pytest.approx((0.5, 1, 2))
    assert ninetieth(range(1, 11)) == 9


def test_verdicts_and_refusals_are_said() -> None:
    assert verdicts(ROWS, [ONE]) == [
        "hpc-serve: of 2 verdicts 0 say that it fits where vLLM refused, 0 that it does not where it ran",
        "one: of 2 verdicts 1 say that it fits where vLLM refused, 1 that it does not where it ran",
    ]
    text = other_tools.table(ROWS, [ONE])
    assert "    1 row: it refuses: Error: no" in text
    assert "20.00" in text


def test_every_row_was_asked_of_every_tool() -> None:
    asked = {row.id for row in memory_rows()} | {question["id"] for question in speed_questions()}
    found = tools()
    assert [tool.name for tool in found] == ["hf-mem", "kvfit", "aiconfigurator"]
    for tool in found:
        assert set(tool.answers) == asked
        for answer in tool.answers.values():
            numbers = [value for value in answer.values() if isinstance(value, float)]
            assert all(math.isfinite(value) and value >= 0 for value in numbers)
            assert numbers or answer.get("not_asked") or answer.get("refused")


def test_the_versions_are_those_of_the_environment() -> None:
    pinned = (ROOT / "envs/other-tools/requirements.txt").read_text(encoding="utf-8").splitlines()
    assert {f"{tool.name}=={tool.version}" for tool in tools()} <= set(pinned)


def test_the_file_is_as_the_program_writes_it() -> None:
    found = {tool.name: {"version": tool.version, "date": tool.date, "answers": tool.answers} for tool in tools()}
    assert document(found) == ANSWERS.read_text(encoding="utf-8")


def test_the_page_of_accuracy_has_the_lines_of_memory_that_are_printed() -> None:
    for line in summary_lines(summaries(memory_rows(), tools())):
        assert " ".join(line.split()) in PAGE


def test_headers_are_as_heavy_as_the_model() -> None:
    pytest.importorskip("transformers")
    config = dict(resolve("Qwen/Qwen3-0.6B").config)
    tensors = checkpoint_tensors(config)
    assert tensors
    size = sum(2 * math.prod(shape) for _, _, shape in tensors)
    assert size == model_from_config(config, name="x").weight_bytes
    assert checkpoint_tensors({**config, "quantization_config": {"quant_method": "unknown"}}) is None
