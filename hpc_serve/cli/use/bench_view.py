"""Runs a sweep for `bench`: how far it is on stderr, what Ctrl-C does, and the figures on stdout."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence

import click
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from hpc_serve.bench.measured import Measured
from hpc_serve.bench.outcome import Pace, Run
from hpc_serve.bench.report import replica_rows, run_lines, sweep_rows, table
from hpc_serve.bench.sweep import Sweep, Watcher, make_runs
from hpc_serve.bench.workload import BenchWorkload
from hpc_serve.cli.console import PlainConsole, progress_line
from hpc_serve.errors import HpcServeError
from hpc_serve.printable import printable
from hpc_serve.rendezvous.store import ServiceStore


def measure(store: ServiceStore, sweep: Sweep) -> tuple[list[Run], HpcServeError | None]:
    """All runs of a sweep, and the error that ended it early. The first Ctrl-C ends it, and keeps what there is."""
    runs: list[Run] = []

    async def collect() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def end() -> None:
            loop.remove_signal_handler(signal.SIGINT)  # the second one ends the program
            stop.set()

        loop.add_signal_handler(signal.SIGINT, end)
        try:
            with _Progress(sweep) as progress:
                async for run in make_runs(store, sweep, stop=stop, watcher=progress):
                    runs.append(run)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        if stop.is_set() and not runs:
            raise KeyboardInterrupt

    try:
        asyncio.run(collect())
    except HpcServeError as error:
        if not runs:
            raise
        return runs, error
    return runs, None


def print_runs(runs: Sequence[Measured], *, is_full: bool) -> None:
    """Print one run with all its figures, or several as a table, and the remarks on each. If `is_full`, all figures of
    each run stand above the table.
    """
    lines: list[str] = []
    if len(runs) == 1:
        lines += run_lines(runs[0])
    elif is_full and runs:
        for number, one in enumerate(runs, start=1):
            heading = f"Run {number}: {one.run.service}, {one.run.workload}, {one.run.pace}"
            lines += [heading, *run_lines(one), ""]
        lines += table(sweep_rows(runs))
    elif runs:
        lines += [*table(sweep_rows(runs)), *_below_the_table(runs)]
    click.echo(printable("\n".join(lines)))


def _below_the_table(runs: Sequence[Measured]) -> Iterator[str]:
    for number, one in enumerate(runs, start=1):
        if len(one.run.replicas) > 1:
            yield from ("", f"Run {number}:", *table(replica_rows(one)))
        yield from (f"Run {number}: {note}" for note in one.notes)
    reasons = (one.prediction.reason for one in runs if one.prediction and one.prediction.reason)
    yield from dict.fromkeys(f"No prediction: {reason}" for reason in reasons)


class _Progress(Watcher):
    """The run under way, on stderr: a bar on a terminal, elsewhere a line for each run."""

    def __init__(self, sweep: Sweep) -> None:
        self._console = PlainConsole(stderr=True, soft_wrap=True)
        words, bar = TextColumn("{task.description}", markup=False), BarColumn(bar_width=24)
        self._progress = progress_line(self._console, TimeElapsedColumn(), words, bar, MofNCompleteColumn())
        self._count, self._number = sweep.count, 0
        self._task = self._progress.add_task("looking for replicas", total=None)

    def __enter__(self) -> _Progress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def preparing(self, service: str, workload: BenchWorkload) -> None:
        self._number += 1
        self._progress.reset(self._task, total=None, description=f"{service}: making requests, {workload.title}")

    def began(self, service: str, workload: BenchWorkload, count: int, pace: Pace) -> None:
        title = f"run {self._number} of {self._count}: {service}, {workload.title}, {pace}"
        self._progress.reset(self._task, total=count, description=title)
        if not self._console.is_terminal:
            click.echo(f"{title}: {count} requests", err=True)

    def ended_one(self) -> None:
        self._progress.advance(self._task)
