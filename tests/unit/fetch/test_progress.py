"""How far, how fast, how long: by a clock that the test sets."""

from __future__ import annotations

from hpc_serve.hub.fetch.progress import Meter, Tenths, TransferProgress
from hpc_serve.sizes import GIB, MIB


def test_the_speed_is_that_of_the_last_seconds():
    meter = Meter(10 * GIB)
    assert meter.look(0.0, 0).bytes_per_s is None
    for second in range(1, 31):
        progress = meter.look(float(second), second * 100 * MIB if second <= 15 else 1500 * MIB + (second - 15) * MIB)
    assert progress.bytes_per_s == MIB
    assert progress.time_left_s == (10 * GIB - 1515 * MIB) / MIB


def test_what_was_here_before_is_not_of_its_speed():
    meter = Meter(10 * GIB)
    meter.look(0.0, 5 * GIB)
    assert meter.look(2.0, 5 * GIB + 20 * MIB).bytes_per_s == 10 * MIB


def test_what_begins_anew_has_no_speed_yet():
    meter = Meter(GIB)
    meter.look(0.0, 0)
    meter.look(5.0, 500 * MIB)
    assert meter.look(6.0, 100 * MIB).bytes_per_s is None


def test_words():
    assert TransferProgress(done=GIB, total=2 * GIB).words == "1.0 GiB of 2.0 GiB (50 %)"
    assert TransferProgress(done=0, total=0).words == "0 KiB of 0 KiB (100 %)"
    assert TransferProgress(done=GIB, total=2 * GIB, bytes_per_s=1.0 * GIB).words.endswith(
        "1.0 GiB/s, a few seconds left"
    )


def test_a_line_for_each_tenth_and_each_minute():
    tenths, done = Tenths(), [0, 5, 10, 11, 19, 20, 90, 100]
    assert [at for at, it in enumerate(done) if tenths.is_one(at, TransferProgress(done=it, total=100))] == [2, 5, 6, 7]
    slow, standing = Tenths(), TransferProgress(done=1, total=100)
    assert [slow.is_one(now, standing) for now in (0.0, 59.0, 60.0, 61.0)] == [False, False, True, False]
