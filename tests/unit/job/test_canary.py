"""When an engine counts as unresponsive, and when again as ready, by a made-up clock and made-up engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from hpc_serve.job.engine.canary import LOOK_INTERVAL_S, EngineJudge, Look
from hpc_serve.vllm.metrics import EngineFigures

LIMIT_S = 5.0
UNANSWERED_LOOK_S = 2.0  # the time-out of a look
NEVER = float("inf")


@dataclass(kw_only=True)
class Engine:
    """An engine by functions of the time. `canary` says when a canary sent at a time is answered, or "refused"."""

    health: Callable[[float], int | None] = lambda now: 200
    steps: Callable[[float], float] = lambda now: 0.0
    under_way: Callable[[float], int] = lambda now: 0
    canary: Callable[[float], float | str] = lambda now: now + 0.02
    has_figures: bool = True
    canaries: list[float] = field(default_factory=list)
    tokens: int = 0

    def look(self, now: float) -> Look:
        health = self.health(now)
        if health is None or not self.has_figures:
            return Look(health=health)
        steps = (self.steps(now), float(self.tokens), None)
        return Look(health=health, figures=EngineFigures(under_way=self.under_way(now), steps=steps))


@dataclass(kw_only=True)
class Found:
    at_s: float
    complaint: str


def follow(engine: Engine, until_s: float, *, limit_s: float = LIMIT_S, stands_still: tuple[float, float] = (0, 0)):
    """What is found of an engine, as `EngineWatch` asks it; in `stands_still` the launcher itself is stopped."""
    found = [Found(at_s=0.0, complaint="")]
    judge = EngineJudge(limit_s, 0.0)
    now, answer_at_s = 0.0, NEVER

    def tell() -> None:
        if bool(judge.complaint) != bool(found[-1].complaint):
            found.append(Found(at_s=now, complaint=judge.complaint))

    while now < until_s:
        begins_s = now + judge.next_look_s
        if stands_still[0] < begins_s < stands_still[1]:
            begins_s = stands_still[1]
        if answer_at_s <= begins_s:
            now, answer_at_s = max(now, answer_at_s), NEVER
            engine.tokens += 1
            judge.note_canary_answered(now)
            tell()
        seen = engine.look(begins_s)
        now = begins_s + (UNANSWERED_LOOK_S if seen.health is None else 0.0)
        judge.note(seen, now)
        tell()
        if judge.wants_canary:
            judge.note_canary_sent(now)
            engine.canaries.append(now)
            answer = engine.canary(now)
            if answer == "refused":
                judge.note_canary_refused(now)
                tell()
            else:
                answer_at_s = float(answer)
    return found[1:]


def frozen(since_s: float, until_s: float = NEVER) -> Engine:
    """SIGSTOP of all its processes."""

    def stands(now: float) -> bool:
        return since_s <= now < until_s

    return Engine(
        health=lambda now: None if stands(now) else 200,
        canary=lambda now: until_s + 0.02 if stands(now) else now + 0.02,
    )


def hung(since_s: float, *, until_s: float = NEVER, under_way: int = 0) -> Engine:
    """No step any more; its API goes on."""

    def stands(now: float) -> bool:
        return since_s <= now < until_s

    return Engine(
        steps=lambda now: (min(now, since_s) if now < until_s else now) if under_way else 0.0,
        under_way=lambda now: under_way,
        canary=lambda now: until_s + 0.02 if stands(now) else now + 0.02,
    )


def test_an_engine_that_is_well_is_asked_for_a_token_when_it_has_nothing_else_to_show():
    idle, busy = Engine(), Engine(steps=lambda now: now, under_way=lambda now: 8)
    assert follow(idle, 600.0) == follow(busy, 600.0) == []
    gaps = [later - earlier for earlier, later in zip(idle.canaries, idle.canaries[1:])]
    assert 2.0 <= min(gaps) <= max(gaps) <= 3.1
    assert busy.canaries == []


@pytest.mark.parametrize("since_s", [100.0, 100.5, 101.0, 101.4])
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (frozen, "/health unanswered for"),
        (lambda since_s: hung(since_s, under_way=8), "a request of one token unanswered"),
    ],
    ids=["frozen", "hung under load"],
)
def test_one_that_is_frozen_or_hangs_under_load_is_found_within_seven_seconds(make, why, since_s):
    (found,) = follow(make(since_s), 200.0)
    assert since_s + 3.0 < found.at_s <= since_s + 7.0
    assert why in found.complaint


def test_an_idle_one_that_hangs_is_found_when_its_next_canary_is_late():
    (found,) = follow(hung(100.0), 200.0)
    assert found.at_s <= 100.0 + 3.1 + LIMIT_S


def test_one_that_answers_again_is_ready_after_it_has_made_a_step():
    """An API that answers again shows nothing of the engine behind it."""
    lost, back = follow(frozen(100.0, 120.0), 200.0)
    assert (bool(lost.complaint), back.complaint) == (True, "")
    assert 120.0 < back.at_s <= 125.0

    half = Engine(health=lambda now: None if 100.0 <= now < 120.0 else 200, canary=lambda now: NEVER)
    half.canary = lambda now: now + 0.02 if now < 100.0 else NEVER
    assert len(follow(half, 200.0)) == 1


def test_a_long_prompt_is_no_hang_while_the_use_of_the_cache_grows():
    """All tokens of a step are the prompt's: nothing is generated, and the canary waits behind it."""
    reading = Engine(
        steps=lambda now: now // 2.5 if 50.0 < now < 140.0 else 0.0,
        under_way=lambda now: 1,
        canary=lambda now: 140.0 if 50.0 < now < 140.0 else now + 0.02,
    )
    assert follow(reading, 200.0) == []


def test_a_full_queue_is_no_hang():
    """The canary waits behind hundreds of requests, or is refused."""
    waiting = Engine(steps=lambda now: now, under_way=lambda now: 500, canary=lambda now: now + 300.0)
    assert follow(waiting, 400.0) == []
    refusing = Engine(under_way=lambda now: 0, canary=lambda now: "refused")
    assert follow(refusing, 400.0) == []


def test_a_hung_engine_whose_full_queue_refuses_canaries_is_found_after_a_minute():
    hangs = Engine(steps=lambda now: min(now, 100.0), under_way=lambda now: 500, canary=lambda now: "refused")
    (found,) = follow(hangs, 200.0)
    assert 155.0 < found.at_s < 165.0
    assert found.complaint == "its engine has made no token for 60 s, although it has requests"


def test_an_engine_that_stood_still_and_went_on_gets_more_time():
    """A kernel that is compiled, an adapter that is loaded: the first time it looks like a hang."""

    def stalls(now: float) -> float:
        return 100.0 if 100.0 < now < 108.0 else 200.0 if 200.0 < now < 208.0 else now

    engine = Engine(
        steps=stalls,
        under_way=lambda now: 4,
        canary=lambda now: 108.0 if 100.0 < now < 108.0 else 208.0 if 200.0 < now < 208.0 else now + 0.02,
    )
    lost, back = follow(engine, 300.0)
    assert 100.0 < lost.at_s < back.at_s < 110.0


def test_an_engine_without_figures_is_given_a_minute():
    slow = Engine(has_figures=False, canary=lambda now: now + 40.0)
    assert follow(slow, 300.0) == []
    hangs = Engine(has_figures=False, canary=lambda now: now + 0.02 if now < 100.0 else NEVER)
    (found,) = follow(hangs, 300.0)
    assert 160.0 <= found.at_s <= 166.0


def test_health_that_answers_with_an_error_counts_at_the_second_look():
    """As vLLM's does between its engine's death and its own end."""
    once = Engine(health=lambda now: 503 if 100.0 <= now < 100.0 + LOOK_INTERVAL_S else 200)
    assert follow(once, 200.0) == []
    (found,) = follow(Engine(health=lambda now: 503 if now >= 100.0 else 200), 200.0)
    assert found.complaint == "its engine's /health answers 503"
    assert found.at_s <= 100.0 + 2 * LOOK_INTERVAL_S


def test_a_job_that_was_suspended_is_not_blamed_for_the_time():
    """Launcher and engine stand still together; at the first look the engine is not awake yet."""
    engine = Engine(
        health=lambda now: None if 100.0 <= now <= 400.0 else 200,
        canary=lambda now: 400.5 if 97.0 <= now <= 400.0 else now + 0.02,
    )
    assert follow(engine, 500.0, stands_still=(100.0, 400.0)) == []


def test_the_limit_can_be_set():
    (found,) = follow(hung(100.0, under_way=8), 200.0, limit_s=30.0)
    assert 130.0 <= found.at_s <= 133.0
    (found,) = follow(frozen(100.0), 200.0, limit_s=30.0)
    assert 108.0 <= found.at_s <= 113.0


def test_an_hour_of_suspension_is_no_hour_of_unresponsiveness():
    judge = EngineJudge(LIMIT_S, 0.0)
    for second in range(1, 12):
        judge.note(Look(health=None), float(second))
    assert judge.complaint_s == 6.0
    judge.note(Look(health=None), 4000.0)
    assert judge.complaint
    assert judge.complaint_s == 0.0
