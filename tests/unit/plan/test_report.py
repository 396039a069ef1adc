"""What `plan` prints of a speed: its table, what a million tokens cost, and what drafted tokens and adapters gain."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.accuracy.speculation_gains import gains
from hpc_serve.plan import EngineConfig, accelerator
from hpc_serve.plan.catalog import accelerator_entries
from hpc_serve.plan.engine import Workload
from hpc_serve.plan.hardware import least_of
from hpc_serve.plan.make import PlanResult
from hpc_serve.plan.report.explain import explain_lines
from hpc_serve.plan.speed.measured import KnownDraft, known_draft, known_drafts
from hpc_serve.plan.speed.step import EXPECTED, IDEAL
from hpc_serve.units import GIB
from tests.support.plans import made_plan, roofline

MILLION = "$ for a million output tokens"


def planned(gpu: str, **options: Any) -> PlanResult:
    return made_plan("8b", gpu, total_bytes=256 * GIB if gpu.startswith("cpu") else None, **options)


def lines(result: PlanResult) -> list[str]:
    return list(explain_lines(result.estimates()[-1]))


def figures(result: PlanResult) -> dict[str, list[float]]:
    """The numbers of each line, (ideal, expected), by its words."""
    found = (re.fullmatch(r"  (\S.*?) {2,}([\d.,]+)(?: ms)? +([\d.,]+)(?: ms)?", one.rstrip()) for one in lines(result))
    return {one[1]: [float(one[place].replace(",", "")) for place in (2, 3)] for one in found if one}


def test_the_price_a_person_gives_comes_before_the_listed_one() -> None:
    listed, own = planned("v5e"), planned("v5e", usd_per_gpu_hour=2.4)
    by_book = "at $1.20 for an hour of a chip (Google Cloud, by How To Scale Your Model, part 8, 2025-02-04"
    assert by_book in "\n".join(lines(listed))
    assert "    at $2.40 for an hour of a chip (as --usd-per-gpu-hour says)" in lines(own)
    assert figures(own)[MILLION] == pytest.approx([2 * value for value in figures(listed)[MILLION]], rel=0.01)
    assert MILLION not in figures(planned("h100-80gb"))


def test_dollars_and_tokens_a_dollar_are_one_number() -> None:
    result = planned("h100-80gb", usd_per_gpu_hour=2.5)
    per_usd = result.estimates()[-1].output_tokens_per_usd
    assert per_usd is not None
    assert figures(result)[MILLION][1] == pytest.approx(1e6 / per_usd, abs=0.001)


def test_replicas_for_prompts_are_as_many_as_their_time_takes() -> None:
    result = planned("h100-80gb", input_tokens=4096, output_tokens=256)
    found, estimate = figures(result), result.estimates()[-1]
    decoding, prompt = found["output tokens/s, decoding alone"], found["a prompt alone"]
    assert decoding[1] == pytest.approx(estimate.batch / estimate.expected.step.total_s, rel=0.001)
    shares = [rate / 256 * seconds / 1000 for rate, seconds in zip(decoding, prompt)]
    assert found["replicas for prompts, each decoding"] == pytest.approx(shares, abs=0.01)
    # both together cannot be faster than decoding alone
    assert estimate.expected.output_tokens_per_s < decoding[1]


def test_every_listed_price_has_its_date_and_source() -> None:
    names = {entry["name"] for entry in accelerator_entries().values() if entry["kind"] != "cpu"}
    prices = [price for name in names if (price := accelerator(name).list_price)]
    assert len(prices) >= 2
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", one.date) and one.source and one.usd_per_hour > 0 for one in prices)


def test_gpus_of_several_kinds_have_no_listed_price() -> None:
    assert least_of([accelerator("a100-80gb"), accelerator("h100-80gb")]).list_price is None


@pytest.mark.parametrize(("gpu", "unit"), [("v5e", "chip"), ("cpu-spr-2s", "socket"), ("h100-80gb", "GPU")])
def test_the_arithmetic_speaks_of_what_there_is(gpu: str, unit: str) -> None:
    assert any(f" GB a {unit} " in line for line in lines(planned(gpu)))


def test_long_waits_are_in_seconds_and_keep_their_columns() -> None:
    result = planned("l4", workload=Workload(max_model_len=8192, concurrency=2000))
    (line,) = (one for one in lines(result) if "first token" in one)
    assert re.fullmatch(r"  time to the first token +[\d,]+\.\d\d s +[\d,]+\.\d\d s", line)


def test_the_command_says_how_fast(ran) -> None:
    shown = ran(["plan", "8b", "--usd-per-gpu-hour", "2", "--explain"]).out
    assert re.search(r"IN FLIGHT +TTFT +TPOT +TOKENS/S +IDEAL +PER GPU +PER \$ +BOUND BY", shown)
    assert f"{100 * EXPECTED.bandwidth:.0f} % of the memory bandwidth (fitted" in " ".join(shown.split())


def test_accelerators_are_compared_by_speed(ran) -> None:
    shown = ran(["plan", "8b", "--compare", "h100,a100,h100-64gb", "--max-model-len", "8192"]).out
    rates = {row.split()[0]: row.split()[-1] for row in shown.splitlines() if re.match(r"[ah]100-", row)}
    assert int(rates["h100-80gb"].replace(",", "")) > int(rates["a100-80gb"].replace(",", ""))
    assert rates["h100-64gb"] == "?"


def test_the_command_takes_sockets(told) -> None:
    shown = told(*["llama-2-7b", "--gpu", "cpu-spr-2s", "--gpu-memory", "256GiB", "--target", "tpot=60ms", "--explain"])
    assert "fitted on GPUs and TPUs, on no CPU" in shown
    assert "one TP=2 PP=1" in shown or "2 replicas of TP=1" in shown


def test_it_says_where_no_speed_is_known(told, plan_json) -> None:
    assert "no source confirms" in told("8b", "--gpu", "h100-64gb")
    assert plan_json("8b", "--gpu", "h100-64gb")["performance"] is None


# -- drafted tokens and adapters

NGRAM = '{"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 4}'
MTP = '{"method": "deepseek_mtp", "num_speculative_tokens": 1}'


@pytest.fixture
def told_of(told):
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
    # by hand, about: A and B of four matrices
    rank = 16 * (2 * 4096 + 6144 + 4096 + 2 * 28672 + 4096 + 14336 + 4096) * 32
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


def test_plan_says_what_drafts_gain(told, told_of) -> None:
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


def test_where_drafts_pay_does_not_contradict_what_they_gain(told_of):
    # One request reads few experts, and its drafts read others. Many requests read them all.
    text = told_of("mixtral-8x7b", "--acceptance-length", "1.5")
    assert "1.5 tokens a step: × 0.65" in text
    assert "It pays with about " in text
    assert "It pays up to" not in text


@pytest.mark.parametrize("words", [("--speculative-config", NGRAM), ("--kv-offloading-size", "100")])
def test_an_option_for_answers_gains_an_embedder_nothing(told, words: tuple[str, str]) -> None:
    text = told("Qwen/Qwen3-Embedding-0.6B", "--", *words)
    assert "Speculation" not in text
    assert "first token" not in text


def test_a_cache_in_the_nodes_memory_says_what_it_gains_at_most(told) -> None:
    text = told("70b", "--", "--kv-offloading-size", "100")
    assert "1,000 tokens of a prefix come from the node's memory in 2.6 ms" in text
    assert "up to 38 times as early" in text
    assert "kv-offloading" not in told("70b")
    cpu = ("--gpu", "cpu-spr-2s", "--gpu-memory", "256GiB")
    assert "PCIe" not in told("8b", *cpu, "--", "--kv-offloading-size", "100")


def test_the_explanation_says_the_gains_too_and_counts_accepted_drafts_in_decoding_alone(told_of) -> None:
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


def test_an_answer_of_one_token_is_no_sooner_there(told_of) -> None:
    text = told_of("8b", "--acceptance-length", "5", "--output-tokens", "1", "--decode-only")
    assert float(text.partition("5 tokens a step: × ")[2].split()[0]) <= 1


def test_the_ideal_gain_is_of_ideal_speeds(told_of) -> None:
    asked = ("8b", "--acceptance-length", "2.4", "--decode-only")
    ideal, expected = (told_of(*asked, *more).partition("Speculation")[2] for more in (("--ideal",), ()))
    assert ideal != expected


@pytest.mark.parametrize(
    "arrivals", ["", "--decode-only", "--arrivals burst", "--arrivals burst --longest-output-tokens 1024"]
)
def test_drafts_count_in_both_kinds_of_arrivals(plan_json, arrivals: str) -> None:
    def rate(*words: str) -> float:
        found = plan_json("8b", *arrivals.split(), *words, "--", "--speculative-config", NGRAM)
        return float(found["performance"]["by_concurrency"][0]["expected"]["output_tokens_per_s"])

    assert 1.8 < rate("--acceptance-length", "2") / rate() <= 2.01


def test_wrong_numbers_of_accepted_tokens_are_errors(refused) -> None:
    one = "without --speculative-config a step gives one token"
    assert one in refused("8b", "--acceptance-length", "2")
    asked = ("8b", "--acceptance-length", "6", "--", "--speculative-config", NGRAM)
    assert "a step gives 1 to 5 tokens" in refused(*asked)
