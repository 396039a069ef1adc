"""How right the time left is: recorded starts are played again, and starts on GPUs whose times are made up."""

from __future__ import annotations

import pytest

from hpc_serve.job.progress import StartStages
from hpc_serve.rendezvous.start_times import PastStart
from tests.unit.job.starts import Clock, from_half_way, gpu_start, play, recorded, share_right, tell


@pytest.mark.parametrize(("before", "now"), [("quiet", "again"), ("again", "quiet")])
def test_a_start_like_the_last_one_is_foretold_from_half_way_on(before, now):
    past, _ = play(recorded(before))
    _, said = play(recorded(now), past)
    assert [one for one in from_half_way(said) if not one.is_right] == []


@pytest.mark.parametrize(
    "changes",
    [{}, {"weights_s": 3_000}, {"weights_s": 6_000}, {"weights_s": 120}, {"engine_s": 100}],
    ids=["as before", "disk 5x slower", "disk 10x slower", "from the cache", "slow imports"],
)
def test_a_start_on_gpus_is_foretold_whatever_has_changed(changes):
    past, _ = play(gpu_start())
    _, said = play(gpu_start(**changes), past)
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
