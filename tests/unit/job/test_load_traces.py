"""The time left of loads that are made up: within half of the truth, or ten seconds, from half-way on.

A rate that changes once more after half of the start cannot be foretold, so none does here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.job.starts import share_right
from tests.unit.job.starts.loads import Load, play_load

LEAST_RIGHT = 0.9
RATES: dict[str, Callable[[float], float]] = {
    "constant": lambda at_s: 50.0,
    "slowing": lambda at_s: 50.0 * max(0.4, 1 - at_s / 600),
    "slow after a minute": lambda at_s: 80.0 if at_s < 60 else 25.0,
    "fast after a minute": lambda at_s: 20.0 if at_s < 60 else 80.0,
    "in bursts": lambda at_s: 250.0 if at_s % 5 < 1 else 0.0,
}
SHARDS = {
    "one file": (10_000.0,),
    "3 files": (4_000.0, 4_000.0, 2_000.0),
    "10 files": (1_000.0,) * 10,
    "40 files": (250.0,) * 40,
    "uneven files": (4_000.0, 200.0, 300.0, 200.0, 4_000.0, 800.0, 500.0),
}
COMPILES_S = (0.0, 60.0)
PASTS = {"the same disk": 1.0, "a disk 3x faster": 1 / 3, "a disk 3x slower": 3.0, "a disk 10x faster": 0.1}


@pytest.mark.parametrize("compile_s", COMPILES_S)
@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("rate", RATES)
def test_a_load_is_foretold_by_its_own_rate_whatever_the_last_one_was(rate, shards, past, compile_s):
    load = Load(shards_mib=SHARDS[shards], mib_per_s=RATES[rate], compile_s=compile_s)
    _, said, weights = play_load(load, play_load(load.slower(PASTS[past]))[0])
    assert share_right(said) >= LEAST_RIGHT
    assert share_right(weights) >= LEAST_RIGHT


@pytest.mark.parametrize("way", ["mapped", "by_read", "from_disk"])
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("rate", RATES)
def test_the_weights_of_a_first_start_are_foretold_too(rate, shards, way):
    _, _, weights = play_load(Load(shards_mib=SHARDS[shards], mib_per_s=RATES[rate], way=way))
    assert share_right(weights) >= LEAST_RIGHT


@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("shards", ["10 files", "40 files", "uneven files"])
def test_where_nobody_sees_what_is_read_files_count_by_their_bytes(shards, past):
    load = Load(shards_mib=SHARDS[shards], is_told=False)
    _, said, _ = play_load(load, play_load(load.slower(PASTS[past]))[0])
    assert share_right(said) >= LEAST_RIGHT


@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("rate", RATES)
def test_where_nobody_counts_files_what_is_read_tells(rate, past):
    load = Load(mib_per_s=RATES[rate], has_bar=False)
    _, said, _ = play_load(load, play_load(load.slower(PASTS[past]))[0])
    assert share_right(said) >= LEAST_RIGHT


@pytest.mark.parametrize("past", PASTS)
def test_what_a_rank_imports_hides_nothing_of_a_small_model(past):
    """470 MiB of weights, and 300 MiB of programs that are mapped before them within ten seconds."""
    load = Load(shards_mib=(470.0,), mib_per_s=lambda at_s: 6.0, imported_mib=300.0, imports_s=10.0)
    _, said, weights = play_load(load, play_load(load.slower(PASTS[past]))[0])
    assert share_right(said) >= LEAST_RIGHT
    assert share_right(weights) >= LEAST_RIGHT
