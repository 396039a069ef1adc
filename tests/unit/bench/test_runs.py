"""Runs against stub engines: lengths, replicas, failures, an end before the end."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from hpc_serve.bench import sweep
from hpc_serve.bench.results import result_of
from hpc_serve.bench.run import Lengths
from hpc_serve.bench.service import BenchError, BenchService
from hpc_serve.client.replicas.sdk import http
from hpc_serve.errors import InvalidRequestError, ServiceNotFoundError
from hpc_serve.rendezvous.record import NodeRecord


def lengths_got(run) -> set[tuple[int, int]]:
    return {(outcome.input_len, outcome.output_len) for outcome in run.outcomes}


def shares(run) -> dict[str, int]:
    return {name: part["completed"] for name, part in result_of(run)["replicas"].items()}


@pytest.mark.parametrize(("name", "is_here"), [("n1", True), (socket.gethostname(), True), ("n2", False)])
def test_an_engine_is_on_this_node_by_slurms_name_or_the_hosts(service, monkeypatch, name, is_here):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    service.start(nodes=(NodeRecord(name=name, address="127.0.0.1"),))
    watched = BenchService(service.store, "405b", "equally")
    watched.watch.refresh()
    assert watched.is_here == is_here


@pytest.mark.parametrize("dataset", ["random", "chat", "prefix_repetition"])
def test_lengths_asked_for_are_lengths_got(service, measure, dataset):
    service.start()
    (run,) = measure(dataset=dataset, lengths=Lengths(input_len=120, output_len=9), prefix_len=50, num_prefixes=4)
    assert lengths_got(run) == {(120, 9)}
    assert [outcome.place for outcome in run.outcomes] == list(range(20))
    assert not run.interrupted
    assert not any("as long as" in note for note in result_of(run)["notes"])


def test_runs_of_a_sweep_have_prompts_of_their_own(service, measure):
    service.start()
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


def test_a_rate_has_its_time(service, measure):
    service.start()
    (run,) = measure(at_once=(None,), rate=100.0)
    assert run.duration_s >= 20 / 100.0
    assert result_of(run)["completed"] == 20


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
    figures = result_of(run)
    assert (figures["completed"], figures["failed"]) == (3, 7)
    assert any(" failed: " in note for note in result_of(run)["notes"])


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


def test_a_stop_keeps_what_was_measured_and_ends_the_sweep(service, measure):
    service.start()
    stop = asyncio.Event()

    def progress(_title, _count, ended) -> None:
        if ended == 5:
            stop.set()

    (run,) = measure(at_once=(1, 2), count=200, progress=progress, stop=stop)
    assert run.interrupted
    assert 5 <= len(run.outcomes) < 200
    assert result_of(run)["failed"] == 0
    assert "The run was interrupted" in result_of(run)["notes"][0]


def test_a_stop_while_requests_are_made_leaves_no_run(service, measure):
    service.start()
    stop = asyncio.Event()

    assert measure(progress=lambda *_: stop.set(), stop=stop) == []


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


def test_conversations_are_taken_as_vllm_takes_them(service, measure, tmp_path):
    service.start()
    path = tmp_path / "sharegpt.json"
    texts = [("a question", "an answer"), ("why", "an answer"), ("x" * 1025, "an answer"), ("a question", "no")]
    conversations = [[{"value": prompt}, {"value": answer}] for prompt, answer in texts]
    path.write_text(json.dumps([{"conversations": turns} for turns in conversations]))
    (run,) = measure(dataset="sharegpt", path=path, lengths=None, count=None)
    assert lengths_got(run) == {(len("a question"), len("an answer"))}
    assert len(run.outcomes) == 1


def test_workloads_that_cannot_be_are_refused(service, measure, tmp_path):
    service.start()
    with pytest.raises(InvalidRequestError, match="30 tokens is no part of prompts of 30"):
        measure(dataset="prefix_repetition", prefix_len=30)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        measure(dataset="custom", path=tmp_path / "none.jsonl", lengths=None)
