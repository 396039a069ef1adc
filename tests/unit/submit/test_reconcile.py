"""What the reconciler decides, in a small world: a clock, jobs that wait, start, serve and end, and requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous.gate_headers import EngineLoad, RequestCount
from hpc_serve.rendezvous.record import DEFAULT_MACHINE
from hpc_serve.rendezvous.wanted import Decision, Wanted
from hpc_serve.submit.services.jobs import Job, LoadHistory, WhatIs, Windows, counted, windows_of
from hpc_serve.submit.services.reconcile import after, noted, reconcile

LOOK_S = 5.0
LIMIT_S = 3600.0
WINDOWS = Windows(add_after_s=20.0, leave_after_s=60.0)


def engine_load(running: int, waiting: int = 0, *, under_way: int | None = None, count: int = 0) -> EngineLoad:
    requests = RequestCount(gate="gate", count=count, under_way=running if under_way is None else under_way)
    return EngineLoad(running=running, waiting=waiting, requests=requests)


@dataclass
class Simulated:
    """A service and its Slurm. A job waits `queue_s`, starts for `start_s`, and drains for `drain_s`."""

    wanted: Wanted
    queue_s: float = 10.0
    start_s: float = 30.0
    drain_s: float = 10.0
    limit_s: float = LIMIT_S
    now: float = 0.0
    waiting: int = 0
    jobs: dict[str, Job] = field(default_factory=dict)
    until: dict[str, float] = field(default_factory=dict)
    told: list[tuple[float, Decision]] = field(default_factory=list)
    fails: set[str] = field(default_factory=set)
    is_complete: bool = True
    most_live: int = 0
    least_ready: int | None = None
    history: LoadHistory = field(default_factory=lambda: LoadHistory(WINDOWS, 0.0, most_running=2))

    def begin(self) -> Simulated:
        """Let the first jobs be ready."""
        for _ in range(-(-self.wanted.count // self.wanted.replicas_per_job)):
            self.submit()
        return self.settled()

    def settled(self) -> Simulated:
        """Let all jobs be ready that can."""
        self.run(self.queue_s + self.start_s + LOOK_S)
        self.told.clear()
        self.most_live = 0
        self.least_ready = None
        return self

    def submit(self, predecessor: str = "", machine: str = "") -> None:
        name = str(101 + len(self.jobs))
        job = Job(job_id=name, state="pending", predecessor=predecessor, machine=machine or DEFAULT_MACHINE)
        self.jobs[name] = replace(
            job, replicas=self.wanted.replicas_per_job, limit_s=self.limit_s, waited_s=self.queue_s
        )
        self.until[name] = self.now + self.queue_s
        self.wanted = replace(self.wanted, coming=(*self.wanted.coming, name), submitting=0)

    def run(self, for_s: float) -> list[Decision]:
        """Let so much time pass, a look each five seconds; returns what was decided meanwhile."""
        before, end = len(self.told), self.now + for_s
        while self.now < end:
            self.now += LOOK_S
            self._go_on()
            self._look()
        return [one for _, one in self.told[before:]]

    def lose(self, job_id: str, why: str = "failed: the engine ended with 1") -> None:
        self.jobs[job_id] = replace(self.jobs[job_id], state="over", why_over=why)

    def states(self) -> list[str]:
        return [job.state for job in self.jobs.values() if job.is_live]

    def _go_on(self) -> None:
        for name, job in self.jobs.items():
            if job.state == "over":
                continue
            if job.ends_at is not None and self.now >= job.ends_at:
                self.jobs[name] = replace(job, state="over", why_over="stopped")
            elif job.state == "ready":
                self.jobs[name] = replace(job, is_settled=self.now >= self.until[name] + 600)
            elif self.now >= self.until[name]:
                self._next(name, job)

    def _next(self, name: str, job: Job) -> None:
        if job.state == "pending":
            self.until[name] = self.now + self.start_s
            self.jobs[name] = replace(job, state="starting", ends_at=self.now + self.limit_s)
        elif job.state == "starting" and {name, job.machine} & self.fails:
            self.lose(name)
        elif job.state == "starting":
            self.jobs[name] = replace(job, state="ready", start_s=self.start_s)
        elif job.state == "draining":
            self.jobs[name] = replace(job, state="over", why_over="stopped")

    def _look(self) -> None:
        ready = [job for job in self.jobs.values() if job.state == "ready"]
        loads, waiting = {}, self.waiting
        for job in ready:
            share = min(waiting, 2)
            waiting -= share
            loads[job.job_id] = engine_load(share)
        if ready and waiting:
            first = ready[0].job_id
            loads[first] = replace(loads[first], waiting=waiting)
        load = self.history.note(loads, self.now)
        what_is = WhatIs(jobs=tuple(self.jobs.values()), load=load, is_complete=self.is_complete)
        self.wanted = noted(self.wanted, what_is, self.now)
        found = reconcile(self.wanted, what_is, self.now, WINDOWS)
        self.wanted = after(self.wanted, found, self.now)
        done = [one for one in found if one.action != "wait"]
        if any(one.action == "count" for one in done):
            self.history.begin_anew(self.now)
        for one in done:
            self.told.append((self.now, one))
            self._do(one)
        live = len(self.states())
        self.most_live = max(self.most_live, live)
        ready_now = self.states().count("ready")
        self.least_ready = ready_now if self.least_ready is None else min(self.least_ready, ready_now)

    def _do(self, one: Decision) -> None:
        if one.action == "submit":
            for place in range(-(-one.count // self.wanted.replicas_per_job)):
                self.submit(one.jobs[place] if one.cause == "handover" and place < len(one.jobs) else "", one.machine)
        for name in one.jobs if one.action == "drain" else ():
            self.jobs[name] = replace(self.jobs[name], state="draining")
            self.until[name] = self.now + self.drain_s
        for name in one.jobs if one.action == "end" else ():
            self.jobs[name] = replace(self.jobs[name], state="over", why_over="stopped")


def service(least: int = 1, most: int | None = None, **fields) -> Simulated:
    """A service whose first jobs are ready."""
    wanted = Wanted(least=least, most=most or least, count=least, is_kept=True, notice_s=120.0, **fields)
    return Simulated(wanted).begin()


def on_machines(fails: frozenset[str] = frozenset(), **counts: int) -> Simulated:
    """A service whose replicas on several kinds of machine are ready, but for the kinds on which jobs fail."""
    wanted = Wanted(least=1, most=1, count=1, is_kept=True, keep_up=True, notice_s=120.0).with_counts(counts)
    simulated = Simulated(wanted, fails=set(fails))
    for machine, count in counts.items():
        for _ in range(count):
            simulated.submit(machine=machine)
    return simulated.settled()


def machines_of(simulated: Simulated, *states: str) -> Counter[str]:
    return Counter(job.machine for job in simulated.jobs.values() if job.state in (states or ("ready",)))


class TestMachines:
    """A service on several kinds of machine."""

    def test_what_is_lost_comes_back_on_its_own_kind(self):
        simulated = on_machines(h100=2, a100=1)
        assert simulated.run(60) == []
        simulated.lose("103")
        told = simulated.run(120)
        assert [(one.action, one.machine, one.count) for one in told] == [("submit", "a100", 1)]
        assert told[0].sentence == "submitted 1 on a100: there was no replica, of 1 that are wanted"
        assert machines_of(simulated) == {"h100": 2, "a100": 1}

    def test_two_kinds_at_once_are_submitted_one_after_the_other(self):
        simulated = on_machines(h100=2, a100=1)
        simulated.lose("101")
        simulated.lose("103")
        simulated.run(120)
        (first_at, first), (second_at, second) = simulated.told
        assert first_at < second_at
        assert {first.machine, second.machine} == {"h100", "a100"}
        assert machines_of(simulated) == {"h100": 2, "a100": 1}

    def test_a_kind_whose_jobs_fail_holds_no_other(self):
        simulated = on_machines(frozenset({"a100"}), h100=1, a100=1)
        simulated.run(300)
        problem = simulated.wanted.machines["a100"]
        assert problem.failures > 1
        assert "was added, failed: the engine ended with 1" in problem.problem
        simulated.lose("101")
        after_its_own_first_pause = simulated.run(45)
        assert [one.machine for one in after_its_own_first_pause if one.action == "submit"] == ["h100"]
        simulated.run(60)
        assert machines_of(simulated) == {"h100": 1}
        assert simulated.wanted.machines["h100"].failures == 1
        assert simulated.wanted.machines["a100"].failures > 1

    def test_each_hands_over_to_its_own_kind(self):
        simulated = on_machines(h100=1, a100=1)
        least = []
        for _ in range(int(3 * LIMIT_S / LOOK_S)):
            simulated.run(LOOK_S)
            least.append(machines_of(simulated))
        assert all(one == {"h100": 1, "a100": 1} or one.total() > 2 for one in least)
        assert {one.machine for _, one in simulated.told} == {"h100", "a100"}
        assert all(
            simulated.jobs[job.predecessor].machine == job.machine for job in simulated.jobs.values() if job.predecessor
        )

    def test_all_kinds_sleep_and_their_numbers_stay(self):
        simulated = on_machines(h100=1, a100=1)
        simulated.wanted = replace(simulated.wanted, idle_stop_s=30.0)
        simulated.run(120)
        assert (simulated.wanted.state, simulated.states()) == ("asleep", [])
        assert simulated.wanted.counts == {"h100": 1, "a100": 1}
        simulated.wanted = replace(simulated.wanted, state="awake", count=2, idle_stop_s=None)
        simulated.run(120)
        assert machines_of(simulated) == {"h100": 1, "a100": 1}

    @given(
        events=st.lists(
            st.one_of(
                st.tuples(st.just("lose"), st.integers(0, 20)),
                st.tuples(st.just("scale"), st.integers(0, 3), st.integers(0, 3)),
                st.tuples(st.just("run"), st.integers(1, 30)),
            ),
            max_size=12,
        )
    )
    @settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def test_whatever_happens_each_kind_has_its_number_in_the_end(self, events):
        simulated = on_machines(h100=1, a100=1)
        for what, *numbers in events:
            if what == "run":
                simulated.run(numbers[0] * LOOK_S)
            elif what == "scale" and any(numbers):
                simulated.wanted = simulated.wanted.with_counts({"h100": numbers[0], "a100": numbers[1]})
            elif live := [name for name, job in simulated.jobs.items() if job.is_live] if what == "lose" else []:
                simulated.lose(live[numbers[0] % len(live)])
        simulated.run(1500)
        assert machines_of(simulated) == {name: count for name, count in simulated.wanted.counts.items() if count}


def short_lived(start_s: float) -> Simulated:
    """A service of one or two jobs of two replicas each, with a time limit of four minutes."""
    wanted = Wanted(least=1, most=3, count=1, is_kept=True, keep_up=True, notice_s=30.0, replicas_per_job=2)
    return Simulated(wanted, queue_s=5.0, start_s=start_s, limit_s=240.0).begin()


def decide(*jobs: Job, now: float = 0.0, **fields) -> list[Decision]:
    """What is decided of these jobs, where one replica is wanted unless `fields` say more."""
    return reconcile(Wanted(**{"least": 1, "most": 1, "count": 1, **fields}), WhatIs(jobs=jobs), now)


def told(found: list[Decision]) -> list[tuple[str, str]]:
    return [(one.action, one.cause) for one in found]


HANDED_OVER = [("submit", "handover"), ("drain", "handover")]


class TestTimeLimit:
    def test_a_successor_takes_over_in_time(self):
        world = service(keep_up=True)
        found = world.run(5 * 3400)
        assert told(found) == HANDED_OVER * 5
        assert found[0].why == "the time limit of 101 comes sooner than a later start would be ready"
        assert found[1].why == "job 102 has taken over"
        assert (world.least_ready, world.most_live) == (1, 2)

    def test_each_of_three_is_replaced_by_one(self):
        world = service(3, keep_up=True)
        found = world.run(LIMIT_S)
        assert sum(one.count for one in found if one.action == "submit") == 3
        assert sorted(job for one in found if one.action == "drain" for job in one.jobs) == ["101", "102", "103"]
        assert (world.least_ready, world.states()) == (3, ["ready"] * 3)

    def test_a_successor_that_fails_is_followed_by_another(self):
        world = service(keep_up=True)
        world.fails = {"102", "103"}
        found = world.run(LIMIT_S + 300)
        assert told(found)[:3] == [("submit", "handover")] * 3
        at = [at for at, one in world.told if one.action == "submit"]
        assert at[1] - at[0] >= 30
        assert at[2] - at[1] >= 60
        assert world.states() == ["ready"]

    def test_without_keep_up_nothing_follows_before_the_end(self):
        assert service().run(LIMIT_S - 60) == []

    def test_a_job_that_is_handed_over_clears_the_failures(self):
        world = short_lived(start_s=20.0)
        world.fails = {"102"}
        world.run(2 * 240)
        assert (world.wanted.failures, world.wanted.problem) == (0, "")

    def test_a_job_without_a_time_limit_and_one_that_was_never_ready(self):
        ready = Job(job_id="1", state="ready", start_s=30.0)
        starting = Job(job_id="2", state="starting", ends_at=10.0)
        assert decide(ready, starting, now=9.0, least=2, most=2, count=2, keep_up=True) == []

    def test_a_successor_that_is_ready_takes_over_though_the_time_limit_was_raised(self):
        old = Job(job_id="1", state="ready", start_s=30.0, ends_at=9000.0)
        successor = Job(job_id="2", state="ready", start_s=30.0, ends_at=5000.0, predecessor="1")
        (one,) = decide(old, successor, keep_up=True)
        assert (one.action, one.cause, one.jobs) == ("drain", "handover", ("1",))

    def test_jobs_submitted_ahead_do_not_count_while_the_one_before_counts(self):
        first = Job(job_id="1", state="ready")
        jobs = (first, *(Job(job_id=str(n), state="pending", predecessor=str(n - 1)) for n in (2, 3)))
        wanted = Wanted(least=1, most=1, count=1)
        assert [job.job_id for job in counted(wanted, WhatIs(jobs=jobs), 0.0)] == ["1"]
        assert decide(*jobs) == []
        over = (replace(jobs[0], state="over"), *jobs[1:])
        assert [job.job_id for job in counted(wanted, WhatIs(jobs=over), 0.0)] == ["2"]


class TestLoad:
    def test_a_wave(self):
        world = service(1, 4)
        world.waiting = 7  # one replica runs two
        assert told(world.run(60)) == [("count", "load"), ("submit", "load")]
        assert world.told[0][1].why == "5 requests waited for 20 s"
        assert world.wanted.count == 4
        world.run(60)
        assert world.states() == ["ready"] * 4
        world.waiting = 1
        found = world.run(400)
        assert set(told(found)) == {("count", "load"), ("drain", "load")}
        assert found[0].why.startswith("the others could have carried the load for ")
        assert world.states() == ["ready"]

    @pytest.mark.parametrize("start_s", [20.0, 60.0, 90.0])
    def test_a_wave_among_handovers(self, start_s):
        """The longer a start takes, the longer there is a job that nears its limit beside one that starts for it."""
        world = short_lived(start_s=start_s)
        world.waiting = 9
        world.run(400)
        assert world.wanted.count == 3
        world.waiting = 1
        world.run(400)
        assert (world.wanted.count, world.wanted.failures) == (1, 0)
        world.least_ready = None
        world.run(400)
        assert world.least_ready in (1, 2)


class TestSleep:
    def test_without_a_request_it_sleeps_and_wake_makes_it_the_least(self):
        world = service(1, 4, idle_stop_s=300.0)
        found = world.run(320)
        assert told(found) == [("count", "idle"), ("drain", "idle")]
        assert found[1].why == "no request for 5 min"
        assert (world.wanted.state, world.wanted.count) == ("asleep", 0)
        assert world.run(60) == []
        assert world.states() == []
        world.wanted = replace(world.wanted, state="awake", count=world.wanted.least)
        assert told(world.run(60)) == [("submit", "missing")]
        assert world.states() == ["ready"]


class TestFailures:
    def test_one_that_serves_for_a_while_clears_the_failures(self):
        world = service()
        world.wanted = replace(world.wanted, failures=4, problem="x")
        world.run(700)
        assert (world.wanted.failures, world.wanted.problem) == (0, "")

    def test_while_slurm_does_not_answer_nothing_is_submitted_or_ended(self):
        world = service(2)
        world.lose("101")
        world.is_complete = False
        assert world.run(300) == []
        world.wanted = replace(world.wanted, count=0, least=0)
        assert world.run(60) == []
        wanted = replace(world.wanted, count=2, least=2)
        (one,) = reconcile(wanted, WhatIs(jobs=tuple(world.jobs.values()), is_complete=False), world.now)
        assert (one.action, one.cause) == ("wait", "unknown")


class TestPeople:
    def test_another_number(self):
        world = service(2)
        world.wanted = replace(world.wanted, least=4, most=4)
        assert told(world.run(LOOK_S)) == [("count", "person"), ("submit", "person")]
        world.run(60)
        world.wanted = replace(world.wanted, least=1, most=1)
        assert told(world.run(LOOK_S)) == [("count", "person"), ("drain", "person")]
        world.run(60)
        assert world.states() == ["ready"]

    def test_what_comes_ends_before_what_serves(self):
        jobs = (Job(job_id="1", state="ready"), Job(job_id="2", state="starting"), Job(job_id="3", state="pending"))
        assert [one.jobs for one in decide(*jobs)] == [("3", "2")]

    def test_the_own_job_leaves_last_and_the_least_loaded_first(self):
        own = Job(job_id="1", state="ready", is_own=True)
        others = (Job(job_id=str(n), state="ready", requests=n) for n in (2, 5))
        (one,) = decide(own, *others, least=2, most=2, count=2)
        assert (one.action, one.jobs) == ("drain", ("2",))

    @pytest.mark.parametrize(
        ("state", "counts", "told"),
        [
            ("stopped", [], ("person", "the service is stopped")),
            ("asleep", [1], ("idle", "the service is asleep")),  # after a wake that failed
            ("asleep", [1, 0], ("person", "bounds set")),
        ],
    )
    def test_a_job_that_arrives_later_is_ended_with_the_decision_that_no_replica_is_wanted(self, state, counts, told):
        decided = tuple(Decision(action="count", cause="person", why="bounds set", count=count) for count in counts)
        (one,) = decide(Job(job_id="2", state="pending"), count=0, state=state, decided=decided)
        assert (one.action, one.jobs, (one.cause, one.why)) == ("end", ("2",), told)

    def test_what_another_program_submits_is_waited_for(self):
        claim = {"submitting": 1, "submitting_at": 100.0}
        assert [one.action for one in decide(now=150.0, **claim)] == ["wait"]
        assert [one.action for one in decide(now=281.0, **claim)] == ["submit"]  # it has died

    def test_one_that_was_told_to_end_and_still_waits_is_told_again(self):
        told_to_end = partial(decide, least=0, most=0, count=0, ending=("1",))
        job = Job(job_id="1", state="pending")
        (one,) = told_to_end(job, now=5.0)
        assert (one.action, one.jobs) == ("end", ("1",))
        assert told_to_end(job, now=1.0) == []
        assert told_to_end(replace(job, state="starting"), now=5.0) == []


@pytest.mark.parametrize(
    ("load", "idle_s"),
    [
        (lambda at: engine_load(0, count=7), 90.0),
        (lambda at: engine_load(1, under_way=0, count=7), 90.0),  # a canary
        (lambda at: engine_load(2, under_way=0, count=7), 0.0),
        (lambda at: engine_load(0, 3, under_way=3, count=7), 0.0),
        (lambda at: engine_load(0, count=at), 0.0),  # a request between two looks
        (lambda at: None, 0.0),  # unknown is not idle
    ],
)
def test_for_how_long_there_was_no_request(load, idle_s):
    history = LoadHistory(WINDOWS, 0.0)
    for at in range(5, 100, 5):
        seen = history.note({"a": load(at)}, float(at))
    assert (seen.idle_s, seen.is_known) == (idle_s, load(5) is not None)


def test_after_a_pause_of_the_watcher_the_times_begin_anew():
    history = LoadHistory(WINDOWS, 0.0)
    free = engine_load(0)
    history.note({"a": free}, 5.0)
    assert history.note({"a": free}, 500.0).idle_s == 0.0


def test_the_windows_of_the_environment():
    assert windows_of({"HPC_SERVE_ADD_AFTER_S": "2"}) == Windows(add_after_s=2.0)
    with pytest.raises(InvalidRequestError, match="HPC_SERVE_LEAVE_AFTER_S=soon: it must be a number of seconds"):
        windows_of({"HPC_SERVE_LEAVE_AFTER_S": "soon"})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    waves=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    least=st.integers(1, 3),
    more=st.integers(0, 3),
    per_job=st.integers(1, 3),
    lost=st.integers(0, 5),
)
def test_whatever_comes_the_number_stays_within_its_bounds(waves, least, more, per_job, lost):
    world = service(least, least + more, keep_up=True, replicas_per_job=per_job)
    most = -(-(least + more) // per_job)
    for place, wave in enumerate(waves):
        world.waiting = wave
        if place == lost:
            world.lose(next(name for name, job in world.jobs.items() if job.is_live))
        world.run(400)
        here = counted(world.wanted, WhatIs(jobs=tuple(world.jobs.values())), world.now)
        assert -(-least // per_job) <= len(here) <= most
    world.waiting = 0
    world.run(LIMIT_S)
    assert world.states().count("ready") >= -(-least // per_job)
