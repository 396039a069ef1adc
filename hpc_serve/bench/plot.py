"""Draws runs: throughput and latency by load, a curve for each service and workload. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_serve.bench.report import PREDICTED, WORST, Result, load_curves, load_of, load_title
from hpc_serve.plots.figure import picture

_LINES = {"": "o-", PREDICTED: "--", WORST: ":"}


def draw_runs(results: Sequence[Result], path: Path) -> None:
    """Write the pictures of some runs into one file."""
    charts = load_curves(results)
    loads = sorted(set(map(load_of, results)))
    with picture(path, 15, 4.8) as figure:
        places = figure.subplots(1, len(charts))
        for axes, (title, curves) in zip(places, charts.items()):
            for curve in curves:
                label = f"{curve.name}, predicted" if curve.dashes == PREDICTED else curve.name
                axes.plot(*zip(*curve.points), _LINES[curve.dashes], color=f"C{curve.series}", label=label)
            axes.set(title=title, xlabel=load_title(results), xscale="log")
            axes.set_ylim(bottom=0)
            axes.set_xticks(loads, [f"{load:g}" for load in loads])
            axes.minorticks_off()
        places[0].legend(fontsize=8.5)
