"""The progress of `fetch` on stderr: on a terminal one line that changes, elsewhere lines that stay.

rich measures the speed over the last ten seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import click
from rich.progress import Task

from hpc_serve.cli.console import ChangingLine
from hpc_serve.durations import about
from hpc_serve.sizes import readable_size

_RATE_OVER_S = 10.0
_LINE_EVERY_S = 60.0


class FetchProgress(ChangingLine):
    """`done` of `total` bytes are here at the beginning."""

    def __init__(self, done: int, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.progress.get_time, self.progress.speed_estimate_period = clock, _RATE_OVER_S
        self.progress.reset(self.task, total=total, completed=done)
        self._clock, self._tenth, self._line_at_s = clock, 0, clock()

    def show(self, done: int) -> None:
        """Show that `done` bytes are here. Without a terminal, print a line at each tenth and once a minute."""
        self.progress.update(self.task, completed=done)
        task = self.progress.tasks[self.task]
        self.change(words(task))
        tenth, now_s = int(task.percentage // 10), self._clock()
        if not self.is_shown and (tenth > self._tenth or now_s - self._line_at_s >= _LINE_EVERY_S):
            self._tenth, self._line_at_s = max(tenth, self._tenth), now_s
            click.echo(words(task), err=True)


def words(task: Task) -> str:
    """Return how far a fetch is: `3.0 GiB of 15.0 GiB (20 %), 200 MiB/s, about 60 s left`."""
    done, total = int(task.completed), int(task.total or 0)
    text = f"{readable_size(done)} of {readable_size(total)} ({100 * done // total if total else 100} %)"
    if not task.speed or task.time_remaining is None or done >= total:
        return text
    return f"{text}, {readable_size(round(task.speed))}/s, {about(task.time_remaining)} left"
