"""Replicas that go silent, by a clock of the test: who is given up, after how long, and who is left alone."""

from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest

from hpc_serve.client.replicas.pool import ReplicaAddress, ReplicaPool
from hpc_serve.client.silence import lateness, probation
from hpc_serve.client.silence.lateness import Lateness
from hpc_serve.client.silence.probation import Probation
from hpc_serve.client.silence.questions import Sign
from hpc_serve.client.silence.request_watch import LISTEN_S
from hpc_serve.client.silence.silence import HUNG_COUNTS_S, PROMPT_BYTES_S, Silence
from hpc_serve.trust.connection import Identity
from hpc_serve.vllm.metrics import EngineFigures


@dataclass
class Request:
    """A request of ours at an engine. `is_stuck`: what the engine sends of it does not come."""

    replica: ReplicaAddress
    is_talking: bool = True
    is_stuck: bool = False
    heard_at_s: float = float("-inf")
    began_at_s: float = 1000.0
    prompt_bytes: int = 100


@dataclass
class Engine:
    """What an engine does now: whether it makes steps, sends what it made, and answers questions.

    `answers` is whether it does the last, if it is alive. `loses`: a question to it has to be sent again.
    """

    name: str
    pause_s: float = 0.05
    is_alive: bool = True
    steps: bool = True
    sends: bool = True
    is_idle: bool = False
    answers: bool = True
    loses: bool = False
    takes_s: float = 0.01
    made: int = 0
    asked: int = 0
    requests: list[Request] = field(default_factory=list)
    others: int = 0

    @property
    def address(self):
        identity = Identity(certificate="", api_key="k")
        return ReplicaAddress(name=self.name, host="h", port=1, identity=identity)

    @property
    def sign(self):
        under_way = 0 if self.is_idle else len(self.requests) + self.others
        figures = EngineFigures(under_way=under_way, steps=(float(self.made),))
        return Sign(figures=figures, was_sent_again=self.loses, took_s=self.takes_s)


class Beside:
    """Asks the engines of a scene beside its requests, which takes it no time."""

    def __init__(self, scene):
        self.engines = scene.engines
        self.asked = 0

    def ask(self, replicas, answer_s):
        self.asked += 1
        return {r.name: self.engines[r.name].sign for r in replicas if self.engines[r.name].is_alive}

    def keep(self, replicas):
        pass

    def after_fork(self):
        pass


class Scene:
    """Engines and one client, in steps of the watch. Asking one that is not there takes as long as it may."""

    def __init__(self, *engines, streams=2, whole=1):
        self.engines = {engine.name: engine for engine in engines}
        self.now = 1000.0
        self.pool = ReplicaPool(clock=lambda: self.now)
        self.pool.fill(engine.address for engine in engines)
        self.beside = Beside(self)
        on_probation = Probation(self.beside, start=lambda ask: ask())
        self.aside = Beside(self)
        self.silence = Silence(
            self.pool,
            questions=self,
            probation=on_probation,
            lateness=Lateness(self.aside, start=lambda ask: ask()),
            clock=lambda: self.now,
        )
        self.delay_s = 0.0
        self.given_up = []
        for engine in engines:
            engine.requests = [Request(engine.address) for _ in range(streams)]
            engine.requests += [Request(engine.address, is_talking=False) for _ in range(whole)]

    def ask(self, replicas, answer_s):
        for replica in replicas:
            self.engines[replica.name].asked += 1
        there = {r.name for r in replicas if self.engines[r.name].is_alive and self.engines[r.name].answers}
        self.now += self.delay_s + (0.01 if len(there) == len(replicas) else answer_s)
        self.talk()
        unsent = {r.name for r in replicas if self.engines[r.name].loses} - there
        no_answers = dict.fromkeys(unsent, Sign(is_answer=False, was_sent_again=True))
        return {name: self.engines[name].sign for name in there} | no_answers

    def keep(self, replicas):
        pass

    def after_fork(self):
        pass

    def talk(self):
        """The engines that do so make a step, and send it."""
        for engine in self.engines.values():
            if not engine.is_alive or not engine.steps:
                continue
            engine.made += 1
            for request in engine.requests if engine.sends else ():
                if request.is_talking and not request.is_stuck:
                    request.heard_at_s = self.now - self.now % engine.pause_s

    def run(self, seconds):
        """Let time pass; what was given up in it, and after how long."""
        began, given_up = self.now, {}
        while self.now < began + seconds:
            self.talk()
            for name, why in self.silence.listen([r for e in self.engines.values() for r in e.requests]).items():
                given_up[name] = round(self.now - began, 2), why
                self.engines[name].requests = []
            self.now += LISTEN_S
        return given_up


def two(**options):
    return Scene(Engine("a"), Engine("b"), **options)


@pytest.mark.parametrize(("streams", "most_s"), [(3, 1.5), (1, 1.5), (0, 1.8)])
def test_a_frozen_engine_is_given_up_soon(streams, most_s):
    scene = two(streams=streams)
    assert not scene.run(20)
    scene.engines["a"].is_alive = False
    after_s, why = scene.run(5)["a"]
    assert after_s <= most_s
    assert "no answer on two connections" in why


@pytest.mark.parametrize(("streams", "most_s"), [(3, 1.5), (1, 1.5), (0, 1.8)])
def test_an_engine_that_hangs_is_given_up_soon_and_chosen_last(streams, most_s):
    scene = two(streams=streams)
    assert not scene.run(20)
    scene.engines["a"].steps = False
    after_s, why = scene.run(5)["a"]
    assert after_s <= most_s
    assert "its engine has made no step for" in why
    assert {scene.pool.take().name for _ in range(9)} == {"b"}
    scene.run(HUNG_COUNTS_S)
    assert scene.pool.take().name == "a", "its launcher has had time to say that it hangs"


def test_a_silent_engine_is_chosen_last_before_it_is_given_up():
    scene = two()
    scene.run(5)
    scene.engines["a"].steps = False
    assert not scene.run(0.9)
    assert {scene.pool.take().name for _ in range(9)} == {"b"}
    scene.engines["a"].steps = True
    scene.run(1)
    assert {scene.pool.take().name for _ in range(9)} == {"a"}, "which has fewer now"


def test_a_replica_of_which_one_stream_stops_is_chosen_last_for_a_while():
    """Its network may be about to go; a stream that stands still for longer may be one that its user does not read."""
    scene = two()
    scene.run(5)
    scene.engines["a"].requests[0].is_stuck = True
    assert not scene.run(0.9)
    assert {scene.pool.take().name for _ in range(9)} == {"b"}
    assert not scene.run(3)
    assert {scene.pool.take().name for _ in range(9)} == {"a"}, "which has fewer now"


def test_a_replica_to_which_a_question_was_lost_is_chosen_last():
    scene = two(streams=0)
    scene.engines["a"].loses = True
    assert not scene.run(0.6)
    assert {scene.pool.take().name for _ in range(9)} == {"b"}


def test_the_only_replica_is_left_to_longer_looks():
    scene = Scene(Engine("a"))
    scene.run(5)
    scene.engines["a"].is_alive = False
    assert not scene.run(20)
    assert not scene.engines["a"].asked


@pytest.mark.parametrize("fault", ["is_alive", "steps"])
def test_where_none_answers_none_is_given_up(fault):
    """It may be this program's own network, or something that all engines share."""
    scene = Scene(Engine("a"), Engine("b"), Engine("c"))
    scene.run(5)
    for engine in scene.engines.values():
        setattr(engine, fault, False)
    assert not scene.run(20)
    setattr(scene.engines["c"], fault, True)
    assert scene.run(5).keys() == {"a", "b"}


def test_a_replica_without_requests_is_asked_for_its_word():
    scene = two()
    scene.engines["b"].requests = []
    scene.run(5)
    assert not scene.engines["b"].asked
    scene.engines["a"].is_alive = False
    assert scene.run(5).keys() == {"a"}
    assert scene.engines["b"].asked == 1


def test_engines_that_talk_are_asked_nothing():
    scene = two()
    scene.run(60)
    assert not any(engine.asked for engine in scene.engines.values())


def test_a_stream_that_waits_for_others_is_no_fault():
    """Its request was put back, or another prompt is read: the engine makes steps."""
    scene = two()
    scene.run(5)
    scene.engines["a"].sends = False
    assert not scene.run(60)
    assert scene.engines["a"].asked < 40


def test_a_user_who_does_not_read_on_is_no_fault():
    scene = two()
    scene.run(5)
    engine = scene.engines["a"]
    engine.sends, engine.steps, engine.is_idle = False, False, True
    assert not scene.run(60)


def test_an_engine_that_has_such_pauses_gets_more_time():
    scene = Scene(Engine("a", pause_s=1.0), Engine("b"))
    scene.run(20)
    scene.engines["a"].steps = False
    assert not scene.run(2)
    scene.engines["a"].steps = True
    scene.run(5)
    scene.engines["a"].is_alive = False
    assert scene.run(10)["a"][0] > 2


def test_a_false_alarm_costs_the_replica_the_next_one_takes_longer():
    scene = two(streams=1)
    engine = scene.engines["a"]
    took = []
    for _ in range(3):
        scene.run(5)
        engine.steps = False
        took.append(scene.run(30)["a"][0])
        engine.steps, engine.requests = True, [Request(engine.address)]
    assert took[0] < 2
    assert took[1] > 2 * took[0]
    assert took[2] > 2 * took[1]


def test_this_program_stood_still():
    scene = two()
    scene.run(5)
    scene.now += 30
    scene.silence.stood_still(30)
    for engine in scene.engines.values():
        engine.sends = False
    assert not scene.run(0.5)
    assert not any(engine.asked for engine in scene.engines.values())


def test_this_program_stood_still_while_it_asked():
    scene = two()
    scene.run(5)
    scene.engines["a"].is_alive = False
    scene.delay_s = 5.0
    assert not scene.run(30)
    scene.delay_s = 0.0
    assert scene.run(5).keys() == {"a"}


def test_clients_share_the_cost_of_questions():
    scene = two(streams=0, whole=1)
    engine = scene.engines["a"]
    engine.others = 99
    scene.run(100)
    assert engine.asked <= 7
    assert scene.engines["b"].asked > 50


def test_an_engine_that_reads_a_long_prompt_of_ours_makes_one_long_step():
    scene = two()
    scene.run(5)
    engine = scene.engines["a"]
    seconds = 4
    long = Request(engine.address, is_talking=False, began_at_s=scene.now, prompt_bytes=seconds * PROMPT_BYTES_S)
    engine.requests.append(long)
    engine.steps = False
    assert not scene.run(seconds - 0.5)
    assert scene.run(2).keys() == {"a"}, "it has had time enough for that"


def test_an_engine_that_reads_a_long_prompt_is_asked_at_the_same_pace_all_the_time():
    scene = two()
    scene.run(5)
    engine = scene.engines["a"]
    long = Request(engine.address, is_talking=False, began_at_s=scene.now, prompt_bytes=20 * PROMPT_BYTES_S)
    engine.requests.append(long)
    engine.steps = False
    assert not scene.run(19)
    assert engine.asked <= 19 * 5


def test_many_clients_with_hidden_words_share_the_cost_of_questions():
    scene = two(streams=3)
    engine = scene.engines["a"]
    engine.others, engine.requests[0].is_stuck = 99, True
    assert not scene.run(100)
    assert engine.asked <= 20


def test_prompts_are_read_one_after_the_other():
    scene = two(streams=0, whole=0)
    engine = scene.engines["a"]
    options = {"is_talking": False, "began_at_s": scene.now, "prompt_bytes": 2 * PROMPT_BYTES_S}
    engine.requests = [Request(engine.address, **options) for _ in range(3)]
    engine.steps = False
    assert not scene.run(5.5)
    assert scene.run(3).keys() == {"a"}


def test_a_moment_in_which_this_program_stood_still_does_not_count_and_what_was_before_does():
    scene = two()
    scene.run(5)
    scene.engines["a"].is_alive = False
    assert not scene.run(0.3)
    scene.now += 1.5
    scene.silence.stood_still(1.5)
    assert scene.run(3)["a"][0] <= 1.2


def test_words_of_another_replica_are_a_witness():
    scene = two()
    scene.run(5)
    scene.engines["a"].is_alive = False
    assert scene.run(5).keys() == {"a"}
    assert not scene.engines["b"].asked


@pytest.mark.parametrize(("streams", "most_s"), [(3, 1.5), (1, 1.5), (0, 1.5)])
def test_an_engine_whose_network_loses_what_is_sent_is_given_up_soon(streams, most_s):
    scene = two(streams=streams)
    assert not scene.run(20)
    scene.engines["a"].sends, scene.engines["a"].loses = False, True
    after_s, why = scene.run(5)["a"]
    assert after_s <= most_s
    assert "the network to it has lost what was sent" in why


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "does not answer"])
def test_one_stream_that_stands_still_is_enough_where_the_network_loses_packets(answers):
    scene = two(streams=3)
    scene.run(5)
    engine = scene.engines["a"]
    engine.answers, engine.loses, engine.requests[0].is_stuck = answers, True, True
    assert scene.run(5)["a"][0] <= 1.8


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "does not answer"])
def test_one_stream_that_stands_still_at_a_busy_engine_is_no_fault(answers):
    """Its words may be hidden from the user: a thought, or the arguments of a tool. The network carries all."""
    scene = two(streams=3)
    scene.run(5)
    engine = scene.engines["a"]
    engine.answers, engine.requests[0].is_stuck = answers, True
    assert not scene.run(60)
    assert engine.asked < 40


@pytest.mark.parametrize("streams", [0, 2])
def test_one_packet_that_is_lost_costs_an_engine_nothing(streams):
    scene = two(streams=streams)
    scene.run(5)
    engine = scene.engines["a"]
    for _ in range(3):
        engine.sends, engine.loses = False, True
        assert not scene.run(0.7)
        engine.sends, engine.loses = True, False
        assert not scene.run(10)


def test_pauses_of_the_network_give_an_engine_no_more_time():
    scene = two()
    scene.run(5)
    engine = scene.engines["a"]
    engine.sends, engine.loses = False, True
    assert not scene.run(0.7)
    engine.sends, engine.loses = True, False
    scene.run(10)
    engine.is_alive = False
    assert scene.run(5)["a"][0] <= 1.5


def test_where_the_network_to_all_loses_packets_none_is_given_up():
    """It is this program's own."""
    scene = two()
    scene.run(5)
    for engine in scene.engines.values():
        engine.sends, engine.loses = False, True
    assert not scene.run(20)
    scene.engines["b"].requests = []
    assert not scene.run(20)
    scene.engines["b"].loses = False
    assert scene.run(5).keys() == {"a"}


def test_a_network_that_carries_all_of_it_late_is_found_while_words_come():
    scene = two()
    scene.run(5)
    assert not scene.silence.late
    scene.engines["a"].loses = True
    assert not scene.run(2), "it is no reason to give it up"
    assert scene.silence.late == {"a"}
    assert {taken(scene) for _ in range(9)} == {"b"}
    scene.engines["a"].loses = False
    assert until_taken(scene, "a") >= probation.ANSWERS * probation.ASK_S - 1
    assert not scene.silence.late


def test_one_late_answer_costs_a_replica_a_moment():
    scene = two()
    scene.run(5)
    scene.engines["a"].takes_s = 0.5
    while not scene.silence.late:
        scene.run(LISTEN_S)
    assert {taken(scene) for _ in range(9)} == {"b"}
    scene.engines["a"].takes_s = 0.01
    assert until_taken(scene, "a") <= lateness.LATE_FOR_S + 0.5


def test_a_replica_that_leaves_questions_unanswered_is_late_while_words_come():
    scene = two()
    scene.run(5)
    scene.aside.ask = lambda replicas, answer_s: {}  # of neither of them
    scene.run(2)
    assert scene.silence.late == {"a", "b"}
    assert not scene.given_up


@pytest.mark.parametrize(("streams", "whole"), [(2, 1), (0, 2)])
def test_a_replica_that_answers_much_later_than_usual_is_late(streams, whole):
    scene = two(streams=streams, whole=whole)
    scene.engines["a"].takes_s = 0.2
    scene.run(10)
    scene.engines["a"].takes_s = 0.35
    scene.run(1)
    assert not scene.silence.late, "such an engine is slow to answer anyway"
    scene.engines["b"].takes_s = 0.5
    scene.run(1)
    assert scene.silence.late == {"b"}


def test_a_replica_is_asked_aside_where_requests_wait_and_nothing_else_asks_it():
    scene = two(streams=2, whole=0)
    scene.run(20)
    assert not scene.aside.asked
    scene = two(streams=0, whole=1)
    scene.run(20)
    assert not scene.aside.asked, "it is asked anyway"
    scene = Scene(Engine("a"))
    scene.run(20)
    assert not scene.aside.asked, "there is no other replica that could be asked beside it"
    scene = two()
    scene.run(20)
    assert 20 <= scene.aside.asked <= 40


def test_clients_of_a_busy_engine_share_the_cost_of_asking_aside():
    scene = two()
    for engine in scene.engines.values():
        engine.others = 3_000
    scene.run(100)
    assert scene.aside.asked <= 10


def taken(scene):
    """Who is chosen by a client that has no other request under way."""
    replica = scene.pool.take()
    scene.pool.give_back(replica)
    return replica.name


def until_taken(scene, name):
    """After how many seconds a replica has its turn again."""
    began = scene.now
    while name not in {taken(scene) for _ in range(40)}:
        scene.run(0.5)
        assert scene.now < began + 600
    return scene.now - began


def test_a_replica_that_fell_silent_has_its_turn_again_after_steady_answers():
    scene = two()
    scene.run(5)
    a = scene.engines["a"]
    waits = []
    for _ in range(3):
        a.is_alive = False
        assert scene.run(10).keys() == {"a"}
        a.is_alive = True
        for loses in (True, False, True):  # a network that comes and goes
            a.loses = loses
            scene.run(2)
            assert {taken(scene) for _ in range(9)} == {"b"}
        a.loses = False
        waits.append(until_taken(scene, "a"))
        a.requests = [Request(a.address)]
    least_s = probation.ANSWERS * probation.ASK_S
    assert least_s - 1 <= waits[0] <= least_s + 2
    assert waits[1] >= 2 * least_s - 1
    assert waits[2] >= 4 * least_s - 1


def test_replicas_without_another_are_used_all_the_same():
    scene = two()
    scene.run(5)
    scene.engines["a"].is_alive = False
    scene.run(5)
    assert taken(scene) == "b"
    scene.pool.drop("b")
    assert taken(scene) == "a"


def test_a_new_engine_at_another_address_is_none_that_was_given_up():
    scene = two()
    scene.run(5)
    a, b = scene.engines["a"], scene.engines["b"]
    a.is_alive = False
    scene.run(5)
    scene.pool.fill([replace(a.address, port=2), b.address])
    scene.run(0.2)
    assert "a" in {taken(scene) for _ in range(40)}


def test_who_is_not_offered_is_not_asked_and_forgotten_in_the_end():
    scene = two()
    scene.run(5)
    scene.engines["a"].is_alive = False
    scene.run(5)
    scene.pool.drop("a")
    asked = scene.beside.asked
    scene.run(probation.FORGET_S + 1)
    assert scene.beside.asked == asked
    scene.pool.fill(engine.address for engine in scene.engines.values())
    scene.run(0.2)
    assert "a" in {taken(scene) for _ in range(40)}


def test_a_replica_on_probation_is_asked_again_after_a_question_that_could_not_be_put():
    """For want of threads, or for an error of the question itself."""
    replica, asked, trouble = Engine("a").address, [], [RuntimeError("can't start new thread")]

    class Asker:
        def ask(self, replicas, answer_s):
            asked.append(replicas)
            if len(asked) == 1:
                raise OSError("too many open files")
            return {"a": Sign()}

        def keep(self, replicas):
            pass

        def after_fork(self):
            pass

    def start(ask):
        if trouble:
            raise trouble.pop()
        with suppress(OSError):
            ask()

    on_probation = Probation(Asker(), start=start)
    on_probation.enter(replica, 0.0)
    for turn in range(1, probation.ANSWERS + 4):
        on_probation.look([replica], turn * probation.ASK_S)
    assert not on_probation.names
