"""Whether an engine works, by made-up looks of a made-up clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from hpc_serve.gate.engine_facts import EngineJudge, EngineLook, Limits, Process, read_processes, step_s

CORE = "VLLM::EngineCor"
RANK = "VLLM::Worker_TP"


@pytest.mark.parametrize(
    ("seen", "given", "expected"),
    [
        (EngineLook(due=1, unread_tokens=100), {}, 5.0),  # the least
        (EngineLook(due=9, unread_tokens=20_000), {}, 20_000 / 256),
        (EngineLook(due=9, unread_tokens=20_000, step_tokens=2_560), {}, 10.0),  # a step reads no more
        (EngineLook(due=9, unread_tokens=20_000), {"tokens_per_s": 10_000.0}, 5.0),
        (EngineLook(due=9, unread_tokens=20_000), {"learned_s": 90.0}, 90.0),
        (EngineLook(due=9, unread_tokens=1_000_000), {}, 300.0),  # the bound
        (EngineLook(due=9), {"compiles": True}, 300.0),
    ],
)
def test_how_long_a_step_may_take(seen, given, expected):
    usual = {"tokens_per_s": 256.0, "learned_s": 0.0, "compiles": False}
    assert step_s(seen, Limits(), **{**usual, **given}) == expected


class Scene:
    """An engine of a core and a rank, looked at every half second."""

    def __init__(self) -> None:
        self.judge = EngineJudge(Limits())
        self.now_s, self.steps = 1_000.0, 0
        self.due, self.unread, self.here = 1, 10, True
        self.rates: dict[str, float] = {}
        self.processes: dict[int, list[Any]] = {7: [CORE, "S", 0.0], 8: [RANK, "S", 0.0]}
        self.burns = True
        self.reads = 0

    def read(self) -> dict[int, Process]:
        self.reads += 1
        return {pid: Process(name=name, state=state, cpu_s=cpu) for pid, (name, state, cpu) in self.processes.items()}

    def go(self, seconds: float, *, steps: bool = False) -> str:
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            self.steps += steps
            self.processes.get(8, [0, 0, 0.0])[2] += 0.5 * self.burns
            seen = EngineLook(
                due=self.due,
                unread_tokens=self.unread,
                counters=(float(self.steps),),
                rates=self.rates,
                ranks_burn_cpu_here=self.here,
            )
            self.judge.look(seen, self.read, self.now_s)
        return self.judge.fault


def test_an_engine_that_makes_steps_or_has_nothing_due_works_and_nobody_reads_its_processes():
    scene = Scene()
    assert scene.go(100, steps=True) == ""
    scene.due = 0
    scene.burns = False
    assert scene.go(100) == ""
    assert scene.reads == 0


def test_a_stopped_core_is_seen_within_two_seconds_not_at_once_and_works_again_with_its_next_step():
    scene = Scene()
    scene.go(10, steps=True)
    scene.processes[7][1] = "T"
    assert scene.go(0.5) == ""  # as by a debugger
    scene.processes[7][1] = "S"
    assert scene.go(2) == ""
    scene.processes[7][1] = "T"
    assert "is stopped" in scene.go(1.5)
    scene.processes[7][1] = "S"
    assert "is stopped" in scene.go(5)
    assert scene.go(0.5, steps=True) == ""


def test_an_engine_that_was_slow_once_is_given_more_time():
    scene = Scene()
    assert scene.go(7)
    scene.go(1, steps=True)
    assert scene.go(15) == ""
    assert "justify 1" in scene.go(10) or "justify 2" in scene.judge.fault


def test_an_engine_whose_steps_sleep_is_not_judged_by_its_use_of_cpu_again():
    scene = Scene()
    scene.burns = False
    assert "use no CPU" in scene.go(3)
    scene.go(0.5, steps=True)
    assert scene.go(4.5) == ""


LONG = {"unread": 256 * 25}
SLEEPS = {"burns": False}
IDLE_COMPILER = {7: [CORE, "S", 0.0], 8: [RANK, "S", 0.0], 50: ["python3", "S", 9.0]}
CASES: dict[str, tuple[dict[str, Any], float, str]] = {
    "the least time": ({}, 5, ""),
    "more than the least time": ({}, 6, "for 5 s"),
    "a greater least time": ({"judge": EngineJudge(Limits(least_s=8.0))}, 8, ""),
    "a long prompt": (LONG, 20, ""),
    "more than the prompt justifies": (LONG, 30, "justify 25 s"),
    "the slowest prompt that was seen": ({**LONG, "rates": {"a": 2_000.0, "b": 1_000.0}}, 8, "justify 6 s"),
    "a slower one than usual": ({**LONG, "rates": {"slow": 100.0}}, 60, ""),
    "no use of CPU": (SLEEPS, 3, "use no CPU"),
    "ranks elsewhere": ({**SLEEPS, "here": False}, 4.5, ""),
    "ranks elsewhere for long": ({**SLEEPS, "here": False}, 6.5, "justify 5 s"),
    "a process that waits for a core": ({**SLEEPS, "processes": {7: [CORE, "S", 0.0], 8: [RANK, "R", 0.0]}}, 4.5, ""),
    "a process that waits for a disk": ({**SLEEPS, "processes": {7: [CORE, "S", 0.0], 8: [RANK, "D", 0.0]}}, 4.5, ""),
    "a compiler's idle worker": ({"processes": IDLE_COMPILER}, 7, "justify 5 s"),
}


@pytest.mark.parametrize("case", CASES)
def test_how_long_an_engine_makes_no_step_until_it_counts_as_hung(case):
    changes, seconds, words = CASES[case]
    scene = Scene()
    vars(scene).update(changes)
    fault = scene.go(seconds)
    assert words in fault
    assert bool(fault) == bool(words)


def test_a_compiler_that_begins_or_works_gives_the_step_all_the_time_that_there_is():
    scene = Scene()
    scene.go(2)
    scene.processes[99] = ["ptxas", "R", 0.0]
    scene.go(1)
    del scene.processes[99]
    assert scene.go(100) == ""


@pytest.mark.parametrize("how", ["gone", "Z"])
def test_a_rank_that_has_ended(how):
    scene = Scene()
    scene.go(2)
    if how == "gone":
        del scene.processes[8]
    else:
        scene.processes[8][1] = "Z"
    assert "Worker_TP has ended" in scene.go(0.5)


def test_after_a_suspension_all_times_begin_anew():
    scene = Scene()
    scene.go(2)
    scene.now_s += 3_600
    assert scene.go(4.5) == ""


def test_a_fault_stays_when_its_requests_leave_until_there_is_a_step():
    scene = Scene()
    assert scene.go(7)
    scene.due = 0
    assert scene.go(7)
    assert scene.go(0.5, steps=True) == ""


def test_counters_that_nobody_can_read_prove_nothing():
    judge = EngineJudge(Limits())
    for look in range(100):
        judge.look(EngineLook(due=5), dict, 10.0 + look)
    assert judge.fault == ""


def test_real_processes_are_found_below_this_one_with_their_states():
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    pids = [parent.pid]
    try:
        pids.append(int(parent.stdout.readline()))
        assert set(pids) <= read_processes().keys()
        os.kill(parent.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while read_processes()[parent.pid].state != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert read_processes()[parent.pid].state == "T"
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
