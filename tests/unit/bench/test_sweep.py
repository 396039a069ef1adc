"""Runs against stub engines: lengths, times, replicas, failures, an end before the end; checks of their answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import math

import pytest

from hpc_serve.bench import sweep
from hpc_serve.bench.results import result_of
from hpc_serve.bench.run import Lengths
from hpc_serve.bench.service import BenchError, BenchService
from hpc_serve.bench.sweep import arrival_times, load_check, wrong_answers
from hpc_serve.client.replicas.sdk import http
from hpc_serve.errors import InvalidRequestError, ServiceNotFoundError
from tests.support.patience import PATIENCE_S
from tests.support.stubs import make_record
from tests.unit.bench.conftest import make_outcome, make_run


def lengths_got(run) -> set[tuple[int, int]]:
    return {(outcome.input_len, outcome.output_len) for outcome in run.outcomes}


def shares(run) -> dict[str, int]:
    return {name: part["completed"] for name, part in result_of(run)["replicas"].items()}


@pytest.mark.parametrize("dataset", ["random", "chat", "prefix_repetition"])
def test_lengths_asked_for_are_lengths_got(engine, measure, dataset):
    (run,) = measure(dataset=dataset, lengths=Lengths(input_len=120, output_len=9), prefix_len=50, num_prefixes=4)
    assert lengths_got(run) == {(120, 9)}
    assert [outcome.place for outcome in run.outcomes] == list(range(20))
    assert not run.interrupted
    assert not any("as long as" in note for note in result_of(run)["notes"])


def test_runs_of_a_sweep_have_prompts_of_their_own(engine, measure):
    runs = measure(at_once=(1, 3))
    assert [run.pace.max_concurrency for run in runs] == [1, 3]
    assert not {str(one.body) for one in runs[0].requests} & {str(one.body) for one in runs[1].requests}
    assert [run.requests for run in measure(at_once=(1, 3))] == [run.requests for run in runs]


def test_so_many_at_once_and_no_more(service, measure, monkeypatch):
    """Counted here: an engine writes down the end of a request after its answer, when the next one may have come."""
    asking, under_way, seen = sweep.ask, set(), []

    async def counted(service, place, *rest):
        under_way.add(place)
        seen.append(len(under_way))
        outcome = await asking(service, place, *rest)
        under_way.remove(place)
        return outcome

    monkeypatch.setattr(sweep, "ask", counted)
    service.start()
    measure(at_once=(3,), count=12)
    assert (len(seen), max(seen)) == (1 + 12, 3)  # the first one does not count


def test_a_rate_has_its_time(engine, measure):
    (run,) = measure(at_once=(None,), rate=100.0)
    assert run.duration_s >= 20 / 100.0
    assert result_of(run)["completed"] == 20
    assert run.others_tokens == 0.0
    assert run.waited is None  # its record does not say that the engine is here


def test_equal_shares_of_uneven_replicas(service, measure):
    service.start()
    service.start("--stub-first-s", "0.05")
    (run,) = measure(split="equally")
    assert shares(run) == {"100-r0-0": 10, "101-r0-0": 10}
    (run,) = measure()
    assert sum(shares(run).values()) == 20, "the client routes"
    assert set(shares(run)) == {"100-r0-0", "101-r0-0"} == set(run.replicas)


def test_failures_are_counted_and_named(service, measure):
    """An engine that dies in the middle of its fifth answer; the first does not count."""
    service.start("--stub-die-at-request", "5")
    (run,) = measure(at_once=(1,), count=10)
    result = result_of(run)
    assert (result["completed"], result["failed"]) == (3, 7)
    assert any(" failed: " in note for note in result["notes"])


def test_requests_that_cannot_be_answered_are_told_at_once(service, measure):
    service.start("--stub-error", "400")
    with pytest.raises(BenchError, match="does not answer the first request: HTTP 400: a stubbed error"):
        measure()


def test_a_service_that_completes_nothing_is_told_what_measures_it(service, measure, monkeypatch):
    async def without_completions(self, path, body, method="POST"):
        return http.Response(404)

    with pytest.raises(ServiceNotFoundError):
        measure()
    service.start()
    monkeypatch.setattr(BenchService, "send", without_completions)
    with pytest.raises(BenchError, match=r"generates no text from prompts.*vllm bench serve.*openai-audio"):
        measure()


def test_a_stop_keeps_what_was_measured_and_ends_the_sweep(engine, measure):
    stop = asyncio.Event()

    def progress(_title, _count, ended) -> None:
        if ended == 5:
            stop.set()

    (run,) = measure(at_once=(1, 2), count=200, progress=progress, stop=stop)
    assert run.interrupted
    assert 5 <= len(run.outcomes) < 200
    assert result_of(run)["failed"] == 0
    (note,) = result_of(run)["notes"]  # the tokens of its own requests that it ended are not of others
    assert "The run was interrupted" in note


def test_a_stop_while_requests_are_made_leaves_no_run(engine, measure):
    stop = asyncio.Event()
    assert measure(progress=lambda *_: stop.set(), stop=stop) == []


def test_a_stop_while_a_service_is_waited_for_leaves_no_run(service, measure):
    service.store.write(make_record(state="starting"))
    stop = asyncio.Event()
    stop.set()
    assert measure(stop=stop, wait=PATIENCE_S) == []


def test_a_file_of_ones_own(service, measure, tmp_path):
    service.start("--stub-words", "3")
    path = tmp_path / "mine.jsonl"
    lines = [{"prompt": "why?", "output_tokens": 8}, {"messages": [{"role": "user", "content": "how?"}]}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8-sig")  # with a mark, as Windows writes it
    (run,) = measure(dataset="custom", path=path, lengths=None, count=None, ignore_eos=False)
    assert run.workload == "mine.jsonl"
    assert lengths_got(run) == {(4, 3), (len("<user>how?\n<assistant>"), 3)}
    (longer,) = measure(dataset="custom", path=path, lengths=None, count=5, output_len=6, ignore_eos=True)
    assert {outcome.output_len for outcome in longer.outcomes} == {6}


def test_conversations_are_taken_as_vllm_takes_them(engine, measure, tmp_path):
    path = tmp_path / "sharegpt.json"
    texts = [("a question", "an answer"), ("why", "an answer"), ("x" * 1025, "an answer"), ("a question", "no")]
    conversations = [[{"value": prompt}, {"value": answer}] for prompt, answer in texts]
    path.write_text(json.dumps([{"conversations": turns} for turns in conversations]))
    (run,) = measure(dataset="sharegpt", path=path, lengths=None, count=None)
    assert lengths_got(run) == {(len("a question"), len("an answer"))}
    assert len(run.outcomes) == 1


def test_workloads_that_cannot_be_are_refused(engine, measure, tmp_path):
    with pytest.raises(InvalidRequestError, match="30 tokens is no part of prompts of 30"):
        measure(dataset="prefix_repetition", prefix_len=30)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        measure(dataset="custom", path=tmp_path / "none.jsonl", lengths=None)


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0, math.inf])
def test_a_rate_is_kept_whatever_the_burstiness(burstiness):
    times = arrival_times(200, 50.0, burstiness, seed=3)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(4.0)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean
    assert spread == pytest.approx(0 if math.isinf(burstiness) else burstiness**-0.5, rel=0.4, abs=1e-6)


CHECK = """
def is_wrong(body, text):
    if text == "c":
        raise KeyError("c")
    return "no b" if "b" not in text else None
"""


def test_answers_are_checked_by_a_function_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(CHECK)
    check = load_check(f"{tmp_path}/mine.py:is_wrong")
    run = make_run(*(make_outcome(place=place, text=text) for place, text in enumerate("abc")))
    wrong = wrong_answers(run, check)
    assert wrong == {0: "no b", 2: "the check failed with KeyError: 'c'"}
    result = result_of(run, wrong=wrong)
    assert result["notes"] == ["2 answers are wrong by --check, the first: no b"]
    assert result["wrong_answers"] == 2
    assert result_of(run)["wrong_answers"] is None


@pytest.mark.parametrize(
    ("words", "told"),
    [("mine", "names no function"), ("no.py:f", "names no function"), ("{}:none", "has no function none")],
)
def test_a_check_that_is_none(tmp_path, words, told):
    (tmp_path / "mine.py").write_text(CHECK)
    with pytest.raises(InvalidRequestError, match=told):
        load_check(words.format(tmp_path / "mine.py"))
