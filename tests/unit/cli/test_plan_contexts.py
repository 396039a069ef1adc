"""`--max-model-len auto|128k`, and suggestions of several options at once."""

from __future__ import annotations

import pytest

from hpc_serve.cli.main import run
from tests.unit.cli.conftest import Plan
from tests.unit.conftest import Ran

FOUR = ("70b", "--gpu", "a100-40gb", "--nodes", "1", "--gpus-per-node", "4")
TWO = ("70b", "--gpu", "a100-40gb", "--nodes", "1", "--gpus-per-node", "2")


@pytest.mark.parametrize(("word", "length"), [("128k", 128_000), ("8K", 8192), ("8192", 8192)])
def test_contexts_are_written_as_for_vllm(plan: Plan, word: str, length: int) -> None:
    assert plan("8b", "--max-model-len", word)["max_model_len"] == length


@pytest.mark.parametrize("word", ["many", "128kb", "-2", "0", "1.5.k"])
def test_what_is_no_context(word: str) -> None:
    assert run(["plan", "8b", "--max-model-len", word]) == 2


def test_auto_is_the_longest_context_that_the_machines_hold(plan: Plan) -> None:
    found = plan(*FOUR, "--max-model-len", "auto")
    length = found["max_model_len"]
    assert 1024 < length < 131072
    assert found["vllm_args"][found["vllm_args"].index("--max-model-len") + 1] == str(length)
    assert found["reasons"][0].startswith(f"--max-model-len {length}: ")
    assert plan(*FOUR, "--max-model-len", str(length))["fits"]
    assert not plan(*FOUR, "--max-model-len", str(length + 1024), code=3)["fits"]


def test_auto_is_the_models_own_context_where_it_fits(plan: Plan) -> None:
    assert plan("8b", "--max-model-len", "auto")["max_model_len"] == 131072
    assert plan("8b")["contexts"] == []


def test_every_layout_with_its_contexts_is_in_one_table(plan: Plan, ran: Ran) -> None:
    found = plan(*FOUR, "--max-model-len", "auto")["contexts"]
    assert len(found) >= 2
    for layout in found:
        lengths = [entry["max_model_len"] for entry in layout["by_requests"]]
        assert lengths == sorted(lengths, reverse=True)
        sizes = ("-tp", str(layout["tensor_parallel_size"]), "-pp", str(layout["pipeline_parallel_size"]))
        for entry in layout["by_requests"][:2]:
            if entry["max_model_len"]:
                words = (*FOUR, *sizes, "--concurrency", str(entry["at_once"]))
                again = plan(*words, "--max-model-len", str(entry["max_model_len"]))
                assert again["remedies"] == []
    assert "Longest context by layout" in ran(["plan", *FOUR, "--max-model-len", "auto"]).out


def test_options_that_help_only_together_are_suggested_together(plan: Plan) -> None:
    (both,) = (text for text in plan(*TWO, code=3)["remedies"] if text.startswith("--quantization"))
    words = both.partition(" (")[0].split()
    assert words[::2] == ["--quantization", "--max-model-len"]
    assert plan(*TWO, *words)["max_model_len"] == int(words[3])
    assert plan(*TWO, *words[:2], code=3)["fits"] is False
    assert plan(*TWO, *words[2:], code=3)["fits"] is False


def test_render_keeps_the_word_and_serves_the_number(ran: Ran) -> None:
    script = ran(["render", *FOUR, "--max-model-len", "auto"]).out
    assert "--max-model-len auto" in script
    assert "--max-model-len -1" not in script


@pytest.mark.parametrize("columns", [60, 80, 100])
@pytest.mark.parametrize("words", [("405b", "--nodes", "2"), ("8b", "--usd-per-gpu-hour", "2"), FOUR])
def test_nothing_of_a_plan_is_cut_off(
    ran: Ran, columns: int, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = ran(["plan", *words, "--max-model-len", "auto"]).out.splitlines()
    assert not any("…" in line for line in lines)
    assert all(len(line) <= columns for line in lines if not line.startswith("vllm serve"))


def test_one_table_has_all_layouts(ran: Ran) -> None:
    """With auto a layout has its contexts where it otherwise has its reason; the chosen one and those beside it too."""
    text = ran(["plan", "405b", "--max-model-len", "auto"]).out
    lines = [line.split() for line in text.splitlines()]
    assert sum(line[:3] == ["TP", "PP", "NODES"] for line in lines) == 1
    assert ["8", "1", "1", "x", "8", "too", "small", "-", "-", "-", "-"] in lines
    (chosen,) = (line for line in lines if "chosen" in line)
    assert chosen[:7] == ["8", "2", "2", "x", "8", "chosen", "131,072"]
    (across,) = (line for line in lines if line[:5] == ["16", "1", "2", "x", "8"])
    assert across[5:7] == ["fits", "131,072"]


def test_contexts_of_as_many_nodes_as_are_chosen(plan: Plan) -> None:
    found = plan("405b", "--max-model-len", "auto")
    assert found["num_nodes"] == 2
    assert {layout["num_nodes"] for layout in found["contexts"]} == {2}
