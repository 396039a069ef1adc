"""Draws a plan: latency against throughput, the time of a step by cause, and the memory of a GPU. Needs matplotlib.

The numbers come from hpc_serve.plan. This module decides only where to draw them. `picture` is for the pictures of
others too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.memory.estimate import MemoryEstimate
from hpc_serve.plan.speed.estimate import ReplicaSpeeds, SpeedEstimate, requests_held
from hpc_serve.plan.speed.step import EXPECTED, IDEAL
from hpc_serve.plan.speed.throughput import Speed, critical_batch
from hpc_serve.plots.curves import curve, drawn_speeds, prompt_lengths, with_prompts
from hpc_serve.units import GIB

if TYPE_CHECKING:
    from hpc_serve.plan.choice.candidates import Candidate
    from hpc_serve.plan.choice.planner import ServePlan
    from hpc_serve.plan.make import PlanResult

_FORMATS = (".png", ".svg", ".pdf")
_PROMPTS = (1024, 4096, 16384, 65536)
_MARKED = (1, 4, 16, 64, 256, 1024)
_LAYOUTS = 5
_INK, _PAPER = "#1f2933", "#ffffff"
_FAMILY = ("#0b7285", "#2f9e44", "#e67700", "#c92a2a")
_BLUE, _ORANGE, _GREEN = "#1864ab", "#e8590c", "#2b8a3e"
_CAUSES = {
    "weights": _BLUE,
    "FLOP/s": _ORANGE,
    "KV cache": _GREEN,
    "communication": "#862e9c",
    "engine": "#868e96",
    "bubbles": "#5c940d",
}
_STYLE = Path(__file__).parent / "figure.mplstyle"

Value = Callable[[SpeedEstimate, Speed], float]


def check_picture(path: Path, *, or_else: str = "") -> None:
    """Raises InvalidRequestError where no picture of this name could be drawn: another ending, or no matplotlib."""
    if path.suffix.lower() not in _FORMATS:
        endings = f"{', '.join(_FORMATS)}{or_else}"
        raise InvalidRequestError(f"{path} does not end in {endings}: the ending says how to draw it.")
    try:
        import_module("matplotlib")
    except ImportError:
        raise InvalidRequestError("--plot needs matplotlib: pip install 'hpc-serve[plot]'.") from None


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Any]:
    """Yield an empty figure of so many inches, and write it in the end. Raises InvalidRequestError."""
    check_picture(path)
    with import_module("matplotlib").rc_context(fname=_STYLE):
        figure = import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
        yield figure
        try:
            figure.savefig(path)
        except OSError as error:
            raise InvalidRequestError(f"cannot write {path}: {error.strerror or error}.") from None


def draw(result: PlanResult, path: str) -> None:
    """Write the pictures of a plan into one file. The ending of its name decides about the format.

    Raises InvalidRequestError for another ending, without matplotlib, for an accelerator of unknown speed, or where the
    file cannot be written.
    """
    check_picture(Path(path), or_else=" or .html")
    plan, traffic = result.chosen, result.traffic
    drawn = drawn_speeds(result)
    lengths = prompt_lengths(plan.max_model_len, traffic, _PROMPTS, len(_PROMPTS))
    by_prompt = [with_prompts(drawn, length) for length in lengths]
    scheme = result.model.quantization.method.replace("none", result.model.dtype)
    about = (
        f"one replica: {plan.layout.sizes(', ')} on {plan.layout.num_nodes} x {plan.layout.gpus_per_node} "
        f"{plan.accelerator.product}, {scheme}; answers of {traffic.output_tokens:,} tokens"
    )
    with picture(Path(path), 13.5, 9.6) as figure:
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15, hspace=0.04)
        figure.suptitle(f"{plan.model}\n{about}", x=0.015, ha="left", fontsize=13)
        grid = figure.add_gridspec(2, 2, height_ratios=[1.2, 1])
        rate = f"output tokens per second and {drawn.roofline.accelerator.unit}"
        if traffic.decode_only:
            _over_batch(figure.add_subplot(grid[0, 0]), by_prompt, "ms of a step", _step_ms)
            _over_batch(figure.add_subplot(grid[0, 1]), by_prompt, rate, _rate)
        else:
            _rate_by_time(figure.add_subplot(grid[0, :]), by_prompt, rate)
        _step_by_cause(figure.add_subplot(grid[1, 0]), drawn)
        _memory(figure.add_subplot(grid[1, 1]), plan)


def _rate_by_time(axes: Any, by_prompt: Sequence[ReplicaSpeeds], label: str) -> None:
    """Draw tokens/s per GPU over the time between tokens, with marks for some batches, named on the first curve."""
    _curves(axes, by_prompt, _step_ms, _rate)
    for colour, speeds in zip(_FAMILY, by_prompt):
        held = speeds.held()
        for batch in sorted({*(mark for mark in _MARKED if mark <= held), held}):
            estimate = speeds.at(batch)
            point = _step_ms(estimate, estimate.speed), _rate(estimate, estimate.speed)
            axes.plot(*point, "o", color=colour, markersize=5, markeredgecolor=_PAPER, zorder=4)
            if colour == _FAMILY[0]:
                axes.annotate(
                    f"{batch:,}", point, (-5, 5), textcoords="offset points", ha="right", color=colour, fontsize=8.5
                )
    arrivals = "steady arrivals" if by_prompt[0].traffic.arrivals == "steady" else "all requests at once"
    axes.set_xlabel("time between tokens of a request (ms), prompts of others included; marks: requests at once")
    axes.set_ylabel(label)
    axes.set_title(f"Latency against throughput, {arrivals}{', ideal' if by_prompt[0].is_ideal else ''}")
    _legend_below(axes)


def _over_batch(axes: Any, by_prompt: Sequence[ReplicaSpeeds], label: str, value: Value) -> None:
    """Draw a figure of decoding over the batch, and the batch where FLOP/s begin to limit."""
    _curves(axes, by_prompt, lambda estimate, _: estimate.traffic.concurrency, value)
    if (knee := critical_batch(by_prompt[0].roofline)) is not None:
        axes.axvline(knee, color=_INK, linewidth=1, linestyle="dotted", label=f"critical batch {knee:,}")
    title = "Decoding alone, ideal" if by_prompt[0].is_ideal else "Decoding alone"
    axes.set(xlabel="requests that run at once", ylabel=label, title=title)
    _legend_below(axes, columns=2)


def _curves(axes: Any, by_prompt: Sequence[ReplicaSpeeds], across: Value, up: Value) -> None:
    """Draw the curves of each length of prompt: an ideal one, dashed, and the one that is asked for."""
    ideal = {"linestyle": "dashed", "linewidth": 1.2, "alpha": 0.6}
    for colour, speeds in zip(_FAMILY, by_prompt):
        along = curve(speeds)
        label = f"{speeds.traffic.input_tokens:,} tokens in, up to {speeds.held():,} at once"
        for kind, style in (("ideal", ideal), ("speed", {"linewidth": 2.4, "label": label})):
            points = [(across(one, getattr(one, kind)), up(one, getattr(one, kind))) for one in along]
            axes.plot(*zip(*points), color=colour, zorder=3, **style)
    if not by_prompt[0].is_ideal:
        axes.plot([], [], color="#52606d", label="ideal roofline", **ideal)
    ticker = import_module("matplotlib.ticker")
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5)))
        axis.set_major_formatter(ticker.StrMethodFormatter("{x:,.10g}"))
        axis.set_minor_formatter(ticker.NullFormatter())


def _step_ms(_: SpeedEstimate, speed: Speed) -> float:
    return 1000 * speed.tpot_s


def _rate(estimate: SpeedEstimate, speed: Speed) -> float:
    return speed.output_tokens_per_s / estimate.num_gpus


def _step_by_cause(axes: Any, drawn: ReplicaSpeeds) -> None:
    """Draw the time of a decode step by cause, one bar for each batch."""
    roofline, held, context = drawn.roofline, drawn.held(), drawn.traffic.mean_context
    sizes = sorted({held, *(2**power for power in range(11) if 2**power < held / 1.3)})
    ranks, factors = roofline.layout.data_parallel_size, IDEAL if drawn.is_ideal else EXPECTED
    found = [roofline.decode(batch / ranks, context, factors).causes for batch in sizes]
    steps = [[1000 * seconds for seconds in causes.values()] for causes in found]
    bars = _stacked(axes.bar, [f"{size:,}" for size in sizes], "bottom", steps, _CAUSES)
    axes.bar_label(bars[-1], [f"{sum(step):.3g}" for step in steps], padding=3, fontsize=8.5)
    axes.grid(visible=False, axis="x")
    is_full = requests_held(roofline, drawn.traffic, drawn.memory) < roofline.max_num_seqs
    limit = "as many as the cache holds" if is_full else f"--max-num-seqs {roofline.max_num_seqs:,}, not the cache"
    axes.set_xlabel(f"requests that run at once (the last: {limit})")
    axes.set_ylabel("ms")
    axes.set_title(f"Parts of a decode step, contexts of {context:,.0f} tokens")
    axes.margins(y=0.12)
    _legend_below(axes)


def _memory(axes: Any, plan: ServePlan) -> None:
    """Draw what the memory of the tightest GPU holds, of the chosen layout and of those next to it in the plan."""
    device = plan.accelerator
    others = "activations, graphs, runtime" if device.kind == "gpu" else "activations"
    limit, total = plan.memory.requested_bytes / GIB, plan.memory.total_bytes / GIB
    shown = _neighbours(plan)
    rows = [_parts(memory) for _, memory in shown]
    edge = min(1.7 * total, max(1.1 * total, *(1.05 * sum(row) for row in rows)))
    colours = {"weights": _BLUE, others: _ORANGE, "KV cache": _GREEN}
    for bars in _stacked(axes.barh, range(len(shown)), "left", rows, colours):
        words = [f"{width:.1f}" if width > 0.09 * total else "" for width in bars.datavalues]
        for text in axes.bar_label(bars, words, label_type="center", color=_PAPER, fontsize=9):
            text.set_clip_on(True)
    for row, parts in enumerate(rows):
        if sum(parts) > edge:
            beyond = f"{sum(parts):.1f} in all \u2192"
            axes.text(edge, row - 0.42, beyond, ha="right", va="bottom", fontsize=9)
    axes.axvline(limit, color=_INK, linewidth=1.2, linestyle="dashed", label=f"vLLM may use {limit:.1f}")
    axes.axvline(total, color=_INK, linewidth=1.6, label=f"{total:.1f} in all")
    axes.set_yticks(range(len(shown)), [_name(candidate) for candidate, _ in shown])
    for label, (candidate, _) in zip(axes.get_yticklabels(), shown):
        label.set_fontweight("bold" if candidate.verdict == "chosen" else "normal")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlim=(0, edge), xlabel="GiB", title=f"Memory of the tightest {device.unit}")
    _legend_below(axes, columns=3)


def _neighbours(plan: ServePlan) -> list[tuple[Candidate, MemoryEstimate]]:
    """Return the chosen layout and those next to it in the plan, where their memory was estimated."""
    known = [(candidate, candidate.memory) for candidate in plan.candidates if candidate.memory is not None]
    chosen = next(place for place, (candidate, _) in enumerate(known) if candidate.verdict == "chosen")
    nearest = sorted(range(len(known)), key=lambda place: abs(place - chosen))[:_LAYOUTS]
    return [known[place] for place in sorted(nearest)]


def _parts(memory: MemoryEstimate) -> list[float]:
    """Return GiB of weights, of all that is neither weights nor cache, and of the cache."""
    graphs = 0 if memory.graphs_outside else memory.cuda_graph_bytes
    other = memory.activation_bytes + graphs + memory.non_torch_bytes
    return [part / GIB for part in (memory.model_loading_bytes, other, max(0, memory.kv_cache_bytes))]


def _name(candidate: Candidate) -> str:
    layout = candidate.layout
    return f"{layout.sizes()}\n{layout.num_nodes} x {layout.gpus_per_node}, {candidate.verdict}"


def _stacked(
    bar: Callable[..., Any], places: Sequence[Any], below: str, rows: Sequence[Sequence[float]], colours: dict[str, str]
) -> list[Any]:
    """Draw a bar of parts for each row, and return the bars of each part. A part that is never there is left out."""
    found, starts = [], [0.0] * len(rows)
    for (part, colour), sizes in zip(colours.items(), zip(*rows)):
        if any(sizes):
            found.append(bar(places, sizes, label=part, color=colour, edgecolor=_PAPER, **{below: starts}))
            starts = [start + size for start, size in zip(starts, sizes)]
    return found


def _legend_below(axes: Any, *, columns: int = 5) -> None:
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns, columnspacing=1.2, handlelength=1.6)
