"""Draws runs: throughput and latency by load, a curve for each service and workload. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_serve.bench.measured import Measured, by_series, load_of, load_title
from hpc_serve.errors import InvalidRequestError
from hpc_serve.plots.figure import STYLE, pyplot

FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raises InvalidRequestError where `draw_runs` could not draw: it is known before hours of measuring."""
    if path.suffix.lower() not in FORMATS:
        raise InvalidRequestError(f"{path} does not end in {', '.join(FORMATS)}: the ending says how to draw it.")
    pyplot()


def draw_runs(runs: Sequence[Measured], path: Path) -> None:
    """Write the pictures of some runs into one file."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, (rates, firsts, betweens) = plt.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
        for title, series in by_series(runs).items():
            places = [load_of(one.run) for one in series]
            (line,) = rates.plot(places, [one.figures.output_rate for one in series], "o-", label=title)
            expected = [one.prediction.output_rate if one.prediction else None for one in series]
            if all(rate is not None for rate in expected):
                rates.plot(places, expected, "--", color=line.get_color(), label=f"{title}, predicted")
            for axes, name in ((firsts, "ttft"), (betweens, "tpot")):
                times = [one.figures.times[name] for one in series]
                axes.plot(places, [one.median for one in times], "o-", color=line.get_color())
                worst = [one.percentiles[99.0] for one in times]
                axes.plot(places, worst, ":", color=line.get_color())
        rates.legend(fontsize=8.5)
        _finish(rates, "Throughput", "output tokens per second", runs)
        _finish(firsts, "Time to first token: median, P99 dotted", "ms", runs)
        _finish(betweens, "Time per output token: median, P99 dotted", "ms", runs)
        try:
            figure.savefig(path)
        except OSError as error:
            raise InvalidRequestError(f"{path} cannot be written: {error.strerror}.") from error
        finally:
            plt.close(figure)


def _finish(axes: Any, title: str, unit: str, runs: Sequence[Measured]) -> None:
    axes.set_title(title)
    axes.set_xlabel(load_title(runs))
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.set_xscale("log")
    loads = sorted({load_of(one.run) for one in runs})
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.minorticks_off()
