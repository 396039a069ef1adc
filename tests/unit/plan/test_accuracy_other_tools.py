"""What other tools said of the rows of our studies; `python -m benchmarks.accuracy.other_tools` prints the table."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.accuracy.other_tools.__main__ import ANSWERS, document, tools
from benchmarks.accuracy.other_tools.headers import checkpoint_tensors
from benchmarks.accuracy.other_tools.questions import Row, memory_rows, speed_questions
from benchmarks.accuracy.other_tools.table import Tool, ninetieth, summaries, summary_lines, table, verdicts
from hpc_serve.plan import model_from_config, resolve

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
    text = table(ROWS, [ONE])
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
    page = (ROOT / "docs" / "evidence" / "accuracy.md").read_text(encoding="utf-8")
    for line in summary_lines(summaries(memory_rows(), tools())):
        assert f"    {line}" in page


def test_headers_are_as_heavy_as_the_model() -> None:
    pytest.importorskip("transformers")
    config = dict(resolve("Qwen/Qwen3-0.6B").config)
    tensors = checkpoint_tensors(config)
    assert tensors
    size = sum(2 * math.prod(shape) for _, _, shape in tensors)
    assert size == model_from_config(config, name="x").weight_bytes
    assert checkpoint_tensors({**config, "quantization_config": {"quant_method": "unknown"}}) is None
