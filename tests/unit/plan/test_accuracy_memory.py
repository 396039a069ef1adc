"""The planner against figures of real vLLM runs; `python -m benchmarks.accuracy.memory_cases` prints the table."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.accuracy.memory_cases import Score, load_cases, load_later_cases, median_error, promised, score, table

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
