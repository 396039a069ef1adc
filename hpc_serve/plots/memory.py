"""Draws what the memory of the tightest GPU holds, for the chosen layout and its neighbours.

The sizes are those of the plan's candidates. figure.py draws the rest and saves the file.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpc_serve.plan.hardware.accelerator import AcceleratorSpec
from hpc_serve.plan.memory.estimate import MemoryEstimate
from hpc_serve.plots.labels import INK, PAPER, halo
from hpc_serve.sizes import GIB

if TYPE_CHECKING:
    from hpc_serve.plan.choice.candidates import Candidate
    from hpc_serve.plan.choice.planner import ServePlan

_ROWS = 5


def draw_memory(axes: Any, plan: ServePlan, device: AcceleratorSpec) -> None:
    """Draw bars of the tightest GPU of the chosen layout and its neighbours. The dashed line is vLLM's limit."""
    others = "activations, graphs, runtime" if device.kind == "gpu" else "activations"
    colours = {"weights": "#1864ab", others: "#e8590c", "KV cache": "#2b8a3e"}
    limit, total = plan.memory.requested_bytes / GIB, plan.memory.total_bytes / GIB
    shown = _neighbours(plan)
    bars = [dict(zip(colours, _parts(memory))) for _, memory in shown]
    edge = min(1.7 * total, max(1.1 * total, *(1.05 * sum(bar.values()) for bar in bars)))
    for row, ((candidate, _), bar) in enumerate(zip(shown, bars)):
        is_chosen = candidate.verdict == "chosen"
        ink, start, last = PAPER if is_chosen else INK, 0.0, PAPER
        for part, width in bar.items():
            colour = colours[part] if is_chosen else _faded(colours[part])
            axes.barh(row, width, 0.6, left=start, color=colour, edgecolor=PAPER)
            seen = max(0.0, min(start + width, edge) - start)
            if seen > 0.09 * total:
                middle = (start + seen / 2, row)
                axes.text(*middle, f"{width:.1f}", ha="center", va="center", color=ink, fontsize=9, **_rim(colour))
            last = colour if start < 0.95 * edge else last
            start += width
        if start > edge:
            beyond = f"{start:.1f} in all \u2192"
            axes.text(0.99 * edge, row, beyond, ha="right", va="center", color=ink, fontsize=9, **_rim(last))
    axes.axvline(limit, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.axvline(total, color=INK, linewidth=1.6)
    small = {"textcoords": "offset points", "fontsize": 8.5, **_rim(PAPER)}
    axes.annotate(f"vLLM may use {limit:.1f}", (limit, -0.62), (-4, 0), ha="right", **small)
    axes.annotate(f"{total:.1f}", (total, -0.62), (4, 0), **small)
    axes.set_yticks(range(len(shown)), [_name(candidate) for candidate, _ in shown])
    axes.set_ylim(len(shown) - 0.4, -0.85)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, edge)
    axes.set_xlabel("GiB")
    axes.set_title(f"Memory of the tightest {device.unit}")
    patch = import_module("matplotlib.patches").Patch
    present = [part for part in colours if any(bar[part] for bar in bars)]
    axes.legend(
        [patch(color=colours[part]) for part in present],
        present,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=3,
        fontsize=9.5,
    )


def _neighbours(plan: ServePlan) -> list[tuple[Candidate, MemoryEstimate]]:
    """Return the chosen layout and those next to it in the plan, where their memory was estimated."""
    known = [(candidate, candidate.memory) for candidate in plan.candidates if candidate.memory is not None]
    chosen = next(place for place, (candidate, _) in enumerate(known) if candidate.verdict == "chosen")
    nearest = sorted(range(len(known)), key=lambda place: abs(place - chosen))[:_ROWS]
    return [known[place] for place in sorted(nearest)]


def _parts(memory: MemoryEstimate) -> tuple[float, float, float]:
    """Return GiB of weights, of all that is neither weights nor cache, and of the cache."""
    graphs = 0 if memory.graphs_outside else memory.cuda_graph_bytes
    other = memory.activation_bytes + graphs + memory.non_torch_bytes
    return memory.model_loading_bytes / GIB, other / GIB, max(0, memory.kv_cache_bytes) / GIB


def _name(candidate: Candidate) -> str:
    layout = candidate.layout
    return f"{layout.sizes()}\n{layout.num_nodes} x {layout.gpus_per_node}, {candidate.verdict}"


def _faded(colour: str) -> str:
    """Return a lighter colour that is not transparent, so that the grid does not show through it."""
    colors = import_module("matplotlib.colors")
    halfway = [(ink + paper) / 2 for ink, paper in zip(colors.to_rgb(colour), colors.to_rgb(PAPER))]
    return str(colors.to_hex(halfway))


def _rim(colour: str) -> dict[str, Any]:
    return {"path_effects": halo(colour), "zorder": 5}
