"""Drafted tokens and adapters in the speed: by hand, by published pairs of runs, and in what `plan` says."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from benchmarks.accuracy.speculation_gains import gains
from hpc_serve.plan import EngineConfig, accelerator
from hpc_serve.plan.speed.measured import KnownDraft, known_draft, known_drafts
from hpc_serve.plan.speed.step import IDEAL
from tests.support.plans import roofline
from tests.unit.plan.conftest import Plan, Told

NGRAM = '{"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 4}'
MTP = '{"method": "deepseek_mtp", "num_speculative_tokens": 1}'


@pytest.fixture
def told_of(told: Told) -> Told:
    """What `plan` says of a model whose drafts are of n-grams; `words` are further options."""
    return lambda *words: told(*words, "--", "--speculative-config", NGRAM)


def test_all_tokens_of_a_sequence_are_verified_in_one_pass() -> None:
    plain = roofline("8b").decode(8, 1000, IDEAL)
    drafted = roofline("8b", speculative_config=json.loads(NGRAM)).decode(8, 1000, IDEAL)
    assert drafted.weights_s == plain.weights_s
    assert drafted.cache_s == plain.cache_s
    assert drafted.flops_s == pytest.approx(5 * plain.flops_s)


def test_a_prediction_layer_runs_once_for_each_further_draft() -> None:
    def weights_s(method: str, drafts: int) -> float:
        asked = {"method": method, "prompt_lookup_max": 4, "num_speculative_tokens": drafts}
        return roofline("deepseek-ai/DeepSeek-V3", speculative_config=asked).decode(1, 100, IDEAL).weights_s

    # Both verify as many tokens, which read as many experts. Only one of them has a layer and a head to run.
    layers = [weights_s("mtp", drafts) - weights_s("ngram", drafts) for drafts in (1, 2, 3, 4)]
    passes = [after - before for before, after in itertools.pairwise(layers[1:])]
    assert passes[0] == pytest.approx(passes[1], rel=0.01)
    head_bytes, attention_and_shared = 129_280 * 7168 * 2, 232e6
    bandwidth = accelerator("h100-80gb").bandwidth_bytes_per_s
    assert bandwidth is not None
    assert passes[0] > (head_bytes + attention_and_shared) / bandwidth
    assert passes[0] < 3 * (head_bytes + attention_and_shared) / bandwidth


def test_an_adapter_is_two_kernels_for_each_matrix_and_a_slot_of_weights() -> None:
    plain = roofline("8b").work.stages[0]
    one, many = (roofline("8b", enable_lora=True, max_lora_rank=16, max_loras=n).work.stages[0] for n in (1, 4))
    assert one.kernels - plain.kernels >= 32 * 2 * 4
    assert one.dense_bytes == pytest.approx(many.dense_bytes, rel=1e-6)
    rank = (
        16 * (2 * 4096 + 6144 + 4096 + 2 * 28672 + 4096 + 14336 + 4096) * 32
    )  # by hand, about: A and B of four matrices
    assert 0.5 * 2 * rank < one.dense_bytes - plain.dense_bytes < 2 * 2 * rank


def test_published_gains_are_near_the_printed_ones() -> None:
    found = list(gains())
    assert len(found) == 19
    for one in found:
        assert 0.75 < one.measured / one.printed < 1.15, one


def test_the_acceptance_length_of_other_numbers_of_drafts_is_that_of_one_probability() -> None:
    known = KnownDraft(model="m", draft="d", method="eagle3", drafts=1, tokens=1.6, texts="t", source="s")
    assert known.acceptance_length(1) == 1.6
    assert known.acceptance_length(3) == pytest.approx(1 + 0.6 + 0.36 + 0.216)
    head = known_drafts("openai/gpt-oss-20b")[0]
    engine = EngineConfig(
        speculative_config={"method": "eagle3", "model": head.draft, "num_speculative_tokens": head.drafts}
    )
    assert known_draft("openai/GPT-OSS-20b", engine) == head
    assert known_draft("openai/gpt-oss-20b", replace(engine, speculative_config=None)) is None


def test_plan_says_what_drafts_gain(told: Told, told_of: Told) -> None:
    text = told("deepseek-ai/DeepSeek-V3", "--", "--speculative-config", MTP)
    assert "Speculation, 1.85 tokens a step (published for several topics: arXiv:2412.19437" in text
    assert "in flight. It pays up to" in text
    text = told_of("8b")
    assert "the speed counts no draft as accepted" in text
    assert "1.2 tokens with 1 in flight" in text
    text = told_of("8b", "--acceptance-length", "2.2")
    assert "Speculation, 2.2 tokens a step: × 1.88 with 1 in flight" in text
    assert "It pays up to about 128 in flight" in text
    text = told_of("8b", "--acceptance-length", "1.01")
    assert "It does not pay" in text or "It pays up to about 1 in flight" in text


def test_where_drafts_pay_does_not_contradict_what_they_gain(told_of: Told) -> None:
    # One request reads few experts, and its drafts read others. Many requests read them all.
    text = told_of("mixtral-8x7b", "--acceptance-length", "1.5")
    assert "1.5 tokens a step: × 0.65" in text
    assert "It pays with about " in text
    assert "It pays up to" not in text


@pytest.mark.parametrize("words", [("--speculative-config", NGRAM), ("--kv-offloading-size", "100")])
def test_an_option_for_answers_gains_an_embedder_nothing(told: Told, words: tuple[str, str]) -> None:
    text = told("Qwen/Qwen3-Embedding-0.6B", "--", *words)
    assert "Speculation" not in text
    assert "first token" not in text


def test_a_cache_in_the_nodes_memory_says_what_it_gains_at_most(told: Told) -> None:
    text = told("70b", "--", "--kv-offloading-size", "100")
    assert "1,000 tokens of a prefix come from the node's memory in 2.6 ms" in text
    assert "up to 38 times as early" in text
    assert "kv-offloading" not in told("70b")
    cpu = ("--gpu", "cpu-spr-2s", "--gpu-memory", "256GiB")
    assert "PCIe" not in told("8b", *cpu, "--", "--kv-offloading-size", "100")


def test_the_explanation_says_the_gains_too_and_counts_accepted_drafts_in_decoding_alone(told_of: Told) -> None:
    none = told_of("8b", "--explain")
    drafts = told_of("8b", "--explain", "--acceptance-length", "2.4", "--kv-offloading-size", "100")
    assert "Speculation, 2.4 tokens a step: × 2.05" in drafts
    assert "1,000 tokens of a prefix come from the node's memory" in drafts
    assert "= one step, a token for each" in none
    assert "= one step, 2.4 tokens for each" in drafts
    plain, faster = (
        float(text.partition("tokens/s, decoding alone ")[2].split()[1].replace(",", "")) for text in (none, drafts)
    )
    assert faster == pytest.approx(2.4 * plain, rel=1e-3)


def test_an_answer_of_one_token_is_no_sooner_there(told_of: Told) -> None:
    text = told_of("8b", "--acceptance-length", "5", "--output-tokens", "1", "--decode-only")
    assert float(text.partition("5 tokens a step: × ")[2].split()[0]) <= 1


def test_the_ideal_gain_is_of_ideal_speeds(told_of: Told) -> None:
    asked = ("8b", "--acceptance-length", "2.4", "--decode-only")
    ideal, expected = (told_of(*asked, *more).partition("Speculation")[2] for more in (("--ideal",), ()))
    assert ideal != expected


@pytest.mark.parametrize(
    "arrivals", ["", "--decode-only", "--arrivals burst", "--arrivals burst --longest-output-tokens 1024"]
)
def test_drafts_count_in_both_kinds_of_arrivals(plan_json: Plan, arrivals: str) -> None:
    def rate(*words: str) -> float:
        found = plan_json("8b", *arrivals.split(), *words, "--", "--speculative-config", NGRAM)
        return float(found["performance"]["by_concurrency"][0]["expected"]["output_tokens_per_s"])

    assert 1.8 < rate("--acceptance-length", "2") / rate() <= 2.01


def test_wrong_numbers_of_accepted_tokens_are_errors(refused: Told) -> None:
    one = "without --speculative-config a step gives one token"
    assert one in refused("8b", "--acceptance-length", "2")
    asked = ("8b", "--acceptance-length", "6", "--", "--speculative-config", NGRAM)
    assert "a step gives 1 to 5 tokens" in refused(*asked)
