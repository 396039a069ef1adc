"""Draws a plan: latency against throughput, the time of a step by cause, and the memory of a GPU. Needs matplotlib.

The numbers come from hpc_serve.plan. This module decides only where to draw them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.pages.charts import axis_number
from hpc_serve.plan.speed.decode import critical_batch
from hpc_serve.plan.speed.estimate import SpeedEstimate
from hpc_serve.plan.speed.step import EXPECTED, IDEAL
from hpc_serve.plan.speed.traffic import Speed
from hpc_serve.plots.curves import Drawn, batches, drawn_of
from hpc_serve.plots.labels import INK, PAPER, Label, Point, halo, label_points
from hpc_serve.plots.memory import draw_memory

if TYPE_CHECKING:
    from hpc_serve.plan.make import PlanResult

FORMATS = (".png", ".svg", ".pdf")
MARKED = (1, 4, 16, 64, 256, 1024)
_GRID = "#e4e7eb"
_DASHES = (0, (4, 3))
_FAMILY = ("#0b7285", "#2f9e44", "#e67700", "#c92a2a")
_CAUSES = (
    ("weights_s", "weights", "#1864ab"),
    ("flops_s", "FLOP/s", "#e8590c"),
    ("cache_s", "KV cache", "#2b8a3e"),
    ("communication_s", "communication", "#862e9c"),
    ("engine_s", "engine", "#868e96"),
)


def draw(result: PlanResult, path: str) -> None:
    """Write the pictures of a plan into one file. The ending of its name decides about the format.

    Raises InvalidRequestError for another ending, without matplotlib, for an accelerator of unknown speed, or where the
    file cannot be written.
    """
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise InvalidRequestError(
            f"{path} does not end in {', '.join(FORMATS)} or .html: the ending says how to draw it."
        )
    plt = pyplot()
    plan, traffic = result.chosen, result.traffic
    drawn = drawn_of(result, plan.layout, plan.memory)
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(13.5, 9.2), facecolor=PAPER)
        grid = figure.add_gridspec(
            2, 2, height_ratios=[1.25, 1], hspace=0.36, wspace=0.26, left=0.065, right=0.975, top=0.85, bottom=0.075
        )
        if traffic.decode_only:
            _over_batch(figure.add_subplot(grid[0, 0]), drawn, "ms of a step", _step_ms, knee_at_top=False)
            _over_batch(figure.add_subplot(grid[0, 1]), drawn, _rate_label(drawn), _rate, knee_at_top=True)
        else:
            _pareto(figure.add_subplot(grid[0, :]), drawn)
        _breakdown(figure.add_subplot(grid[1, 0]), drawn)
        draw_memory(figure.add_subplot(grid[1, 1]), plan, plan.accelerator)
        nodes = f"{plan.layout.num_nodes} x {plan.layout.gpus_per_node} {plan.accelerator.product}"
        figure.suptitle(plan.model, x=0.065, y=0.975, ha="left", fontsize=17, fontweight="bold", color=INK)
        layout = f"{plan.layout.sizes(', ')} on {nodes}"
        scheme = result.model.quantization.method.replace("none", result.model.dtype)
        about = f"one replica: {layout}, {scheme}; answers of {traffic.output_tokens:,} tokens"
        figure.text(0.065, 0.922, about, fontsize=11.5, color="#52606d")
        save(figure, target)
        plt.close(figure)


def pyplot() -> Any:
    """Return matplotlib's pyplot without a window. Raises InvalidRequestError if matplotlib is not installed."""
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


def _pareto(axes: Any, drawn: Drawn) -> None:
    """Draw time between tokens against tokens/s per GPU: a curve for each length of prompt, with marks for batches."""
    curves: list[list[Point]] = []
    ends: list[Label] = []
    between: list[Label] = []
    for colour, inputs in zip(_FAMILY, drawn.contexts()):
        held = drawn.held(inputs)
        along = [drawn.at(inputs, batch) for batch in batches(held)]
        curves += _draw_curves(axes, drawn, inputs, colour, [[_point(*one) for one in kind] for kind in _kinds(along)])
        for batch in sorted({*(mark for mark in MARKED if mark <= held), held}):
            estimate = drawn.at(inputs, batch)
            point = _point(estimate, estimate.speed)
            axes.plot(*point, "o", color=colour, markersize=5, markeredgecolor=PAPER, zorder=4)
            if batch == held or (batch == 1 and colour == _FAMILY[0]):
                ends.append(Label(text=f"{batch:,} at once", point=point, colour=colour))
            elif colour == _FAMILY[0]:
                between.append(Label(text=f"{batch:,}", point=point, colour=colour))
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("time between tokens of a request (ms), prompts of others included")
    axes.set_ylabel(_rate_label(drawn))
    axes.set_title(f"Latency against throughput, {drawn.formula}{', ideal' if drawn.is_ideal else ''}")
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis)
    axes.margins(x=0.06, y=0.1)
    least, most = axes.get_xlim()
    axes.set_xlim(least, most * (most / least) ** 0.03)
    axes.set_ylim(axes.get_ylim())
    label_points(axes, ends + between, curves)
    _legend(axes, drawn)


def _over_batch(
    axes: Any, drawn: Drawn, label: str, value: Callable[[SpeedEstimate, Speed], float], *, knee_at_top: bool
) -> None:
    """Draw a figure of decoding over the batch: a curve per context, and the batch where FLOP/s begin to limit."""
    for colour, inputs in zip(_FAMILY, drawn.contexts()):
        sizes = batches(drawn.held(inputs))
        along = [drawn.at(inputs, batch) for batch in sizes]
        heights = ([value(*one) for one in kind] for kind in _kinds(along))
        _draw_curves(axes, drawn, inputs, colour, [list(zip(sizes, kind)) for kind in heights])
    axes.set(xscale="log", yscale="log")
    knee = critical_batch(drawn.roofline)
    if knee is not None:
        axes.axvline(knee, color=INK, linewidth=1, linestyle=(0, (1, 2)))
        axes.annotate(
            f"critical batch {knee:,}",
            (knee, 1 if knee_at_top else 0),
            (-4, -10 if knee_at_top else 6),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
            path_effects=halo(PAPER),
        )
    axes.set_xlabel("requests that run at once")
    axes.set_ylabel(label)
    axes.set_title("Decoding alone, ideal" if drawn.is_ideal else "Decoding alone")
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis)
    _legend(axes, drawn, columns=2, at=(1, 0) if knee_at_top else (0, 1))


def _kinds(along: Sequence[SpeedEstimate]) -> list[list[tuple[SpeedEstimate, Speed]]]:
    """Return the estimates of a curve with their ideal speeds, and with the expected ones."""
    return [[(one, one.ideal) for one in along], [(one, one.expected) for one in along]]


def _draw_curves(
    axes: Any, drawn: Drawn, inputs: int, colour: str, kinds: Sequence[list[Point]]
) -> Sequence[list[Point]]:
    """Draw the ideal curve of a context and the expected one, and return what is drawn: ideal alone where asked for."""
    shown = kinds[:1] if drawn.is_ideal else kinds
    for points in shown:
        is_main = points is shown[-1]
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            linestyle="solid" if is_main else _DASHES,
            color=colour,
            linewidth=2.4 if is_main else 1.2,
            alpha=1 if is_main else 0.6,
            label=f"{inputs:,} tokens in" if is_main else None,
            zorder=3,
        )
    return shown


def _point(estimate: SpeedEstimate, speed: Speed) -> Point:
    return _step_ms(estimate, speed), _rate(estimate, speed)


def _step_ms(_: SpeedEstimate, speed: Speed) -> float:
    return 1000 * speed.tpot_s


def _rate(estimate: SpeedEstimate, speed: Speed) -> float:
    return speed.output_tokens_per_s / estimate.num_gpus


def _rate_label(drawn: Drawn) -> str:
    return f"output tokens per second and {drawn.roofline.accelerator.unit}"


def _legend(axes: Any, drawn: Drawn, *, columns: int = 5, at: tuple[int, int] = (1, 1)) -> None:
    """Draw the names of the curves above the axes, or in a corner of them."""
    handles, labels = axes.get_legend_handles_labels()
    if not drawn.is_ideal:
        handles += axes.plot([], [], linestyle=_DASHES, color="#52606d", linewidth=1.2)
        labels.append("ideal roofline")
    places = {(1, 1): "lower right", (1, 0): "lower right", (0, 1): "upper left"}
    axes.legend(handles, labels, loc=places[at], bbox_to_anchor=at, ncols=columns, fontsize=9.5, borderaxespad=0.2)


def _breakdown(axes: Any, drawn: Drawn) -> None:
    """Draw the time of a decode step by cause, one bar for each batch. The larger of weights and FLOP/s counts."""
    held, traffic, factors = (
        drawn.held(drawn.traffic.input_tokens),
        drawn.traffic,
        IDEAL if drawn.is_ideal else EXPECTED,
    )
    sizes = sorted({held, *(2**power for power in range(11) if 2**power < held / 1.3)})
    ranks = drawn.roofline.layout.data_parallel_size
    steps = [drawn.roofline.decode(batch / ranks, traffic.mean_context, factors) for batch in sizes]
    places, below = range(len(sizes)), [0.0] * len(sizes)
    for name, label, colour in _CAUSES:
        heights = [
            0.0
            if (name == "weights_s" and step.flops_s > step.weights_s)
            or (name == "flops_s" and step.flops_s <= step.weights_s)
            else 1000 * getattr(step, name)
            for step in steps
        ]
        if any(heights):
            axes.bar(places, heights, 0.78, bottom=below, color=colour, label=label, edgecolor=PAPER, linewidth=0.6)
        below = [low + size for low, size in zip(below, heights)]
    for place, height in zip(places, below):
        axes.annotate(
            axis_number(height, 3), (place, height), (0, 3), textcoords="offset points", ha="center", fontsize=8.5
        )
    axes.set_xticks(list(places), [f"{batch:,}" for batch in sizes])
    axes.grid(visible=False, axis="x")
    axes.set_xlabel(f"requests that run at once (the last: {drawn.limit()})")
    axes.set_ylabel("ms")
    axes.set_title(f"Parts of a decode step, contexts of {traffic.mean_context:,.0f} tokens")
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
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: axis_number(value, 6)))
    axis.set_minor_formatter(ticker.NullFormatter())


def save(figure: Any, target: Path) -> None:
    """Write a figure to a file. Raises InvalidRequestError."""
    try:
        figure.savefig(target, dpi=140, facecolor=PAPER)
    except OSError as error:
        raise InvalidRequestError(f"cannot write {target}: {error.strerror or error}.") from None
