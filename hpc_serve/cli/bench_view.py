"""Runs a sweep for `bench`: how far it is on stderr, what Ctrl-C does, and the figures on stdout."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hpc_serve.bench.measured import Measured
from hpc_serve.bench.outcome import Run
from hpc_serve.bench.report import replica_rows, run_lines, sweep_rows, table
from hpc_serve.bench.sweep import Pace, Sweep, Watcher, make_runs
from hpc_serve.bench.workload import Workload
from hpc_serve.cli.console import PlainConsole
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


def print_runs(runs: Sequence[Measured]) -> None:
    """One run with all its figures; several as a table, and what must be said of each."""
    if len(runs) == 1:
        lines = list(run_lines(runs[0]))
    else:
        lines = list(table(sweep_rows(runs))) if runs else []
        for number, one in enumerate(runs, start=1):
            if len(one.run.replicas) > 1:
                lines += ["", f"Run {number}:", *table(replica_rows(one))]
            lines += [f"Run {number}: {note}" for note in one.notes]
        lines += dict.fromkeys(
            f"No prediction: {one.prediction.reason}" for one in runs if one.prediction and one.prediction.reason
        )
    click.echo(printable("\n".join(lines)))


class _Progress(Watcher):
    """The run under way, on stderr: a bar on a terminal, elsewhere a line for each run."""

    def __init__(self, sweep: Sweep) -> None:
        self._console = PlainConsole(stderr=True, soft_wrap=True)
        self._progress = Progress(
            SpinnerColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            console=self._console,
            transient=True,
            refresh_per_second=4,
            disable=not self._console.is_terminal,
        )
        self._count, self._number = sweep.count, 0
        self._task = self._progress.add_task("looking for replicas", total=None)

    def __enter__(self) -> _Progress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def preparing(self, service: str, workload: Workload) -> None:
        self._number += 1
        self._progress.reset(self._task, total=None, description=f"{service}: making requests, {workload.title}")

    def began(self, service: str, workload: Workload, count: int, pace: Pace) -> None:
        bound = "" if pace.max_concurrency is None else f", {pace.max_concurrency} at once"
        rate = "" if pace.request_rate == float("inf") else f", {pace.request_rate:g}/s"
        title = f"run {self._number} of {self._count}: {service}, {workload.title}{rate}{bound}"
        self._progress.reset(self._task, total=count, description=title)
        if not self._console.is_terminal:
            click.echo(f"{title}: {count} requests", err=True)

    def ended_one(self) -> None:
        self._progress.advance(self._task)
