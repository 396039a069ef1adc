"""What of the load's and the engines' lines counts as what. Values in, values out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.faults.catalogue import FAULTS
from tests.faults.expected import KNOWN, SLOW, Known, missed, surpasses
from tests.faults.outcomes import Outcome, count
from tests.faults.table import remarks, table


def request(name: str, **values: Any) -> dict[str, Any]:
    usual = {"client": "threads", "stream": True, "variant": "", "outcome": "right", "gap_s": 0.1}
    return {"name": name, **usual, "tokens": 20, "started": 9.0, "first": 9.1, "ended": 11.0, **values}


def begun(name: str, text: str = "", at: float = 9.0) -> dict[str, Any]:
    return {"event": "begun", "at": at, "context": f"<user>Request {name}: say something.\n<assistant>{text}"}


REFUSED = {"outcome": "error", "error": "openai.APIConnectionError", "text": "Connection error.", "is_typed": True}
BROKEN = {"outcome": "error", "error": "httpx.ReadError", "text": "", "is_typed": False}


@pytest.mark.parametrize(
    ("values", "work", "kind"),
    [
        ({}, [begun("a-1")], "answered"),
        ({}, [], "answered"),
        ({}, [begun("a-1"), begun("a-1")], "repeated"),
        ({}, [begun("a-1"), begun("a-1", "w0.12ab w1.00ff")], "resumed"),
        (REFUSED, [begun("a-1")], "reported"),
        (BROKEN, [begun("a-1")], "lost"),
        ({"outcome": "wrong", "text": "finish_reason None, not 'stop'"}, [begun("a-1")], "lost"),
        ({"outcome": "hung"}, [begun("a-1")], "lost"),
    ],
)
def test_a_request_is_counted_once_as_what_it_was(values, work, kind):
    outcome = count("x", [request("a-1", **values)], [*work, begun("a-2")], fault_at=10.0)
    counts = {name: getattr(outcome, name) for name in ("answered", "repeated", "resumed", "reported", "lost")}
    assert counts == {**dict.fromkeys(counts, 0), kind: 1}
    assert sum(outcome.reasons.values()) == (kind in ("reported", "lost"))


def test_times_are_those_of_the_last_request_that_was_affected():
    lines = [
        request("a-1", started=7.0, ended=9.0),
        request("a-2", started=9.0, ended=11.0),
        request("a-3", started=10.5, ended=15.0, gap_s=2.6),
        request("a-4", started=12.0, ended=14.0),
        request("a-5", started=9.0, ended=60.0, client="fresh", gap_s=50.0),
    ]
    outcome = count("x", lines, [], fault_at=10.0)
    assert (outcome.notice_s, outcome.recover_s, outcome.gap_s) == (0.5, 50.0, 2.6)
    quiet = count("x", lines[:2], [], fault_at=10.0)
    assert (quiet.notice_s, quiet.recover_s, quiet.gap_s) == (None, None, 0.1)
    hung = count("x", [*lines, request("a-6", outcome="hung", started=11.0, ended=31.0)], [], fault_at=10.0)
    assert (hung.notice_s, hung.recover_s) == (1.0, None)


def test_a_gap_is_what_a_client_waited_beyond_an_unbroken_answer():
    """Tokens took 0.1 s each. An answer of 2 s that is not a stream was under way for 1.5 s at the fault."""
    before = [request(f"b-{place}", stream=False, started=7.0, ended=9.0) for place in range(3)]
    anew = request("a-1", stream=False, started=8.5, ended=13.5)
    work = [begun("a-1", at=8.6), begun("a-1", at=11.4)]
    outcome = count("x", [*before, anew], work, fault_at=10.0)
    assert outcome.left_s == pytest.approx(1.4)
    assert outcome.gap_s == pytest.approx(1.5)
    assert outcome.longer_s == pytest.approx(3.0)
    untouched = request("a-2", stream=False, started=9.5, ended=11.5)
    outcome = count("x", [*before, untouched], [begun("a-2", at=9.6)], fault_at=10.0)
    assert (outcome.left_s, outcome.gap_s) == (0.0, 0.0)


def queued_at(name: str, request_id: str, *, arrived: float, begun_at: float, end: str) -> list[dict[str, Any]]:
    """A request at an engine that was full when it arrived."""
    entry = {**begun(name, at=begun_at), "request": request_id, "waited_s": begun_at - arrived}
    return [entry, {"event": end, "at": begun_at + 2.0, "request": request_id}]


@pytest.mark.parametrize(
    ("arrived", "end", "gap_s", "queued_s"),
    [
        (10.4, "stop", 0.4, 5.0),  # its client found the live replica at once, which was full
        (14.0, "stop", 4.0, 1.4),  # a slow client: the queue excuses what was waited in it alone
        (10.4, "abort", 5.4, 0.0),  # the engine in whose queue it stood did not answer it
    ],
)
@pytest.mark.parametrize("is_stream", [True, False])
def test_time_in_the_queue_of_a_full_engine_is_no_gap_if_it_answers(is_stream, arrived, end, gap_s, queued_s):
    before = [request(f"b-{place}", started=7.0, ended=9.0) for place in range(3)]
    work = queued_at("a-1", "e1", arrived=arrived, begun_at=15.4, end=end)
    pauses = {"pauses": [[9.5, 15.4]], "gap_s": 5.9} if is_stream else {}
    asked = request("a-1", stream=is_stream, started=9.5, ended=17.4, **pauses)
    outcome = count("x", [*before, asked], work, fault_at=10.0)
    assert outcome.gap_s == pytest.approx(gap_s)
    assert outcome.queued_s == pytest.approx(queued_s)
    assert outcome.longer_s == pytest.approx(5.9)


def test_a_queue_before_the_fault_makes_no_unbroken_answer_longer():
    """Tokens took 0.1 s each, and each request had waited for 2 s in a queue."""
    before = [request(f"b-{place}", started=5.0, ended=9.0) for place in range(3)]
    work = [
        entry
        for place in range(3)
        for entry in queued_at(f"b-{place}", f"e{place}", arrived=5.0, begun_at=7.0, end="stop")
    ]
    late = request("a-1", stream=False, started=10.0, ended=15.0)
    assert count("x", [*before, late], work, fault_at=10.0).gap_s == pytest.approx(3.0)


def test_a_pause_before_the_fault_is_none_of_its_gaps():
    stream = request("a-1", started=5.0, ended=12.0, gap_s=3.0, pauses=[[6.0, 9.0], [9.5, 11.0]])
    assert count("x", [stream], [], fault_at=10.0).gap_s == pytest.approx(1.0)


def test_what_is_not_known_must_not_be_lost(monkeypatch):
    monkeypatch.setitem(KNOWN, "leaks", Known(lost=2, needless=None, why="it leaks"))
    assert not surpasses(Outcome(fault="leaks", sent=9, lost=2, reported=7, needless=7))
    assert surpasses(Outcome(fault="leaks", sent=9, lost=3)) == "3 lost, at most 2 expected"
    assert not surpasses(Outcome(fault="other", sent=9, reported=1))
    assert surpasses(Outcome(fault="other", sent=9, needless=1)) == "1 needlessly reported, at most 0 expected"


@pytest.mark.parametrize(
    ("values", "hides_records", "needless"),
    [
        ({}, False, 1),
        ({"variant": "two"}, False, 0),
        ({"variant": "two", "first": None}, False, 1),
        ({"client": "fresh"}, True, 0),
        ({"client": "asyncio"}, True, 1),
    ],
)
def test_a_report_is_needless_unless_nothing_better_was_possible(values, hides_records, needless):
    lines = [request("a-1", **REFUSED, **values)]
    outcome = count("x", lines, [], fault_at=10.0, hides_records=hides_records)
    assert (outcome.reported, outcome.needless) == (1, needless)


def test_the_goals_are_said_beside_what_was_seen():
    assert missed(Outcome(fault="x", sent=9, answered=9, notice_s=9.9, gap_s=1.9)) == ""
    assert missed(Outcome(fault="x", sent=9, lost=2, notice_s=11.04, gap_s=2.1)) == (
        "2 lost, noticed after 11.0 s, a gap of 2.1 s"
    )
    assert not missed(Outcome(fault="client-frozen", sent=9, gap_s=10.0))
    assert not missed(Outcome(fault="link-flaps", sent=9, gap_s=4.9))
    assert missed(Outcome(fault="link-flaps", sent=9, gap_s=5.1))
    assert not missed(Outcome(fault="healthy-pair", sent=9, notice_s=599.5, gap_s=25.0))


def test_the_table_names_each_loss_as_known_or_worse(monkeypatch):
    monkeypatch.setitem(KNOWN, "leaks", Known(lost=2, why="it leaks"))
    outcomes = [Outcome(fault=name, sent=3, lost=1, gap_s=0.5, reasons={"a stream: x": 1}) for name in ("leaks", "new")]
    head, leaks, new = table(outcomes).splitlines()
    assert head.split()[:8] == ["fault", "sent", "answered", "resumed", "repeated", "reported", "needless", "lost"]
    assert leaks.split()[:11] == ["leaks", "3", "0", "0", "0", "0", "0", "1", "-", "-", "0.5"]
    assert leaks.endswith("known, goals missed: 1 lost")
    assert new.endswith("WORSE than known")
    assert "leaks: known: it leaks\n    1 x a stream: x" in remarks(outcomes)


def test_every_known_loss_is_of_a_fault_that_there_is():
    assert {*KNOWN, *SLOW} <= set(FAULTS)
    assert all(fault.words for fault in FAULTS.values())


@pytest.mark.parametrize(("work", "needless"), [([], 0), ([begun("a-1")], 1)])
def test_the_only_replica_may_end_for_requests_that_no_engine_has_begun(work, needless):
    lines = [request("a-1", **REFUSED)]
    assert count("x", lines, work, fault_at=10.0, ends_service=True).needless == needless
    assert count("x", lines, work, fault_at=10.0).needless == 1


def test_a_replica_that_stays_away_and_a_cluster_that_must_be_repaired_are_worse(monkeypatch):
    outcome = Outcome(fault="x", sent=9, answered=9, ready=1, ready_due=2)
    assert surpasses(outcome) == "1 replicas ready afterwards, at least 2 expected"
    monkeypatch.setitem(KNOWN, "x", Known(replicas=1, why="it stays away"))
    assert not surpasses(outcome)
    assert missed(outcome) == "1 of 2 replicas ready afterwards"
    unwell = replace(outcome, unwell="hosts are down: n1: the cluster was made anew")
    assert surpasses(unwell) == "afterwards not well: hosts are down: n1: the cluster was made anew"
    assert "repaired after x: hosts are down: n1: the cluster was made anew" in remarks([unwell])


def test_who_can_find_no_service_notices_nothing():
    late = request("a-1", client="fresh", started=15.0, ended=40.0)
    assert count("x", [late], [], fault_at=10.0).notice_s == 5.0
    assert count("x", [late], [], fault_at=10.0, hides_records=True).notice_s is None
    refused = request("a-2", **REFUSED, started=20.0, ended=20.1)
    assert count("x", [refused], [], fault_at=10.0, ends_service=True).notice_s is None


def test_each_program_notices_for_itself_what_comes_and_goes():
    fresh = request("a-1", client="fresh", started=25.0, ended=31.0, gap_s=4.0)
    late = request("a-2", started=22.0, ended=29.0)
    outcome = count("x", [fresh], [], fault_at=10.0, comes_and_goes=True)
    assert (outcome.notice_s, outcome.gap_s, outcome.recover_s) == (None, 4.0, 21.0)
    assert count("x", [fresh, late], [], fault_at=10.0, comes_and_goes=True).notice_s == 12.0
    assert count("x", [fresh], [], fault_at=10.0).notice_s == 15.0


def test_a_missed_time_is_said_as_known_or_not(monkeypatch):
    monkeypatch.setitem(SLOW, "x", "it probes twice")
    known, new = (Outcome(fault=name, sent=9, answered=9, gap_s=5.0) for name in ("x", "y"))
    assert table([known]).endswith("known, goals missed: a gap of 5.0 s")
    assert table([new]).endswith("0/0  goals missed: a gap of 5.0 s")
    assert remarks([known, new]) == "x: slow, as known: it probes twice"
