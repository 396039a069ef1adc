"""How right the time left is: recorded starts are played again, and starts on GPUs whose times are made up."""

from __future__ import annotations

import pytest

from hpc_serve.job.reading import ReadSoFar
from hpc_serve.job.start_estimate import expected_weights_s, rest_of_load, rest_of_stage
from hpc_serve.job.start_stages import StartStages
from hpc_serve.rendezvous.start_times import PastStage, PastStart
from hpc_serve.sizes import GIB, MIB
from tests.unit.job.starts import Clock, Said, gpu_start, play, recorded, slower, tell


def test_a_mark_that_came_at_once_last_time_and_is_late_now_makes_no_start_endless():
    """What is late is taken for ten times as slow at most."""
    late = rest_of_stage(past_s=30.0, position_s=0.0, following_s=0.3, reached_s=0.0, elapsed_s=10.0, pace=1.0)
    assert 30 < late <= 300


def from_half_way(said: list[Said]) -> list[Said]:
    return said[len(said) // 2 :]


def share_right(said: list[Said]) -> float:
    late = from_half_way(said)
    return sum(one.is_right for one in late) / len(late)


@pytest.mark.parametrize(("before", "now"), [("quiet", "again"), ("again", "quiet")])
def test_a_start_like_the_last_one_is_foretold_within_a_third_from_half_way_on(before, now):
    past, _ = play(recorded(before))
    _, said = play(recorded(now), past)
    assert [one for one in from_half_way(said) if not one.is_right] == []


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_a_start_that_is_slower_or_faster_throughout_is_foretold_too(times):
    past, _ = play(recorded("again"))
    _, said = play(slower(recorded("quiet"), times), past)
    assert [one for one in from_half_way(said) if not one.is_right] == []


@pytest.mark.parametrize("now", ["quiet", "again"])
def test_after_a_cold_start_a_warm_one_is_foretold_to_a_few_seconds(now):
    past, _ = play(recorded("cold"))
    _, said = play(recorded(now), past)
    assert all(one.left_s is not None and abs(one.left_s - one.truth_s) < 9 for one in from_half_way(said))


def test_a_cold_start_after_a_warm_one_is_never_said_to_be_over_soon_that_is_not():
    """What slows its imports slows the rest less, so too much is said; never much too little."""
    past, _ = play(recorded("quiet"))
    _, said = play(recorded("cold"), past)
    assert all(one.left_s is not None and one.left_s >= 0.6 * one.truth_s - 5 for one in from_half_way(said))


def of_imports(at_s: float) -> float:
    """What a start with an empty page cache reads from a disk, in the 60 s until its first program has imported all."""
    return 1.5 * GIB * min(1.0, at_s / 60)


def test_a_start_that_reads_its_programs_from_a_disk_is_foretold_by_one_that_did_not():
    past, _ = play(recorded("quiet"))
    _, said = play(recorded("cold"), past, from_disk=of_imports)
    assert [one for one in from_half_way(said) if not one.is_right] == []


def test_a_start_with_its_programs_in_memory_is_foretold_by_one_that_read_them_from_a_disk():
    past, _ = play(recorded("cold"), from_disk=of_imports)
    assert past.is_from_disk
    _, said = play(recorded("quiet"), past)
    assert [one for one in from_half_way(said) if not one.is_right] == []


def test_of_two_starts_that_differ_in_it_the_one_alike_is_gone_by():
    cold, _ = play(recorded("cold"), from_disk=of_imports)
    warm, _ = play(recorded("quiet"))
    for last, other in ((cold, warm), (warm, cold)):
        for now, from_disk in (("cold", of_imports), ("again", lambda at_s: 0)):
            _, said = play(recorded(now), last, other=other, from_disk=from_disk)
            late = from_half_way(said)
            assert [one for one in late if one.left_s is None or abs(one.left_s - one.truth_s) > 3] == []


@pytest.mark.parametrize(
    ("starts", "cached_part", "expected_s"),
    [
        ([(600.0, 10 * GIB)], 1.0, 0),  # a slow disk last time, and all of it in memory now
        ([(2.0, 0), (600.0, 10 * GIB)], 0.0, 602),
        ([(2.0, 0), (600.0, 10 * GIB)], 1.0, 2),
        ([(600.0, 10 * GIB), (2.0, 0)], 0.25, 452),
        ([(2.0, 0)], 0.0, 2),  # how fast the disk is was never seen
        ([(600.0, None)], 1.0, 600),
        ([(600.0, 10 * GIB)], None, 600),
        ([], 0.5, 0),
    ],
)
def test_how_long_the_weights_take_follows_from_what_the_page_cache_has_of_them(starts, cached_part, expected_s):
    assert expected_weights_s(starts, size=10 * GIB, cached_part=cached_part) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    "now",
    [
        gpu_start(),
        gpu_start(weights_s=3_000),
        gpu_start(weights_s=6_000),
        gpu_start(weights_s=120),
        gpu_start(engine_s=100),
        slower(gpu_start(), 2.0),
        slower(gpu_start(), 0.5),
    ],
    ids=["as before", "disk 5x slower", "disk 10x slower", "from the cache", "slow imports", "2x slower", "2x faster"],
)
def test_a_start_on_gpus_is_foretold_whatever_has_changed(now):
    past, _ = play(gpu_start())
    _, said = play(now, past)
    assert share_right(said) >= 0.9


def test_a_disk_that_becomes_slow_on_the_way_is_noticed():
    before = gpu_start()
    stalled = [(at_s if at_s < 360 else 360 + 4 * (at_s - 360), words) for at_s, words in before]
    past, _ = play(before)
    _, said = play(stalled, past)
    at_three_quarters = said[3 * len(said) // 4]
    assert at_three_quarters.left_s is not None
    assert at_three_quarters.left_s > 0.4 * at_three_quarters.truth_s


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


def test_what_a_rank_imports_as_it_begins_is_no_part_of_its_weights():
    """As seen: 150 MiB of libraries are mapped in the first second of loading 470 MiB, at 10 MiB/s."""

    def load(past=None):
        clock = Clock()
        stages = StartStages(past, first="weights", clock=clock)
        stages.checkpoint_bytes = 470 * MIB
        stages.note_read(ReadSoFar())
        left = []
        for clock.now in range(1, 48):
            stages.note_read(ReadSoFar(mapped=(150 + 10 * clock.now) * MIB))
            left.append((47 - clock.now, stages.record(1e9).weights_left_s))
        stages.finish()
        return stages.past_start(service="m", model="m", layout="l", ready_at=1.0), left

    past, first = load()
    for left in (first, load(past)[1]):
        assert [one for one in left[20:] if one[1] is None or abs(one[1] - one[0]) > 4] == []


def test_a_disk_that_becomes_slow_under_one_large_file_is_noticed():
    clock = Clock()
    past = PastStart(
        service="m",
        model="m",
        layout="l",
        ready_at=0.0,
        stages=(PastStage(name="weights", took_s=100.0),),
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


def test_a_file_that_takes_longer_than_those_before_counts():
    def rest(waited_s):
        return rest_of_load(
            position=0.5, following=0.6, lately=0.5, lately_s=50, waited_s=waited_s, step_s=10, past_s=None
        )

    assert rest(0) == 50
    assert rest(60) > 70
