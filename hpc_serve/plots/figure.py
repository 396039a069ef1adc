"""Draws a plan: latency against throughput, the time of a step by cause, and the memory of a GPU. Needs matplotlib.

The numbers come from hpc_serve.plan. This module decides only where to draw them.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from dataclasses import replace
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.speed.estimate import (
    EXPECTED,
    IDEAL,
    Factors,
    Roofline,
    Traffic,
    estimate_speed,
    requests_held,
)
from hpc_serve.plots.labels import INK, PAPER, Label, Point, label_points
from hpc_serve.plots.memory import draw_memory

if TYPE_CHECKING:
    from hpc_serve.plan.choice.candidates import PlanInputs
    from hpc_serve.plan.choice.planner import ServePlan

FORMATS = (".png", ".svg", ".pdf", ".html")
CONTEXTS = (1024, 4096, 16384, 65536)
MARKED = (1, 4, 16, 64, 256, 1024)
_GRID = "#e4e7eb"
_FAMILY = ("#0b7285", "#2f9e44", "#e67700", "#c92a2a")
_CAUSES = (
    ("weights_s", "weights", "#1864ab"),
    ("flops_s", "FLOP/s", "#e8590c"),
    ("cache_s", "KV cache", "#2b8a3e"),
    ("communication_s", "communication", "#862e9c"),
    ("engine_s", "engine", "#868e96"),
)


def draw(inputs: PlanInputs, plan: ServePlan, traffic: Traffic, path: str) -> None:
    """Write the three pictures of a plan into one file. The ending of its name decides about the format.

    Raises InvalidRequestError for another ending, without matplotlib, for an accelerator of unknown speed, or where the
    file cannot be written.
    """
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise InvalidRequestError(f"{path} does not end in {', '.join(FORMATS)}: the ending says how to draw it.")
    plt = pyplot()
    roofline = Roofline(
        inputs.model,
        plan.accelerator,
        replace(inputs.engine, max_num_seqs=plan.memory.max_num_seqs),
        plan.layout,
    )
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(13.5, 9.2), facecolor=PAPER)
        grid = figure.add_gridspec(
            2, 2, height_ratios=[1.25, 1], hspace=0.36, wspace=0.26, left=0.065, right=0.975, top=0.85, bottom=0.075
        )
        _pareto(figure.add_subplot(grid[0, :]), roofline, plan, traffic)
        _breakdown(figure.add_subplot(grid[1, 0]), roofline, plan, traffic)
        draw_memory(figure.add_subplot(grid[1, 1]), plan, roofline.accelerator)
        nodes = f"{plan.layout.num_nodes} x {plan.layout.gpus_per_node} {plan.accelerator.product}"
        figure.suptitle(plan.model, x=0.065, y=0.975, ha="left", fontsize=17, fontweight="bold", color=INK)
        layout = f"TP={plan.layout.tensor_parallel_size}, PP={plan.layout.pipeline_parallel_size} on {nodes}"
        scheme = inputs.model.quantization.method.replace("none", inputs.model.dtype)
        about = f"one replica: {layout}, {scheme}; answers of {traffic.output_tokens:,} tokens"
        figure.text(0.065, 0.922, about, fontsize=11.5, color="#52606d")
        _save(figure, target, plan.model)
        plt.close(figure)


def pyplot() -> Any:
    """matplotlib's, without a window. Raises InvalidRequestError where it is not installed."""
    try:
        import_module("matplotlib").use("Agg")
    except ImportError:
        raise InvalidRequestError("--plot needs matplotlib: pip install 'hpc-serve[plot]'.") from None
    return import_module("matplotlib.pyplot")


STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": INK,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": "#52606d",
    "ytick.color": "#52606d",
    "legend.frameon": False,
    "svg.fonttype": "none",
}


def _pareto(axes: Any, roofline: Roofline, plan: ServePlan, traffic: Traffic) -> None:
    """Time between tokens against tokens/s per GPU: a curve for each length of prompt, with marks for batches."""
    curves: list[list[Point]] = []
    ends: list[Label] = []
    between: list[Label] = []
    for colour, inputs in zip(_FAMILY, _contexts(plan, traffic)):
        asked = Traffic(input_tokens=inputs, output_tokens=traffic.output_tokens)
        held = _held(roofline, plan, asked)
        batches = _batches(held)
        for factors, line in ((IDEAL, (0, (4, 3))), (EXPECTED, "solid")):
            points = [_point(roofline, plan, asked, batch, factors) for batch in batches]
            curves.append(points)
            is_expected = factors is EXPECTED
            axes.plot(
                [latency for latency, _ in points],
                [rate for _, rate in points],
                linestyle=line,
                color=colour,
                linewidth=2.4 if is_expected else 1.2,
                alpha=1 if is_expected else 0.6,
                label=f"{inputs:,} tokens in" if is_expected else None,
                zorder=3,
            )
        for batch in sorted({*(mark for mark in MARKED if mark <= held), held}):
            point = _point(roofline, plan, asked, batch, EXPECTED)
            axes.plot(*point, "o", color=colour, markersize=5, markeredgecolor=PAPER, zorder=4)
            if batch == held or (batch == 1 and colour == _FAMILY[0]):
                ends.append(Label(text=f"{batch:,} at once", point=point, colour=colour))
            elif colour == _FAMILY[0]:
                between.append(Label(text=f"{batch:,}", point=point, colour=colour))
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("time between tokens of a request (ms), prompts of others included")
    axes.set_ylabel(f"output tokens per second and {roofline.accelerator.unit}")
    axes.set_title("Latency against throughput")
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis)
    axes.margins(x=0.06, y=0.1)
    least, most = axes.get_xlim()
    axes.set_xlim(least, most * (most / least) ** 0.03)
    axes.set_ylim(axes.get_ylim())
    label_points(axes, ends + between, curves)
    handles, labels = axes.get_legend_handles_labels()
    dashed = axes.plot([], [], linestyle=(0, (4, 3)), color="#52606d", linewidth=1.2)
    axes.legend(
        [*handles, *dashed],
        [*labels, "ideal roofline"],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=5,
        fontsize=9.5,
        borderaxespad=0.2,
    )


def _contexts(plan: ServePlan, traffic: Traffic) -> list[int]:
    """Lengths of prompt to draw: the one asked for, and usual ones that leave room for the answer."""
    longest = plan.max_model_len - traffic.output_tokens
    usual = [length for length in CONTEXTS if length <= longest and length != traffic.input_tokens]
    return sorted([traffic.input_tokens, *usual[: len(_FAMILY) - 1]])


def _held(roofline: Roofline, plan: ServePlan, traffic: Traffic) -> int:
    """The most requests of the traffic that run at once."""
    return max(1, int(min(requests_held(roofline, traffic, plan.memory), roofline.max_num_seqs)))


def _limit(roofline: Roofline, plan: ServePlan, traffic: Traffic) -> str:
    """Why no more requests run at once."""
    if requests_held(roofline, traffic, plan.memory) >= roofline.max_num_seqs:
        return f"--max-num-seqs {roofline.max_num_seqs:,}, not the cache"
    return "as many as the cache holds"


def _batches(held: int) -> list[int]:
    """Batches to draw, a quarter of an octave apart."""
    steps = {round(2 ** (part / 4)) for part in range(60)}
    return sorted({1, held, *(step for step in steps if 1 <= step <= held)})


def _point(roofline: Roofline, plan: ServePlan, traffic: Traffic, batch: int, factors: Factors) -> Point:
    asked = Traffic(input_tokens=traffic.input_tokens, output_tokens=traffic.output_tokens, concurrency=batch)
    estimate = estimate_speed(roofline, asked, plan.memory)
    speed = estimate.ideal if factors is IDEAL else estimate.expected
    return 1000 * speed.tpot_s, speed.output_tokens_per_s / estimate.num_gpus


def _breakdown(axes: Any, roofline: Roofline, plan: ServePlan, traffic: Traffic) -> None:
    """The time of a decode step by cause, one bar for each batch. Of weights and FLOP/s the larger counts."""
    held = _held(roofline, plan, traffic)
    batches = sorted({held, *(2**power for power in range(11) if 2**power < held / 1.3)})
    steps = [roofline.decode(batch, traffic.mean_context) for batch in batches]
    places, below = range(len(batches)), [0.0] * len(batches)
    for name, label, colour in _CAUSES:
        sizes = [
            0.0
            if (name == "weights_s" and step.flops_s > step.weights_s)
            or (name == "flops_s" and step.flops_s <= step.weights_s)
            else 1000 * getattr(step, name)
            for step in steps
        ]
        if any(sizes):
            axes.bar(places, sizes, 0.78, bottom=below, color=colour, label=label, edgecolor=PAPER, linewidth=0.6)
        below = [low + size for low, size in zip(below, sizes)]
    for place, height in zip(places, below):
        axes.annotate(f"{height:.3g}", (place, height), (0, 3), textcoords="offset points", ha="center", fontsize=8.5)
    axes.set_xticks(list(places), [f"{batch:,}" for batch in batches])
    axes.grid(visible=False, axis="x")
    axes.set_xlabel(f"requests that run at once (the last: {_limit(roofline, plan, traffic)})")
    axes.set_ylabel("ms")
    axes.set_title(f"What a decode step goes to, contexts of {traffic.mean_context:,.0f} tokens")
    axes.margins(y=0.12)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=len(_CAUSES),
        fontsize=9.5,
        columnspacing=1.2,
        handlelength=1.6,
    )


def _plain_ticks(axis: Any) -> None:
    ticker = import_module("matplotlib.ticker")
    axis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _save(figure: Any, target: Path, title: str) -> None:
    try:
        if target.suffix.lower() == ".html":
            target.write_text(_page(figure, title), encoding="utf-8")
        else:
            figure.savefig(target, dpi=140, facecolor=PAPER)
    except OSError as error:
        raise InvalidRequestError(f"cannot write {target}: {error.strerror or error}.") from None


def _page(figure: Any, title: str) -> str:
    """A page that needs no other file: it contains the drawing as SVG."""
    drawing = io.BytesIO()
    figure.savefig(drawing, format="svg", facecolor=PAPER)
    encoded = base64.b64encode(drawing.getvalue()).decode("ascii")
    lines: Iterable[str] = (
        "<!doctype html>",
        '<html lang="en"><meta charset="utf-8">',
        f"<title>{escape(title)}</title>",
        f'<img style="width:100%;max-width:1400px" alt="Plan of {escape(title)}"',
        f'src="data:image/svg+xml;base64,{encoded}">',
        "</html>",
    )
    return "\n".join(lines)
