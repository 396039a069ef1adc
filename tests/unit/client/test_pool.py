"""Which replica gets which share of the requests: clients and engines played through by a clock of the test."""

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from hpc_serve.client.replicas.pool import HALF_LIFE_S, LEAD, Beginnings, ReplicaPool, Speeds, beginnings
from tests.unit.client.conftest import address

FOUR = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}
ONE_SLOW = {"a": 1.0, "b": 1.0, "c": 1.0, "slow": 10.0}
# What three engines and one of a tenth of their speed can take, in percent.
WHAT_IT_CAN = 100 / 31


@dataclass
class Engines:
    """Engines that take so many seconds for an answer of usual length, and work on `slots` of them at once."""

    takes: dict[str, float]
    slots: int = 1_000

    def __post_init__(self):
        self.free_at = {name: [0.0] * self.slots for name in self.takes}

    def finish(self, name, now, length):
        """When an answer of that length is there that is asked for now."""
        begins = max(now, heapq.heappop(self.free_at[name]))
        ends = begins + self.takes[name] * length
        heapq.heappush(self.free_at[name], ends)
        return ends


def at(count: int, **options: Any) -> ReplicaPool:
    pool = ReplicaPool(**options)
    pool.fill(address(str(number)) for number in range(count))
    return pool


class Play:
    """So many clients, each with a pool of its own."""

    def __init__(self, engines, *, clients, seed=1):
        self.engines = engines
        self.now = 0.0
        self.chance = random.Random(seed)
        self.pools = [ReplicaPool(clock=lambda: self.now, chance=self.chance.random) for _ in range(clients)]
        for pool in self.pools:
            pool.fill(map(address, engines.takes))
        self.sent: Counter[str] = Counter()
        self._coming = []
        self._order = itertools.count()

    def ask(self, pool):
        replica = pool.take()
        self.sent[replica.name] += 1
        ends = self.engines.finish(replica.name, self.now, self.chance.uniform(0.2, 1.8))
        heapq.heappush(self._coming, (ends, next(self._order), pool, replica, self.now))

    def end_one(self):
        self.now, _, pool, replica, began = heapq.heappop(self._coming)
        pool.give_back(replica, "whole", self.now - began)
        return pool

    def closed(self, *, in_flight, until):
        """Each client keeps so many requests in flight."""
        for pool in self.pools:
            for _ in range(in_flight):
                self.ask(pool)
        while self.now < until:
            self.ask(self.end_one())

    def open(self, *, rate, until):
        """Requests come by chance, so many a second, whatever has become of those before."""
        while self.now < until:
            due = self.now + self.chance.expovariate(rate)
            while self._coming and self._coming[0][0] < due:
                self.end_one()
            self.now = due
            self.ask(self.chance.choice(self.pools))

    def shares(self):
        return {name: 100 * self.sent[name] / self.sent.total() for name in self.engines.takes}


LOADS = {
    "one client, 64 in flight": (1, lambda play: play.closed(in_flight=64, until=200)),
    "64 clients, one in flight each": (64, lambda play: play.closed(in_flight=1, until=200)),
    "one client, 20 a second": (1, lambda play: play.open(rate=20, until=400)),
    "16 clients, 20 a second": (16, lambda play: play.open(rate=20, until=400)),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("seed", range(3))
def test_equal_replicas_get_equal_shares(load, seed):
    clients, run = LOADS[load]
    play = Play(Engines(FOUR), clients=clients, seed=seed)
    run(play)
    assert play.shares() == pytest.approx(dict.fromkeys(FOUR, 25.0), abs=3.0)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("seed", range(3))
def test_a_slow_replica_gets_no_more_than_it_can_take(load, seed):
    clients, run = LOADS[load]
    play = Play(Engines(ONE_SLOW), clients=clients, seed=seed)
    run(play)
    shares = play.shares()
    assert 0 < shares.pop("slow") < 2 * WHAT_IT_CAN
    assert shares == pytest.approx(dict.fromkeys(shares, sum(shares.values()) / 3), abs=3.0)


def test_a_slow_replica_helps_where_the_others_have_no_room():
    """The fast ones answer 24 a second at most; their queues make them as slow as the slow one."""
    play = Play(Engines(ONE_SLOW, slots=8), clients=1)
    play.closed(in_flight=200, until=200)
    assert play.shares()["slow"] > WHAT_IT_CAN / 2


def test_a_replica_that_was_slow_once_comes_back():
    play = Play(Engines(dict(ONE_SLOW)), clients=1)
    play.closed(in_flight=8, until=100)
    play.engines.takes["slow"] = 1.0
    for _ in range(8):
        play.end_one()
    play.closed(in_flight=8, until=play.now + 2 * HALF_LIFE_S)
    play.sent.clear()
    play.closed(in_flight=0, until=play.now + 100)
    assert play.shares() == pytest.approx(dict.fromkeys(ONE_SLOW, 25.0), abs=3.0)


def test_a_replica_that_gets_nothing_is_tried_again():
    speeds = Speeds()
    for number in range(20):
        speeds.note("a", "whole", 1.0, float(number))
        speeds.note("slow", "whole", 10.0, float(number))
    assert speeds.weights(["a", "slow"], 20.0) == {"a": 1.0, "slow": pytest.approx(0.1)}
    for number in range(20, 200):
        speeds.note("a", "whole", 1.0, float(number))
    assert speeds.weights(["a", "slow"], 200.0) == {"a": 1.0, "slow": 1.0}


def test_a_fresh_replica_is_tried_at_once():
    play = Play(Engines({**FOUR, "fresh": 1.0}), clients=1)
    (pool,) = play.pools
    pool.drop("fresh")
    play.closed(in_flight=16, until=50)
    pool.offer(address("fresh"))
    assert pool.take().name == "fresh"


@pytest.mark.parametrize(
    ("of_a", "of_b", "weight"),
    [
        pytest.param({"first": 0.1}, {"whole": 5.0}, 1.0, id="unlike requests are not compared"),
        pytest.param({"first": 0.1, "stream": 10.0}, {"first": 2.0, "stream": 10.0}, 0.05, id="one kind is enough"),
        pytest.param({"whole": 0.001}, {"whole": 0.015}, 1.0, id="milliseconds are no difference"),
    ],
)
def test_a_replica_weighs_less_if_it_is_slower(of_a, of_b, weight):
    speeds = Speeds()
    for _ in range(20):
        for name, times_s in (("a", of_a), ("b", of_b)):
            for kind, took_s in times_s.items():
                speeds.note(name, kind, took_s, 0.0)
    assert speeds.weights(["a", "b"], 0.0) == {"a": 1.0, "b": pytest.approx(weight)}


def test_tried_and_dropped_ones_are_not_offered():
    pool = at(2)
    assert pool.take({"0"}).name == "1"
    pool.drop("1")
    assert pool.take({"0"}) is None
    assert pool.take().name == "0"
    assert len(pool) == 1


def test_counts_survive_a_refill():
    pool = at(2)
    busy = pool.take()
    pool.fill([address("0"), address("1")])
    assert pool.take() != busy
    pool.fill([])
    pool.give_back(busy)
    assert pool.take() is None


def test_replicas_that_are_gone_are_forgotten():
    pool = at(2)
    for name in "01":
        pool.note_first(address(name), 1.0)
    pool.fill([address("0")])
    assert {name for of_kind in pool._speeds._means.values() for name in of_kind} == {"0"}


# Requests that begin alike


DOCUMENT = b"the same document, " * 500


def test_requests_that_begin_alike_go_to_one_replica():
    pool = at(4)
    chosen = set()
    for number in range(20):
        replica = pool.take(begins=beginnings(DOCUMENT + b"question %d" % number))
        chosen.add(replica.name)
        pool.give_back(replica)
    assert len(chosen) == 1


def test_a_conversation_that_grows_stays_where_it_began():
    pool, said = at(4), DOCUMENT[:1100]
    first = pool.take(begins=beginnings(said))
    pool.give_back(first)
    for turn in range(30):
        said += b"turn %d " % turn * 40
        replica = pool.take(begins=beginnings(said + b'"}],"model":"405b"}'))
        pool.give_back(replica)
        assert replica == first


def test_a_replica_that_is_busier_by_a_bound_is_not_preferred():
    pool = at(2, chance=lambda: 0.5)
    taken = [pool.take(begins=beginnings(DOCUMENT)).name for _ in range(40)]
    counts = sorted(taken.count(name) for name in set(taken))
    assert len(counts) == 2
    assert 2 <= counts[1] - counts[0] <= 2 * LEAD


def test_other_requests_are_spread():
    pool = at(2)
    taken = [pool.take(begins=beginnings(b"%d" % number + DOCUMENT)).name for number in range(40)]
    assert sorted(taken.count(name) for name in set(taken)) == [20, 20]


def test_a_lost_replica_is_not_preferred():
    pool = at(2)
    first = pool.take(begins=beginnings(DOCUMENT))
    pool.give_back(first)
    pool.lose(first)
    assert pool.take(begins=beginnings(DOCUMENT)) != first


def test_what_is_remembered_is_bounded():
    known = Beginnings()
    for number in range(30_000):
        known.note([number], "a")
    assert known.replica_of([1]) is None
    assert known.replica_of([1, 29_999]) == "a"
