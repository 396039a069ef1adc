"""Runs a sweep for `bench`: how far it is on stderr, what Ctrl-C does, and the figures on stdout."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

from hpc_serve.bench.report import Result, no_prediction, replica_rows, run_lines, sweep_rows, table
from hpc_serve.bench.run import Run
from hpc_serve.bench.sweep import OnProgress, Sweep, make_runs
from hpc_serve.cli.console import ChangingLine
from hpc_serve.errors import HpcServeError
from hpc_serve.printable import printable
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.units import number_of


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
            with _progress() as progress:
                async for run in make_runs(store, sweep, stop=stop, progress=progress):
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


def print_results(results: Sequence[Result], *, is_full: bool) -> None:
    """Print one run with all its figures, or several as a table, and the remarks on each. If `is_full`, all figures of
    each run stand above the table.
    """
    lines: list[str] = []
    if len(results) == 1:
        lines += run_lines(results[0])
    elif is_full:
        for number, one in enumerate(results, start=1):
            heading = f"Run {number}: {one['service']}, {one['workload']}, {one['pace']}"
            lines += [heading, *run_lines(one), ""]
        lines += table(sweep_rows(results))
    else:
        lines += [*table(sweep_rows(results)), *_below_the_table(results)]
    click.echo(printable("\n".join(lines)))


def _below_the_table(results: Sequence[Result]) -> Iterator[str]:
    for number, one in enumerate(results, start=1):
        if len(one["replicas"]) > 1:
            yield from ("", f"Run {number}:", *table(replica_rows(one)))
        yield from (f"Run {number}: {note}" for note in one["notes"])
    yield from dict.fromkeys(filter(None, map(no_prediction, results)))


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """Show the run under way on stderr: a bar on a terminal, elsewhere a line for each run."""
    with ChangingLine(TimeElapsedColumn(), BarColumn(bar_width=24), MofNCompleteColumn()) as line:
        line.change("looking for replicas")

        def tell(title: str, count: int | None, ended: int) -> None:
            if ended:
                line.progress.update(line.task, completed=ended)
                return
            line.progress.reset(line.task, total=count, description=title)
            if count is not None and not line.is_shown:
                click.echo(f"{title}: {number_of(count, 'request')}", err=True)

        yield tell
