"""The progress of a fetch without a terminal, by a clock that the test sets."""

from __future__ import annotations

from hpc_serve.cli.setup.fetch import FetchProgress
from hpc_serve.units import GIB, MIB


def lines(capsys, looks: list[tuple[float, int]], *, done: int = 0, total: int = 100) -> list[str]:
    """What is printed while a fetch has so many bytes at these times, in seconds."""
    times = [0.0]
    with FetchProgress(done, total, clock=lambda: times[0]) as progress:
        for times[0], here in looks:
            progress.show(here)
    return capsys.readouterr().err.splitlines()


def test_the_speed_is_that_of_the_last_seconds(capsys):
    fast = [(float(second), second * 100 * MIB) for second in range(1, 10)]
    slow = [(10.0 + second, (900 + second) * MIB) for second in range(20)]
    *_, last = lines(capsys, [*fast, *slow, (30.0, 1000 * MIB), (31.0, 1044 * MIB)], total=10 * GIB)
    assert last.startswith("1.0 GiB of 10.0 GiB (10 %), 13 MiB/s, about ")


def test_what_was_here_before_is_not_of_its_speed(capsys):
    (line,) = lines(capsys, [(1.0, 5 * GIB), (2.0, 5 * GIB), (3.0, 5 * GIB + GIB)], done=5 * GIB, total=10 * GIB)[-1:]
    assert line == "6.0 GiB of 10.0 GiB (60 %)"


def test_the_last_line_has_no_time_left(capsys):
    assert lines(capsys, [(1.0, MIB), (2.0, 2 * GIB)], total=2 * GIB)[-1] == "2.0 GiB of 2.0 GiB (100 %)"


def test_a_line_for_each_tenth_and_each_minute(capsys):
    done = [0, 5, 10, 11, 19, 20, 90, 100]
    shown = lines(capsys, [(float(at), here * MIB) for at, here in enumerate(done)], total=100 * MIB)
    assert [line.split("(")[1].split(" ")[0] for line in shown] == ["10", "20", "90", "100"]
    standing = [(at, MIB) for at in (1.0, 59.0, 60.0, 61.0, 119.0, 120.0)]
    assert len(lines(capsys, standing, total=100 * MIB)) == 2
