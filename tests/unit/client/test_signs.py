"""The one rule: a replica that sends nothing for longer than its limit is lost, if another ready one answers."""

import math
import threading
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from hpc_serve.client import connect
from hpc_serve.client.connections.answer_wait import ASK_BEFORE_S, ASK_S, AnswerWait, ReplicaLostError, is_sign
from hpc_serve.client.discovery.lost_replicas import ASK_OTHERS_S, LookResult, LostReplicas
from hpc_serve.client.replicas.pool import LOST_FOR_S, MOST_LOST_FOR_S, ReplicaPool
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.replicas.silence import MOST_SILENT_S, SILENT_S, SilenceLimit
from hpc_serve.client.requests.attempt import Attempt
from hpc_serve.rendezvous.gate_headers import COMMENT, COMMENT_CHUNK, PROCESSING, SIGNS
from tests.support.patience import wait_until
from tests.unit.client.conftest import HELLO, FakeClock, address

USER_S = 600.0


class FakeJudge:
    """Says that a silent replica is lost once it `knows_another`."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.limits: dict[str, SilenceLimit] = {}
        self.knows_another = False
        self.asked: list[bool] = []

    def limit_of(self, name):
        return self.limits.setdefault(name, SilenceLimit())

    def why_lost(self, replica, since_s, *, is_silent):
        self.asked.append(is_silent)
        return "another answers" if is_silent and self.knows_another else None


@pytest.fixture
def judge():
    return FakeJudge()


def pass_time(judge, wait, wait_s, seconds):
    """Read without bytes for so long; None once the user's time is over."""
    ends_at_s = judge.clock.now_s + seconds
    while judge.clock.now_s + wait_s < ends_at_s:
        judge.clock.now_s += wait_s
        if (wait_s := wait.again()) is None:
            return None
    judge.clock.now_s = ends_at_s
    return wait_s


# The limit


def test_a_limit_follows_the_longest_pause_that_ended_by_itself():
    limit = SilenceLimit()
    assert limit.limit_s(0.0) == SILENT_S
    limit.note(0.0, 0.5)
    assert limit.limit_s(1.0) == SILENT_S
    limit.note(10.0, 4.0)
    limit.note(11.0, 0.5)
    assert limit.limit_s(20.0) == 6.0
    limit.note(20.0, 60.0)
    assert limit.limit_s(21.0) == MOST_SILENT_S
    assert limit.limit_s(500.0) == SILENT_S, "a pause is forgotten"


# Waits


def test_silence_over_the_limit_is_a_loss_if_another_answers(judge):
    judge.knows_another = True
    wait = AnswerWait(address(), judge)
    assert wait.begin(USER_S) == SILENT_S - ASK_BEFORE_S
    judge.clock.now_s += SILENT_S - ASK_BEFORE_S
    assert wait.again() == ASK_BEFORE_S
    assert judge.asked == [False], "others are asked before the limit is over"
    judge.clock.now_s += ASK_BEFORE_S
    with pytest.raises(ReplicaLostError, match="a is lost: another answers"):
        wait.again()


def test_a_wait_that_has_ended_is_looked_at_no_more(judge):
    wait = AnswerWait(address(), judge)
    wait.begin(None)
    assert wait.look_at_s < math.inf
    wait.end(b"HTTP/1.1 200 OK")
    assert wait.look_at_s == math.inf


def test_silence_without_another_replica_is_waited_for_and_then_remembered(judge):
    wait = AnswerWait(address(), judge)
    assert pass_time(judge, wait, wait.begin(USER_S), 60.0) == ASK_S
    assert judge.asked[:2] == [False, True]
    assert len(judge.asked) < 60
    wait.end(b"data")
    assert judge.limit_of("a").limit_s(judge.clock.now_s) == MOST_SILENT_S
    wait.begin(USER_S)
    pass_time(judge, wait, wait.begin(USER_S), 5.0)
    judge.knows_another = True
    with pytest.raises(ReplicaLostError):
        pass_time(judge, wait, 0.1, 60.0)


def test_a_replica_that_sends_no_signs_is_never_lost_for_its_silence(judge):
    judge.knows_another = True
    wait = AnswerWait(address(signs=False), judge)
    assert pass_time(judge, wait, wait.begin(USER_S), 60.0) is not None
    assert set(judge.asked) == {False}, "its record is looked at all the same"


def test_what_is_no_stream_of_events_is_not_lost_for_its_silence_once_it_has_begun(judge):
    judge.knows_another = True
    wait = AnswerWait(address(), judge)
    wait.begin_write(USER_S)
    wait.expects_signs = False
    assert pass_time(judge, wait, wait.begin(USER_S), 60.0) is not None
    wait.begin_request()
    assert wait.begin(USER_S) < SILENT_S, "the next request's answer is"


def test_what_takes_no_bytes_of_a_request_is_not_lost_for_its_silence(judge):
    judge.knows_another = True
    wait = AnswerWait(address(), judge)
    assert pass_time(judge, wait, wait.begin_write(USER_S), 60.0) is not None


@pytest.mark.parametrize("sign", [PROCESSING, COMMENT_CHUNK, PROCESSING * 3])
def test_signs_do_not_prolong_the_time_of_the_user(judge, sign):
    wait = AnswerWait(address(), judge)
    wait.begin_write(5.0)
    for _ in range(9):
        wait_s = wait.begin(5.0)
        assert pass_time(judge, wait, wait_s, 0.5) is not None
        wait.end(sign)
    assert pass_time(judge, wait, wait.begin(5.0), 1.0) is None


@pytest.mark.parametrize(
    "data", [COMMENT_CHUNK + b"5\r\ndata:\r\n", PROCESSING + b"HTTP/1.1 200 OK\r\n", b"3\r\nabc\r\n"]
)
def test_bytes_of_the_answer_begin_the_time_of_the_user_anew(judge, data):
    wait = AnswerWait(address(), judge)
    for _ in range(30):
        wait_s = wait.begin(5.0)
        assert pass_time(judge, wait, wait_s, 1.0) is not None
        wait.end(data)


# Who is lost


class Service:
    """Two replicas, and a look that finds what it is told."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.pool = ReplicaPool(clock=self.clock)
        self.pool.fill([address("a"), address("b")])
        self.found: Any = LookResult()
        self.looks: list[Any] = []
        self.asked: list[Any] = []
        self.wait_for = threading.Event()
        self.wait_for.set()
        self.lost = LostReplicas(self.pool, self.look, self.asked.append, clock=self.clock)

    def look(self, names):
        self.looks.append(names)
        self.wait_for.wait()
        return self.found

    def why_lost(self, silent_s=SILENT_S):
        return self.lost.why_lost(address("a"), self.clock.now_s - silent_s, is_silent=silent_s >= SILENT_S)


def test_a_silent_replica_is_lost_once_another_is_heard():
    service = Service()
    assert service.why_lost() is None
    wait_until(lambda: service.looks == [{"a"}])
    assert service.asked == [{"a"}], "the others are asked"
    service.lost.note_answer("b")
    assert service.why_lost() == "it has sent nothing for 1.5 s, and b answers"
    assert service.why_lost(1.0) is None, "it is not silent yet"
    service.clock.now_s += 60
    assert service.why_lost(61) is None, "b is not heard any more either: the fault may be this client's"


def test_others_are_asked_while_a_look_goes_on_and_not_while_one_is_heard():
    service = Service()
    may_end = threading.Event()
    service.wait_for = may_end
    assert service.why_lost(1.0) is None
    assert service.asked == [{"a"}]
    assert service.why_lost() is None
    assert len(service.asked) == 1, "not so soon again"
    service.clock.now_s += ASK_OTHERS_S
    assert service.why_lost() is None
    assert len(service.asked) == 2, "the look has not ended"
    service.lost.note_answer("b")
    service.clock.now_s += ASK_OTHERS_S
    assert service.why_lost() is not None
    assert len(service.asked) == 2
    may_end.set()


def test_a_replica_that_was_lost_lately_is_no_reason_to_leave_another():
    service = Service()
    service.pool.lose(address("b"))
    service.lost.note_answer("b")
    assert service.why_lost() is None
    service.clock.now_s += LOST_FOR_S
    service.lost.note_answer("b")
    assert service.why_lost() is not None


def test_what_a_look_finds_ends_the_requests_that_waited():
    service = Service()
    service.found = LookResult(lost={"a": "its record says that it is failed"})
    service.pool.fill([address("a")])
    began_s = 0.5
    wait_until(lambda: service.why_lost(began_s) == "its record says that it is failed")
    service.clock.now_s += 1.0
    assert service.why_lost(began_s) is None, "a later request is another one's"


def refuse(thread):
    raise RuntimeError("can't start new thread")


def test_a_look_that_cannot_be_started_is_made_later(monkeypatch):
    service = Service()
    with monkeypatch.context() as without_threads:
        without_threads.setattr("threading.Thread.start", refuse)
        assert service.why_lost() is None
    assert not service.looks
    service.clock.now_s += 10
    assert service.why_lost() is None
    wait_until(lambda: service.looks)


def test_lost_replicas_are_chosen_last_for_twice_as_long_each_time():
    clock = FakeClock()
    pool = ReplicaPool(clock=clock)
    pool.fill([address("a"), address("b")])
    for times in range(8):
        for _ in range(3):  # of several requests that were lost at once, one counts
            pool.lose(address("a"))
        lost_s = min(LOST_FOR_S * 2**times, MOST_LOST_FOR_S)
        assert {pool.take().name for _ in range(4)} == {"b"}
        assert pool.take({"b"}).name == "a", "without another it is used"
        clock.now_s += lost_s - 0.01
        assert pool.is_lost(address("a"))
        clock.now_s += 0.02
        assert not pool.is_lost(address("a"))
    pool.give_back(address("a"), "whole", 1.0, is_whole=True)
    pool.lose(address("a"))
    clock.now_s += LOST_FOR_S
    assert not pool.is_lost(address("a")), "a whole answer begins it anew"


@pytest.mark.parametrize(("status", "is_still_lost"), [(500, True), (400, True), (200, False)])
def test_a_replica_that_was_lost_is_well_again_after_an_answer_without_an_error(status, is_still_lost):
    pool = ReplicaPool(clock=FakeClock())
    pool.fill([address("a")])
    watch: Any = SimpleNamespace(pool=pool, last_replica=SimpleNamespace(note=lambda name: None))
    attempt: Any = Attempt(watch, pool.take())
    pool.lose(address("a"))
    attempt.answered(SimpleNamespace(status_code=status, is_event_stream=False))
    attempt.is_whole = True
    attempt.end()
    assert pool.is_lost(address("a")) is is_still_lost


# With engines


SLOW = ("--stub-first-s", "3", "--stub-words", "3")


def count_signs(monkeypatch):
    signs: list[bytes] = []
    end = AnswerWait.end

    def noting(wait, data):
        signs.extend([data] if is_sign(data) else [])
        end(wait, data)

    monkeypatch.setattr(AnswerWait, "end", noting)
    return signs


def test_signs_come_before_a_whole_answer_and_its_connection_is_kept(service, opened, monkeypatch, asker):
    service.start(*SLOW)
    signs = count_signs(monkeypatch)
    client = asker(max_retries=0)
    assert client.say() == client.say()
    assert PROCESSING in signs
    assert len(opened) == 1


@pytest.mark.parametrize("resume", [True, False], ids=["resume", "no-resume"])
@pytest.mark.parametrize("wants_signs", [False, True])
def test_signs_reach_the_user_of_a_stream_only_if_asked_for(service, monkeypatch, wants_signs, resume):
    service.start("--stub-word-s", "1.2", "--stub-words", "3")
    signs = count_signs(monkeypatch)
    client = connect("405b", max_retries=0, resume=resume)
    headers = {name.decode(): value.decode() for name, value in [SIGNS]} if wants_signs else {}
    raw = client.chat.completions.with_raw_response.create(
        model="405b", messages=HELLO, stream=True, extra_headers=headers
    )
    body = b"".join(raw.http_response.iter_bytes())
    assert COMMENT_CHUNK in signs
    assert body.endswith(b"data: [DONE]\n\n")
    events = body.split(b"\n\n")
    assert (COMMENT[:1] in events) is wants_signs


@pytest.mark.parametrize("engine", ["--stub-first-s", "--stub-word-s"])
def test_the_timeout_of_the_user_holds_while_signs_come(service, engine, asker):
    service.start(engine, "600")
    client = asker(max_retries=0, timeout=1.5, resume=False)
    with pytest.raises((openai.APITimeoutError, http.ReadTimeout)):
        list(client.create(model="405b", messages=HELLO, stream=True))
