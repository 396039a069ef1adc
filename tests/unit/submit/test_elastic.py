"""When a service gets more replicas, fewer, or none: the decider alone, looks in and steps out."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_serve.errors import InvalidRequestError
from hpc_serve.submit.services.elastic import (
    Add,
    ElasticJudge,
    Leave,
    ReplicaBounds,
    ReplicaLoad,
    ServiceLook,
    Sleep,
    Windows,
    windows_of,
)

OWN = "1-r0-0.json"
LOOK_S = 5.0
ONE_TO_FOUR = ReplicaBounds(least=1, most=4, idle_stop_s=1800.0)


def load(running: int = 0, waiting: int = 0, *, under_way: int | None = None, count: int = 0) -> ReplicaLoad:
    under_way = running + waiting if under_way is None else under_way
    return ReplicaLoad(running=running, waiting=waiting, under_way=under_way, counts={"gate": count})


def look(*loads: ReplicaLoad | None, coming: int = 0, is_complete: bool = True) -> ServiceLook:
    named = {f"{place}-r0-0.json": one for place, one in enumerate(loads, start=1)}
    return ServiceLook(loads=named, coming=coming, is_complete=is_complete)


@dataclass
class Watched:
    """A judge that sees the same for a while, and what it decided, with the second in which it did."""

    bounds: ReplicaBounds = ONE_TO_FOUR
    judge: ElasticJudge = field(default_factory=lambda: ElasticJudge(Windows(), OWN, 0.0))
    now_s: float = 0.0
    found: list = field(default_factory=list)

    def sees(self, seen: ServiceLook, for_s: float, **options) -> list:
        """What it decides in that time."""
        before = len(self.found)
        end_s = self.now_s + for_s
        while self.now_s < end_s:
            self.now_s += LOOK_S
            self.judge.note(seen, self.now_s)
            if (step := self.judge.decide(self.bounds, **options)) is not None:
                self.found.append((self.now_s, step))
        return [step for _, step in self.found[before:]]


class TestMore:
    def test_requests_must_wait_for_a_while(self):
        watched = Watched()
        assert watched.sees(look(load(8, 3)), 20) == []
        assert watched.sees(look(load(8, 3)), LOOK_S) == [Add(count=1, why="3 requests waited for 20 s")]

    def test_a_moment_without_waiting_begins_the_window_anew(self):
        watched = Watched()
        watched.sees(look(load(8, 3)), 20)
        watched.sees(look(load(8, 0)), LOOK_S)
        assert watched.sees(look(load(8, 3)), 20) == []

    def test_as_many_as_what_waits_would_fill(self):
        assert Watched().sees(look(load(8, 17)), 25)[0].count == 3
        assert Watched().sees(look(load(8, 16)), 25)[0].count == 2

    def test_the_least_that_waited_counts(self):
        watched = Watched()
        watched.sees(look(load(8, 1)), LOOK_S)
        assert watched.sees(look(load(8, 100)), 20)[0].count == 1

    def test_never_more_than_the_most(self):
        assert Watched().sees(look(load(8, 1000)), 25)[0].count == 3
        assert Watched().sees(look(*[load(8, 1000)] * 4), 1000) == []

    def test_those_that_drain_still_have_their_nodes(self):
        seen = ServiceLook(loads={OWN: load(8, 1000)}, draining=2)
        assert Watched().sees(seen, 25)[0].count == 1
        assert Watched().sees(ServiceLook(loads={OWN: load(8, 1000)}, draining=3), 1000) == []

    def test_nothing_more_while_one_comes(self):
        assert Watched().sees(look(load(8, 100), coming=1), 1000) == []

    def test_a_new_replica_has_room_for_those_that_wait(self):
        watched = Watched()
        watched.sees(look(load(8, 3)), 10)
        assert watched.sees(look(load(8, 8), load(0)), 100) == []
        assert watched.sees(look(load(8, 9), load(0)), 25)[0].count == 1

    def test_the_window_begins_anew_with_a_new_replica(self):
        watched = Watched()
        watched.sees(look(load(8, 30)), 20)
        assert watched.sees(look(load(8, 30), load(8, 5)), 20) == []

    def test_one_that_cannot_be_asked_does_not_stand_in_the_way(self):
        assert Watched().sees(look(load(8, 3), None), 25) == [Add(count=1, why="3 requests waited for 20 s")]

    def test_not_while_adding_has_failed_lately(self):
        assert Watched().sees(look(load(8, 3)), 100, may_add=False) == []

    def test_too_few_are_filled_up_after_the_same_time(self):
        watched = Watched(bounds=ReplicaBounds(least=3, most=3))
        assert watched.sees(look(load(1)), 20) == []
        assert watched.sees(look(load(1)), LOOK_S) == [Add(count=2, why="there was 1 replica, of at least 3")]

    def test_an_incomplete_look_is_no_reason_for_anything(self):
        watched = Watched(bounds=ReplicaBounds(least=3, most=3))
        assert watched.sees(look(load(8, 20), is_complete=False), 10_000) == []


class TestFewer:
    def test_one_leaves_once_the_others_could_have_carried_the_load(self):
        watched = Watched()
        watched.judge.most_running = 10
        busy = look(load(3, count=1), load(4), load(1))
        assert watched.sees(busy, 600) == []
        why = "the others could have carried the load for 10 min: 8 requests at once at most"
        assert watched.sees(busy, LOOK_S) == [Leave(name="3-r0-0.json", is_coming=False, why=why)]

    def test_the_next_one_only_a_window_later(self):
        watched = Watched()
        watched.sees(look(load(), load(), load()), 605)
        assert watched.sees(look(load(), load()), 595) == []
        assert len(watched.sees(look(load(), load()), LOOK_S)) == 1

    def test_a_peak_within_the_window_keeps_them(self):
        watched = Watched()
        watched.judge.most_running = 10
        watched.sees(look(load(), load()), 300)
        watched.sees(look(load(5), load(4)), LOOK_S)
        assert watched.sees(look(load(), load()), 595) == []
        assert watched.sees(look(load(), load()), 15) != []

    def test_what_one_can_carry_is_what_it_was_seen_to_carry(self):
        watched = Watched()
        assert watched.sees(look(load(2, count=1), load(2)), 10_000) == []

    def test_unknown_is_not_idle(self):
        watched = Watched()
        assert watched.sees(look(load(), None), 10_000) == []
        assert watched.sees(look(load(), load()), 595) == []
        assert watched.sees(look(load(), load()), 15) != []

    def test_a_gap_between_two_looks_is_unknown(self):
        watched = Watched()
        watched.sees(look(load(), load()), 595)
        watched.now_s += 300
        assert watched.sees(look(load(), load()), 300) == []

    def test_those_that_come_leave_first(self):
        (step,) = Watched().sees(look(load(), load(), coming=1), 605)
        assert step.is_coming

    def test_the_deciding_jobs_own_never_leaves(self):
        watched = Watched()
        watched.judge.most_running = 10
        (step,) = watched.sees(look(load(), load(1, count=1)), 605)
        assert step.name == "2-r0-0.json"

    def test_the_newest_of_those_with_the_same_load(self):
        (step,) = Watched().sees(look(load(), load(), load()), 605)
        assert step.name == "3-r0-0.json"

    def test_never_fewer_than_the_least(self):
        assert Watched(bounds=ReplicaBounds(least=2, most=4)).sees(look(load(), load()), 10_000) == []

    def test_more_than_the_most_leave_whatever_the_load(self):
        watched = Watched(bounds=ReplicaBounds(least=1, most=1))
        (step, *_) = watched.sees(look(load(9, 9), load(8)), LOOK_S)
        assert (step.name, step.why) == ("2-r0-0.json", "there were 2, of at most 1")


class TestSleep:
    def test_after_the_time_without_a_request(self):
        watched = Watched()
        assert watched.sees(look(load()), 1800) == []
        assert watched.sees(look(load()), LOOK_S) == [Sleep(why="no request for 30 min")]

    def test_a_request_between_two_looks_counts(self):
        watched = Watched()
        watched.sees(look(load(count=5)), 1795)
        assert watched.sees(look(load(count=6)), 1800) == []
        assert watched.sees(look(load(count=6)), 2 * LOOK_S) != []

    def test_a_long_request_counts(self):
        assert Watched().sees(look(load(1, count=1)), 10_000) == []

    def test_a_canary_does_not(self):
        assert Watched().sees(look(load(1, under_way=0)), 1805) == [Sleep(why="no request for 30 min")]

    def test_unknown_is_not_idle(self):
        assert Watched(bounds=ReplicaBounds(least=1, most=1, idle_stop_s=60)).sees(look(load(), None), 10_000) == []
        assert Watched(bounds=ReplicaBounds(least=1, most=1, idle_stop_s=60)).sees(look(None), 10_000) == []

    def test_all_replicas_are_idle_or_none(self):
        bounds = ReplicaBounds(least=2, most=2, idle_stop_s=60)
        watched = Watched(bounds=bounds)
        for count in range(100):
            assert watched.sees(look(load(), load(count=count)), LOOK_S) == []

    def test_without_an_idle_stop_never(self):
        assert Watched(bounds=ReplicaBounds(least=1, most=4)).sees(look(load()), 100_000) == []


@dataclass
class Simulated:
    """A service under load, each of whose replicas works on `slots` requests at once and starts in `start_s`."""

    slots: int
    start_s: float
    bounds: ReplicaBounds
    ready: list[int] = field(default_factory=lambda: [1])
    coming: list[tuple[float, int]] = field(default_factory=list)
    last: int = 1

    def look(self, now_s: float, requests: int) -> ServiceLook:
        self.ready += [name for at_s, name in self.coming if at_s <= now_s]
        self.coming = [(at_s, name) for at_s, name in self.coming if at_s > now_s]
        share, rest = divmod(requests, len(self.ready))
        loads = {}
        for place, name in enumerate(self.ready):
            mine = share + (place < rest)
            loads[f"{name}-r0-0.json"] = load(min(mine, self.slots), max(0, mine - self.slots), count=requests)
        return ServiceLook(loads=loads, coming=len(self.coming))

    def do(self, step, now_s: float) -> None:
        if isinstance(step, Add):
            for _ in range(step.count):
                self.last += 1
                self.coming.append((now_s + self.start_s, self.last))
        elif step.is_coming:
            self.coming.pop()
        else:
            self.ready.remove(int(step.name.partition("-")[0]))

    @property
    def count(self) -> int:
        return len(self.ready) + len(self.coming)


LEVELS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 300)), min_size=1, max_size=8)
SLOTS, START_S = st.integers(1, 16), st.floats(0, 900)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    levels=LEVELS, slots=st.integers(1, 16), start_s=st.floats(0, 900), least=st.integers(1, 3), more=st.integers(0, 4)
)
def test_whatever_the_load_the_bounds_hold(levels, slots, start_s, least, more):
    bounds = ReplicaBounds(least=least, most=least + more)
    service = Simulated(slots=slots, start_s=start_s, bounds=bounds, ready=list(range(1, least + 1)), last=least)
    judge, now_s = ElasticJudge(Windows(), OWN, 0.0), 0.0
    for requests, looks in levels:
        for _ in range(looks):
            now_s += LOOK_S
            judge.note(service.look(now_s, requests), now_s)
            step = judge.decide(bounds)
            if step is not None:
                service.do(step, now_s)
            assert least <= service.count <= bounds.most
            assert 1 in service.ready


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(requests=st.integers(0, 60), slots=SLOTS, start_s=START_S)
def test_under_a_steady_load_the_number_settles(requests, slots, start_s):
    """Once up and, where the first guess was too many, down; then it stays."""
    bounds = ReplicaBounds(least=1, most=8)
    service = Simulated(slots=slots, start_s=start_s, bounds=bounds)
    judge, now_s, steps = ElasticJudge(Windows(), OWN, 0.0), 0.0, []
    for _ in range(2000):
        now_s += LOOK_S
        judge.note(service.look(now_s, requests), now_s)
        step = judge.decide(bounds)
        if step is not None:
            service.do(step, now_s)
            steps.append(step)
    kinds = [isinstance(step, Add) for step in steps]
    assert kinds == sorted(kinds, reverse=True)  # nothing is added after one has left
    assert min(8, -(-requests // slots)) <= service.count
    assert len(steps) <= 16


def test_windows_of_the_environment():
    assert windows_of({}) == Windows(add_after_s=20.0, leave_after_s=600.0)
    assert windows_of({"HPC_SERVE_ADD_AFTER_S": "2"}).add_after_s == 2.0
    with pytest.raises(InvalidRequestError, match="HPC_SERVE_LEAVE_AFTER_S is 'soon': it must be a number of seconds"):
        windows_of({"HPC_SERVE_LEAVE_AFTER_S": "soon"})
