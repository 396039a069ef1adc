"""Draws a plan: latency against throughput, what a step goes to, and the memory of a GPU. Needs matplotlib.

The numbers are those of hpc_serve.plan; nothing is computed here but where to put them.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.accelerator import GIB, AcceleratorSpec
from hpc_serve.plan.layout import Layout
from hpc_serve.plan.roofline import EXPECTED, IDEAL, Factors, Roofline, Traffic, estimate_performance, requests_held

if TYPE_CHECKING:
    from hpc_serve.plan.candidates import Question
    from hpc_serve.plan.planner import ServePlan

FORMATS = (".png", ".svg", ".pdf", ".html")
CONTEXTS = (1024, 4096, 16384, 65536)
MARKED = (1, 4, 16, 64, 256, 1024)
_INK, _GRID, _PAPER = "#1f2933", "#e4e7eb", "#ffffff"
_FAMILY = ("#0b7285", "#2f9e44", "#e67700", "#c92a2a")
_CAUSES = (
    ("weights_s", "weights", "#1864ab"),
    ("flops_s", "FLOP/s", "#e8590c"),
    ("cache_s", "KV cache", "#2b8a3e"),
    ("communication_s", "communication", "#862e9c"),
    ("engine_s", "engine", "#868e96"),
)


def draw(question: Question, plan: ServePlan, traffic: Traffic, path: str) -> None:
    """Write the three pictures of a plan into one file, whose ending says the format.

    Raises InvalidRequestError for another ending, without matplotlib, for an accelerator of unknown speed, or where the
    file cannot be written.
    """
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise InvalidRequestError(f"{path} does not end in {', '.join(FORMATS)}: the ending says how to draw it.")
    plt = _pyplot()
    roofline = Roofline(
        question.model,
        question.cluster.accelerator,
        question.engine,
        Layout(
            tensor_parallel_size=plan.tensor_parallel_size,
            pipeline_parallel_size=plan.pipeline_parallel_size,
            num_nodes=plan.num_nodes,
            gpus_per_node=plan.gpus_per_node,
        ),
    )
    with plt.rc_context(_STYLE):
        figure = plt.figure(figsize=(13.5, 9.2), facecolor=_PAPER)
        grid = figure.add_gridspec(
            2, 2, height_ratios=[1.25, 1], hspace=0.36, wspace=0.26, left=0.065, right=0.975, top=0.85, bottom=0.075
        )
        _pareto(figure.add_subplot(grid[0, :]), roofline, plan, traffic)
        _breakdown(figure.add_subplot(grid[1, 0]), roofline, plan, traffic)
        _memory(figure.add_subplot(grid[1, 1]), plan, roofline.accelerator)
        nodes = f"{plan.num_nodes} x {plan.gpus_per_node} {question.cluster.accelerator.product}"
        figure.suptitle(plan.model, x=0.065, y=0.975, ha="left", fontsize=17, fontweight="bold", color=_INK)
        layout = f"TP={plan.tensor_parallel_size}, PP={plan.pipeline_parallel_size} on {nodes}"
        scheme = question.model.quantization.method.replace("none", question.model.dtype)
        about = f"one replica: {layout}, {scheme}; answers of {traffic.output_tokens:,} tokens"
        figure.text(0.065, 0.922, about, fontsize=11.5, color="#52606d")
        _save(figure, target, plan.model)
        plt.close(figure)


def _pyplot() -> Any:
    try:
        import_module("matplotlib").use("Agg")
    except ImportError:
        raise InvalidRequestError("--plot needs matplotlib: pip install 'hpc-serve[plot]'.") from None
    return import_module("matplotlib.pyplot")


_STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": _INK,
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
    "text.color": _INK,
    "xtick.color": "#52606d",
    "ytick.color": "#52606d",
    "legend.frameon": False,
    "svg.fonttype": "none",
}


def _pareto(axes: Any, roofline: Roofline, plan: ServePlan, traffic: Traffic) -> None:
    """Time between tokens against tokens/s a GPU, a curve by length of prompt; batches are marked along it."""
    for colour, inputs in zip(_FAMILY, _contexts(plan, traffic)):
        asked = Traffic(input_tokens=inputs, output_tokens=traffic.output_tokens)
        held = max(1, int(min(requests_held(roofline, asked, plan.memory), roofline.places)))
        batches = _batches(held)
        for factors, line in ((IDEAL, (0, (4, 3))), (EXPECTED, "solid")):
            points = [_point(roofline, plan, asked, batch, factors) for batch in batches]
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
            if is_expected:
                for batch in sorted({*(mark for mark in MARKED if mark <= held), held}):
                    point = _point(roofline, plan, asked, batch, factors)
                    axes.plot(*point, "o", color=colour, markersize=5, markeredgecolor=_PAPER, zorder=4)
                    if colour == _FAMILY[0] or batch == held:
                        label = f"{batch:,} at once" if batch in (1, held) else f"{batch:,}"
                        offset = (0, -13) if batch == held else (-7, 4) if batch == 1 else (7, -11)
                        side = "right" if batch in (1, held) else "left"
                        axes.annotate(
                            label, point, offset, ha=side, textcoords="offset points", fontsize=8.5, color=colour
                        )
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("time between tokens of a request (ms), prompts of others included")
    axes.set_ylabel(f"output tokens per second and {roofline.accelerator.unit}")
    axes.set_title("Latency against throughput")
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis)
    axes.margins(x=0.06, y=0.1)
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
    longest = plan.max_model_len - traffic.output_tokens
    found = sorted({traffic.input_tokens, *CONTEXTS})
    return [length for length in found if 1 <= length <= max(longest, traffic.input_tokens)][:4]


def _batches(held: int) -> list[int]:
    """Batches to draw, a quarter of an octave apart."""
    steps = {round(2 ** (part / 4)) for part in range(60)}
    return sorted({1, held, *(step for step in steps if 1 <= step <= held)})


def _point(roofline: Roofline, plan: ServePlan, traffic: Traffic, batch: int, factors: Factors) -> tuple[float, float]:
    asked = Traffic(
        input_tokens=traffic.input_tokens, output_tokens=traffic.output_tokens, concurrency=batch
    )
    estimate = estimate_performance(roofline, asked, plan.memory)
    speed = estimate.ideal if factors is IDEAL else estimate.expected
    return 1000 * speed.tpot_s, speed.output_tokens_per_s / estimate.num_gpus


def _breakdown(axes: Any, roofline: Roofline, plan: ServePlan, traffic: Traffic) -> None:
    """What a decode step goes to, by batch, stacked; of weights and FLOP/s the larger counts."""
    held = max(1, int(min(requests_held(roofline, traffic, plan.memory), roofline.places)))
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
            axes.bar(places, sizes, 0.78, bottom=below, color=colour, label=label, edgecolor=_PAPER, linewidth=0.6)
        below = [low + size for low, size in zip(below, sizes)]
    for place, height in zip(places, below):
        axes.annotate(f"{height:.3g}", (place, height), (0, 3), textcoords="offset points", ha="center", fontsize=8.5)
    axes.set_xticks(list(places), [f"{batch:,}" for batch in batches])
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("requests that run at once (the last: as many as the cache holds)")
    axes.set_ylabel("ms")
    axes.set_title(f"What a decode step goes to, contexts of {traffic.mean_context:,.0f} tokens")
    axes.margins(y=0.12)
    axes.legend(loc="upper left", fontsize=9.5)


def _memory(axes: Any, plan: ServePlan, device: AcceleratorSpec) -> None:
    """The tightest GPU of each layout that was considered, stacked; the line is what vLLM may use."""
    others = "activations, graphs, CUDA and NCCL" if device.kind == "gpu" else "activations"
    shown = [candidate for candidate in plan.candidates if candidate.memory is not None][:5]
    names = []
    seen: set[str] = set()
    for row, candidate in enumerate(shown):
        memory = candidate.memory
        assert memory is not None
        graphs = 0 if memory.graphs_outside else memory.cuda_graph_bytes
        other = memory.activation_bytes + graphs + memory.non_torch_bytes
        parts = (
            ("weights", memory.model_loading_bytes, "#1864ab"),
            (others, other, "#e8590c"),
            ("KV cache", max(0, memory.kv_cache_bytes), "#2b8a3e"),
        )
        start = 0.0
        for label, size, colour in parts:
            width = size / GIB
            faded = 1 if candidate.verdict == "chosen" else 0.55
            first = label not in seen
            seen.add(label)
            axes.barh(
                row, width, 0.6, left=start, color=colour, alpha=faded, label=label if first else None, edgecolor=_PAPER
            )
            if width > 0.09 * memory.total_bytes / GIB:
                axes.text(start + width / 2, row, f"{width:.1f}", ha="center", va="center", color=_PAPER, fontsize=9)
            start += width
        layout = candidate.layout
        names.append(
            f"TP={layout.tensor_parallel_size} PP={layout.pipeline_parallel_size}\n{layout.num_nodes} x "
            f"{layout.gpus_per_node}, {candidate.verdict}"
        )
    limit, total = plan.memory.requested_bytes / GIB, plan.memory.total_bytes / GIB
    axes.axvline(limit, color=_INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.axvline(total, color=_INK, linewidth=1.6)
    small = {"textcoords": "offset points", "fontsize": 8.5}
    axes.annotate(f"vLLM may use {limit:.1f}", (limit, -0.62), (-4, 0), ha="right", **small)
    axes.annotate(f"{total:.1f}", (total, -0.62), (4, 0), **small)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.85)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, min(1.7 * total, max(1.1 * total, axes.get_xlim()[1])))
    axes.set_xlabel("GiB")
    axes.set_title(f"Memory of the tightest {device.unit}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=9.5)


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
            figure.savefig(target, dpi=140, facecolor=_PAPER)
    except OSError as error:
        raise InvalidRequestError(f"cannot write {target}: {error.strerror or error}.") from None


def _page(figure: Any, title: str) -> str:
    """One file that needs nothing else: the drawing inside as SVG."""
    drawing = io.BytesIO()
    figure.savefig(drawing, format="svg", facecolor=_PAPER)
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
