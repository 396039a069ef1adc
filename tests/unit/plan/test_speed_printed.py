"""What `plan` prints of a speed: its table, what a million tokens cost, and what replicas for prompts give."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hpc_serve.plan import accelerator
from hpc_serve.plan.catalog import accelerator_entries
from hpc_serve.plan.engine import Workload
from hpc_serve.plan.hardware import cluster_named, least_of
from hpc_serve.plan.make import FoundParts, PlanRequest, PlanResult, make_plan
from hpc_serve.plan.report.explain import explain_lines
from hpc_serve.plan.speed.step import EXPECTED
from tests.support.plans import spec
from tests.unit.conftest import Ran
from tests.unit.plan.conftest import Plan, Told

MILLION = "$ for a million output tokens"


def planned(gpu: str, **options: Any) -> PlanResult:
    cluster = cluster_named(gpu, total_bytes=(256 << 30) if gpu.startswith("cpu") else None)
    return make_plan(PlanRequest(model="8b", gpu=gpu, **options), FoundParts(model=spec("8b"), cluster=cluster))


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
    (line,) = (
        line
        for line in lines(planned("l4", workload=Workload(max_model_len=8192, concurrency=2000)))
        if "first token" in line
    )
    assert re.fullmatch(r"  time to the first token +[\d,]+\.\d\d s +[\d,]+\.\d\d s", line)


def test_the_command_says_how_fast(ran: Ran, told: Told, plan_json: Plan) -> None:
    shown = ran(["plan", "8b", "--usd-per-gpu-hour", "2", "--explain"]).out
    assert re.search(r"IN FLIGHT +TTFT +TPOT +TOKENS/S +IDEAL +PER GPU +PER \$ +BOUND BY", shown)
    explained = told("8b", "--explain")
    assert "ideal expected" in explained
    assert f"{100 * EXPECTED.bandwidth:.0f} % of the memory bandwidth (fitted" in explained
    document = plan_json("8b", "--concurrency", "8")
    by_concurrency = {row["concurrency"]: row for row in document["performance"]["by_concurrency"]}
    assert by_concurrency[8]["ideal"]["tpot_s"] < by_concurrency[8]["expected"]["tpot_s"]


def test_accelerators_are_compared_by_speed(ran: Ran) -> None:
    shown = ran(["plan", "8b", "--compare", "h100,a100,h100-64gb", "--max-model-len", "8192"]).out
    rates = {row.split()[0]: row.split()[-1] for row in shown.splitlines() if re.match(r"[ah]100-", row)}
    assert int(rates["h100-80gb"].replace(",", "")) > int(rates["a100-80gb"].replace(",", ""))
    assert rates["h100-64gb"] == "?"


def test_the_command_takes_slices_and_sockets(plan_json: Plan, told: Told) -> None:
    document = plan_json("70b", "--gpu", "v5e:4x4", "--max-model-len", "8192")
    assert document["num_nodes"] * document["gpus_per_node"] == 16
    shown = told(*["llama-2-7b", "--gpu", "cpu-spr-2s", "--gpu-memory", "256GiB", "--target", "tpot=60ms", "--explain"])
    assert "fitted on GPUs and TPUs, on no CPU" in shown
    assert "one TP=2 PP=1" in shown or "2 replicas of TP=1" in shown


def test_it_says_where_no_speed_is_known(told: Told, plan_json: Plan) -> None:
    assert "no source confirms" in told("8b", "--gpu", "h100-64gb")
    assert plan_json("8b", "--gpu", "h100-64gb")["performance"] is None
