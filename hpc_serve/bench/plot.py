"""Draws runs: throughput and latency by load, a curve for each service and workload. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_serve.bench.measured import PREDICTED, WORST, Measured, load_curves, load_title
from hpc_serve.errors import InvalidRequestError
from hpc_serve.plots.figure import FORMATS, STYLE, pyplot, save

_LINES = {"": "o-", PREDICTED: "--", WORST: ":"}


def check_plot(path: Path) -> None:
    """Raises InvalidRequestError where `draw_runs` could not draw: it is known before hours of measuring."""
    if path.suffix.lower() not in FORMATS:
        raise InvalidRequestError(f"{path} does not end in {', '.join(FORMATS)}: the ending says how to draw it.")
    pyplot()


def draw_runs(runs: Sequence[Measured], path: Path) -> None:
    """Write the pictures of some runs into one file."""
    plt, charts = pyplot(), load_curves(runs)
    loads = sorted({one.run.load for one in runs})
    with plt.rc_context(STYLE):
        figure, places = plt.subplots(1, len(charts), figsize=(15, 4.8), layout="constrained")
        for axes, (title, curves) in zip(places, charts):
            for curve in filter(lambda curve: curve.points, curves):
                label = f"{curve.name}, predicted" if curve.dashes == PREDICTED else curve.name
                axes.plot(*zip(*curve.points), _LINES[curve.dashes], color=f"C{curve.series}", label=label)
            axes.set(title=title, xlabel=load_title(runs), xscale="log")
            axes.set_ylim(bottom=0)
            axes.set_xticks(loads, [f"{load:g}" for load in loads])
            axes.minorticks_off()
        places[0].legend(fontsize=8.5)
        try:
            save(figure, path)
        finally:
            plt.close(figure)
