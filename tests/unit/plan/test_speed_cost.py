"""--explain: what a million tokens cost, and what replicas for prompts and for decoding alone give."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hpc_serve.plan import EngineConfig, accelerator, model_from_config, resolve
from hpc_serve.plan.asked import PlanRequest
from hpc_serve.plan.catalog import accelerator_entries
from hpc_serve.plan.engine import Workload
from hpc_serve.plan.hardware.accelerator import least_of
from hpc_serve.plan.hardware.cluster import cluster_named
from hpc_serve.plan.make import FoundParts, PlanResult, make_plan
from hpc_serve.plan.report.explain_speed import explain_lines


def planned(model: str, gpu: str, **options: Any) -> PlanResult:
    parts = FoundParts(model=model_from_config(resolve(model).config, name=model), cluster=cluster_named(gpu))
    return make_plan(PlanRequest(model=model, gpu=gpu, engine=EngineConfig(), **options), parts)


def explained(result: PlanResult) -> dict[str, list[float]]:
    """The numbers of each line, (ideal, expected), by its words."""
    lines = explain_lines(result.estimates()[-1])
    found = (re.fullmatch(r"  (\S.*?) {2,}([\d.,]+)(?: ms)? +([\d.,]+)(?: ms)?", line.rstrip()) for line in lines)
    return {one[1]: [float(one[place].replace(",", "")) for place in (2, 3)] for one in found if one}


def test_the_price_a_person_gives_comes_before_the_listed_one() -> None:
    text = "\n".join(explain_lines(planned("8b", "v5e").estimates()[-1]))
    assert "at $1.20 for an hour of a chip (Google Cloud, by How To Scale Your Model, part 8, 2025-02-04" in text
    own = planned("8b", "v5e", usd_per_gpu_hour=2.4)
    assert "at $2.40 for an hour of a chip (as --usd-per-gpu-hour says)" in "\n".join(
        explain_lines(own.estimates()[-1])
    )
    listed, twice = explained(planned("8b", "v5e")), explained(own)
    key = "$ for a million output tokens"
    assert twice[key] == pytest.approx([2 * value for value in listed[key]], rel=0.01)
    assert key not in explained(planned("8b", "h100-80gb"))


def test_dollars_and_tokens_a_dollar_are_one_number() -> None:
    result = planned("8b", "h100-80gb", usd_per_gpu_hour=2.5)
    per_usd = result.estimates()[-1].output_tokens_per_usd
    assert per_usd is not None
    assert explained(result)["$ for a million output tokens"][1] == pytest.approx(1e6 / per_usd, abs=0.001)


def test_replicas_for_prompts_are_as_many_as_their_time_takes() -> None:
    result = planned("8b", "h100-80gb", input_tokens=4096, output_tokens=256)
    found, estimate = explained(result), result.estimates()[-1]
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
    parts = FoundParts(
        model=model_from_config(resolve("8b").config, name="8b"),
        cluster=cluster_named(gpu, total_bytes=(256 << 30) if gpu.startswith("cpu") else None),
    )
    result = make_plan(PlanRequest(model="8b", gpu=gpu, engine=EngineConfig()), parts)
    lines = list(explain_lines(result.estimates()[-1]))
    assert any(f" GB a {unit} " in line for line in lines)


def test_long_waits_are_in_seconds_and_keep_their_columns() -> None:
    result = planned("8b", "l4", workload=Workload(max_model_len=8192, concurrency=2000))
    (line,) = (line for line in explain_lines(result.estimates()[-1]) if "first token" in line)
    assert re.fullmatch(r"  time to the first token +[\d,]+\.\d\d s +[\d,]+\.\d\d s", line)
