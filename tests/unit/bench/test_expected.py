"""What is predicted of a run, which runs are kept for later plans, and as what."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hpc_serve.bench.expected import NoPlanError, measured_run, predict
from hpc_serve.bench.run import Pace, Run
from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.engine import EngineConfig
from hpc_serve.plan.make import PlanRequest
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.plans.planning import FILE, plan_for
from hpc_serve.units import GIB
from tests.support.stubs import make_record, make_submitted
from tests.unit.bench.conftest import make_outcome, make_run

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
ANSWERS = [make_outcome(place=place, latency_s=0.2) for place in range(20)]


def run_of(**fields) -> Run:
    """Ten requests a second of 0.2 s each: two under way. The engines worked for nobody else."""
    usual = {"model": MODEL, "pace": Pace(max_concurrency=2), "others_tokens": 0.0, "vllm": "0.32.0"}
    return make_run(*ANSWERS, **{**usual, **fields})


@pytest.fixture
def store(tmp_path):
    store = ServiceStore(tmp_path / "home")
    store.ensure_service("405b")
    submit(store)
    return store


def submit(store, *, job_id="1", gpus=2, gpu="h100-80gb", args=(), gpu_memory_bytes=None, **fields):
    sizes = {"tensor_parallel_size": gpus, "num_nodes": 1, "gpus_per_node": gpus}
    store.write(make_record(job_id=job_id, model=MODEL, **sizes, **fields))
    submitted = make_submitted(job_id=job_id, model=MODEL, gpu=gpu, engine_args=args, gpu_memory_bytes=gpu_memory_bytes)
    store.write_submitted(submitted)


def test_a_run_is_kept_as_what_it_is_of(store):
    one = measured_run(store, run_of(), gpu=None)
    assert one.tokens_per_s == pytest.approx(20 * 3 / 2.0)
    assert one.case.accelerator == "h100-80gb"
    numbers = {"tensor_parallel_size": 2, "input_tokens": 10, "output_tokens": 3, "running": 2}
    assert numbers.items() <= one.case.numbers.items()
    assert {"model": MODEL, "arrivals": "steady", "vllm": "0.32"}.items() <= one.case.words.items()
    assert one.printed_tokens_per_s == pytest.approx(predict(store, run_of(), gpu=None)["output_throughput"])


def with_lengths(input_len: int | None, output_len: int, **fields) -> Run:
    """64 requests of such lengths to two replicas, 32 at once."""
    request = replace(run_of().requests[0], input_len=input_len, output_len=output_len)
    pace = Pace(**{"max_concurrency": 32, **fields})
    return run_of(requests=(request,) * 64, replicas=("1-r0-0", "2-r0-0"), pace=pace)


@pytest.mark.parametrize("gpu", [None, "h100-80gb"])
def test_a_prediction_is_the_plan_for_the_run_times_the_replicas(store, gpu):
    submit(store, job_id="2")
    found = predict(store, with_lengths(1800, 128), gpu=gpu)
    engine = EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=1)
    asked = PlanRequest(model=MODEL, gpu="h100-80gb", num_nodes=1, gpus_per_node=2, engine=engine)
    result = plan_for(replace(asked, input_tokens=1800, output_tokens=128))
    (one,) = [estimate for estimate in result.estimates() if estimate.traffic.concurrency == 16]
    assert found["output_throughput"] == pytest.approx(2 * one.expected.output_tokens_per_s, rel=0.01)
    assert found["mean_tpot_ms"] == pytest.approx(1e3 * one.expected.tpot_s, rel=0.01)


@pytest.mark.parametrize(
    ("run", "gpu", "why"),
    [
        (with_lengths(10, 10, max_concurrency=None), None, "this run has a rate"),
        (with_lengths(10, 10, request_rate=2.0), None, "this run has a rate"),
        (with_lengths(10, 10), "nonsense", "nonsense"),
        (replace(with_lengths(10, 10), replicas=("9-r0-0",)), None, "no record of its replicas"),
        (with_lengths(None, 10), None, "not known before the run"),
    ],
)
def test_where_there_is_no_prediction_the_reason_is_told(store, run, gpu, why):
    found = predict(store, run, gpu=gpu)
    assert why in found["reason"]
    assert len(found) == 1


def test_the_printed_speed_is_that_of_the_services_own_options(store):
    plain = predict(store, run_of(), gpu=None)["output_throughput"]
    submit(store, args=("--quantization", "fp8"))
    assert predict(store, run_of(), gpu=None)["output_throughput"] > 1.1 * plain
    assert "fp8" in measured_run(store, run_of(), gpu=None).case.words["kind"]


@pytest.mark.parametrize(("at_once", "arrivals", "running"), [(64, "burst", 20), (16, "steady", 2)])
def test_all_at_once_are_a_burst_and_else_those_count_that_were_under_way_on_average(store, at_once, arrivals, running):
    one = measured_run(store, run_of(pace=Pace(max_concurrency=at_once)), gpu=None)
    assert (one.case.words["arrivals"], one.case.numbers["running"]) == (arrivals, running)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"others_tokens": 9.0}, "remarks"),
        ({"others_tokens": None}, "do not say what they generate"),
        ({"waited": 0.6}, "remarks"),
        ({"late_s": 0.1}, "remarks"),
        ({"busy": 0.9}, "remarks"),
        ({"outcomes": tuple(ANSWERS[:-1])}, "remarks"),
        ({"outcomes": (*ANSWERS[:-1], make_outcome(place=19, error="HTTP 500: no"))}, "remarks"),
        ({"outcomes": (*ANSWERS[:-1], make_outcome(place=19, output_len=2))}, "remarks"),
        ({"workload": "prefix_repetition 10/3"}, "share prefixes"),
        ({"workload": "mine.jsonl"}, "share prefixes"),
        ({"pace": Pace(max_concurrency=2, request_rate=3.0)}, "has a rate"),
        ({"replicas": ("9-r0-0",)}, "no record"),
    ],
)
def test_a_run_that_says_something_else_is_not_kept(store, fields, why):
    with pytest.raises(NoPlanError, match=why):
        measured_run(store, run_of(**fields), gpu=None)


def test_others_weights_and_another_accelerator_are_not_kept(store):
    with pytest.raises(InvalidRequestError, match="'h1000' is not an accelerator"):
        measured_run(store, run_of(), gpu="h1000")
    submit(store, stand_in="/models/tiny")
    with pytest.raises(NoPlanError, match="stand in"):
        measured_run(store, run_of(), gpu=None)
    submit(store, gpu="cpu")
    assert "its accelerator is not known" in predict(store, run_of(), gpu=None)["reason"]
    with pytest.raises(NoPlanError, match="its accelerator is not known"):
        measured_run(store, run_of(), gpu=None)
    assert measured_run(store, run_of(), gpu="h200").case.accelerator == "h200-141gb"


def test_replicas_of_one_layout_are_kept_and_those_of_several_are_not(store):
    run = run_of(replicas=("1-r0-0", "2-r0-0"))
    submit(store, job_id="2")
    one = measured_run(store, run, gpu=None)
    assert one.printed_tokens_per_s == pytest.approx(predict(store, run, gpu=None)["output_throughput"])
    submit(store, job_id="2", gpus=1)
    with pytest.raises(NoPlanError, match="its replicas have several layouts"):
        measured_run(store, run, gpu=None)


@pytest.mark.parametrize(
    ("submitted", "named", "kept"),
    [
        ("h100", "h100-80gb", "h100-80gb"),
        ("h100-80gb", "H100", "h100-80gb"),
        ("a100,h100", "h100", None),
        ("cpu-spr-2s", "cpu-spr", "cpu-spr"),
        ("h100", "h200", None),
    ],
)
def test_a_name_and_its_alias_are_one_accelerator(store, submitted, named, kept):
    submit(store, gpu=submitted, gpu_memory_bytes=64 * GIB)
    if kept is None:
        with pytest.raises(NoPlanError, match=f"submitted for {submitted}, not for {named}"):
            measured_run(store, run_of(), gpu=named)
    else:
        assert measured_run(store, run_of(), gpu=named).case.accelerator == kept


def test_bench_says_whether_a_run_is_kept(service, ran, monkeypatch):
    # On a busy machine the program itself may be late, and a run with a remark is not kept.
    monkeypatch.setattr("hpc_serve.bench.expected.notes_on", lambda run, wrong: [])
    service.start(model=MODEL, tensor_parallel_size=2, gpus_per_node=2)
    service.store.write_submitted(make_submitted(job_id="100", model=MODEL, gpu="h100-80gb"))
    words = ["bench", "405b", "--lengths", "40/6", "--num-prompts", "12", "--max-concurrency", "4"]
    told = ran(words).err
    (kept,) = json.loads((service.store.home / FILE).read_text())["runs"]
    ratio = kept["tokens_per_s"] / kept["printed_tokens_per_s"]
    assert f"Run 1 is kept for later plans: × {ratio:.2g} of" in told
    told = ran([*words, "--gpu", "h200"]).err
    assert "Run 1 is not kept for later plans: it was submitted for h100-80gb, not for h200." in told
