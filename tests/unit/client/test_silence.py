"""Replicas that go silent, by a clock of the test: who is given up, after how long, and who is left alone."""

from dataclasses import dataclass, field

import pytest

from hpc_serve.client.pool import ReplicaAddress, ReplicaPool
from hpc_serve.client.questions import Sign
from hpc_serve.client.request_watch import LISTEN_S
from hpc_serve.client.silence import HUNG_COUNTS_S, Silence
from hpc_serve.trust.connection import Identity
from hpc_serve.vllm.metrics import EngineFigures


@dataclass
class Request:
    """A request of ours at an engine."""

    replica: ReplicaAddress
    is_talking: bool = True
    heard_at_s: float = float("-inf")


@dataclass
class Engine:
    """What an engine does now: whether it makes steps, sends what it made, and answers questions."""

    name: str
    pause_s: float = 0.05
    is_alive: bool = True
    steps: bool = True
    sends: bool = True
    is_idle: bool = False
    made: int = 0
    asked: int = 0
    requests: list[Request] = field(default_factory=list)
    others: int = 0

    @property
    def address(self):
        identity = Identity(record=self.name, certificate=None, api_key="k")
        return ReplicaAddress(name=self.name, host="h", port=1, identity=identity)

    @property
    def sign(self):
        under_way = 0 if self.is_idle else len(self.requests) + self.others
        return Sign(figures=EngineFigures(under_way=under_way, steps=(float(self.made),)))


class Scene:
    """Engines and one client, in steps of the watch. Asking one that is not there takes as long as it may."""

    def __init__(self, *engines, streams=2, whole=1):
        self.engines = {engine.name: engine for engine in engines}
        self.now = 1000.0
        self.pool = ReplicaPool(clock=lambda: self.now)
        self.pool.fill(engine.address for engine in engines)
        self.silence = Silence(self.pool, questions=self, clock=lambda: self.now)
        self.delay_s = 0.0
        self.given_up = []
        for engine in engines:
            engine.requests = [Request(engine.address) for _ in range(streams)]
            engine.requests += [Request(engine.address, is_talking=False) for _ in range(whole)]

    def ask(self, replicas, answer_s):
        for replica in replicas:
            self.engines[replica.name].asked += 1
        there = {replica.name for replica in replicas if self.engines[replica.name].is_alive}
        self.now += self.delay_s + (0.01 if len(there) == len(replicas) else 2 * answer_s)
        return {name: self.engines[name].sign for name in there}

    def keep(self, replicas):
        pass

    def run(self, seconds):
        """Let time pass; what was given up in it, and after how long."""
        began, given_up = self.now, {}
        while self.now < began + seconds:
            for engine in self.engines.values():
                if not engine.is_alive or not engine.steps:
                    continue
                engine.made += 1
                for request in engine.requests if engine.sends else ():
                    if request.is_talking:
                        request.heard_at_s = self.now - self.now % engine.pause_s
            for name, why in self.silence.listen([r for e in self.engines.values() for r in e.requests]).items():
                given_up[name] = round(self.now - began, 2), why
                self.engines[name].requests = []
            self.now += LISTEN_S
        return given_up


def two(**options):
    return Scene(Engine("a"), Engine("b"), **options)


@pytest.mark.parametrize(("streams", "most_s"), [(3, 1.8), (1, 1.8), (0, 2.6)])
def test_a_frozen_engine_is_given_up_soon(streams, most_s):
    scene = two(streams=streams)
    assert not scene.run(20)
    scene.engines["a"].is_alive = False
    after_s, why = scene.run(5)["a"]
    assert after_s <= most_s
    assert "no answer on two connections" in why


@pytest.mark.parametrize(("streams", "most_s"), [(3, 1.8), (1, 1.8), (0, 2.6)])
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
    scene.silence.start_anew()
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
