"""How right the time left is: recorded starts are played again, and starts on GPUs whose times are made up."""

from __future__ import annotations

import pytest

from hpc_serve.job.progress.reading import ReadSoFar
from hpc_serve.job.progress.start_stages import StartStages
from hpc_serve.rendezvous.start_times import PastStart
from hpc_serve.sizes import GIB, MIB
from tests.unit.job.starts import Clock, Said, gpu_start, play, recorded, tell


def from_half_way(said: list[Said]) -> list[Said]:
    return said[len(said) // 2 :]


def share_right(said: list[Said]) -> float:
    late = from_half_way(said)
    return sum(one.is_right for one in late) / len(late)


@pytest.mark.parametrize(("before", "now"), [("quiet", "again"), ("again", "quiet")])
def test_a_start_like_the_last_one_is_foretold_from_half_way_on(before, now):
    past, _ = play(recorded(before))
    _, said = play(recorded(now), past)
    assert [one for one in from_half_way(said) if not one.is_right] == []


@pytest.mark.parametrize(
    "now",
    [
        gpu_start(),
        gpu_start(weights_s=3_000),
        gpu_start(weights_s=6_000),
        gpu_start(weights_s=120),
        gpu_start(engine_s=100),
    ],
    ids=["as before", "disk 5x slower", "disk 10x slower", "from the cache", "slow imports"],
)
def test_a_start_on_gpus_is_foretold_whatever_has_changed(now):
    past, _ = play(gpu_start())
    _, said = play(now, past)
    assert share_right(said) >= 0.9


def test_a_stage_that_takes_longer_than_last_time_is_not_said_to_end_at_once():
    clock = Clock()
    past = PastStart(service="m", model="m", layout="l", ready_at=0.0, took_s={"engine": 40.0, "server": 5.0})
    stages = StartStages(past, first="engine", clock=clock)
    for clock.now, left_s in ((10.0, 35.0), (39.0, 6.0), (80.0, 25.0)):
        assert stages.time_left_s() == left_s


def test_without_a_past_nothing_is_promised_but_for_the_weights():
    clock = Clock()
    stages = StartStages(clock=clock)
    clock.now = 10
    stages.note_phrase("starting the engine")
    assert stages.record(1e9).time_left_s is None
    for clock.now, line in gpu_start():
        tell(stages, line)
        if "50% Completed" in line:
            break
    record = stages.record(1e9)
    assert (record.stage, record.time_left_s) == ("weights", None)
    assert record.weights_left_s == pytest.approx(298, rel=0.05)


def test_one_large_file_is_foretold_by_what_is_read_of_it():
    clock = Clock()
    stages = StartStages(first="weights", clock=clock)
    stages.checkpoint_bytes = 20 * GIB
    for clock.now in range(1, 51):
        stages.note_read(ReadSoFar(mapped=int(clock.now * 200 * MIB)))
    record = stages.record(1e9)
    assert record.bytes_per_s == pytest.approx(200 * MIB)
    assert record.weights_left_s == pytest.approx((20 * GIB - 50 * 200 * MIB) / (200 * MIB), rel=0.05)


def test_one_large_file_on_a_slower_disk_is_foretold_by_what_the_last_start_read():
    def load(mib_per_s: int, past=None):
        clock = Clock()
        stages = StartStages(past, first="weights", clock=clock)
        left = []
        while clock.now * mib_per_s < 10_000:
            stages.note_read(ReadSoFar(by_read=int(clock.now * mib_per_s * MIB)))
            left.append(stages.time_left_s())
            clock.now += 1
        stages.note_read(ReadSoFar(by_read=10_000 * MIB))
        stages.finish()
        return stages.past_start(service="m", model="m", layout="l", ready_at=1.0), left

    past, _ = load(1_000)
    _, left = load(50, past)
    assert left[100] == pytest.approx(100, abs=5)
    assert left[20] == pytest.approx(180, abs=10)


def test_a_disk_that_becomes_slow_under_one_large_file_is_noticed():
    clock = Clock()
    past = PastStart(
        service="m",
        model="m",
        layout="l",
        ready_at=0.0,
        took_s={"weights": 100.0},
        read_bytes=10_000 * MIB,
    )
    stages = StartStages(past, first="weights", clock=clock)
    stages.note_read(ReadSoFar())
    for clock.now in range(1, 181):
        fast, slow = min(clock.now, 50), max(0, clock.now - 50)
        stages.note_read(ReadSoFar(mapped=(100 * fast + 25 * slow) * MIB))
        if clock.now > 70:
            left, truth = stages.time_left_s(), 250 - clock.now
            assert left is not None
            assert abs(left - truth) < truth / 3
