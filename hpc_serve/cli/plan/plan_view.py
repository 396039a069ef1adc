"""What `plan` shows: the budget of one GPU as a bar, the layouts considered, the flags; or several accelerators.

`plan --compare` shows the memory of each accelerator in one table, and the speed in another. Plans and speeds were made
before; here they are only shown.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpc_serve.cli.console import plain_table
from hpc_serve.cli.plan.plan_speed import (
    OF_SPEECH,
    gain_lines,
    print_speed,
    print_speed_explanation,
    speed_line,
    wide_table,
)
from hpc_serve.plan.choice.candidates import (
    TYPICAL_REQUEST_TOKENS,
    Candidate,
    Contexts,
    compare_sharing,
    on_most_gpus,
    replica_options,
)
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.choice.planner import ServePlan
from hpc_serve.plan.make import PlanResult
from hpc_serve.plan.memory.estimate import MemoryEstimate
from hpc_serve.plan.report.explain import explain
from hpc_serve.plan.report.speed import arrivals_text, measured_text, requests_text, time_of
from hpc_serve.plan.speed.estimate import SpeedEstimate
from hpc_serve.units import GIB, number_of

# -- several accelerators


def print_comparison(results: list[PlanResult]) -> None:
    """One line an accelerator: where bytes go, then how fast all its replicas are together."""
    console = Console(highlight=False, emoji=False, markup=False)
    first, unit = results[0], _unit(results)
    each = "; sizes of each replica" if _has_replicas(results) else ""
    length = first.inputs.max_model_len
    requests = f"texts of up to {length:,}" if first.model.is_encoder else f"requests of {length:,}"
    console.print(f"{first.model.name}, {requests} tokens; GiB per {unit}{each}:")
    console.print(_memory_table(results))
    for result in results:
        if result.error is not None:
            console.print(Text(f"{result.accelerator.name}: {result.error}", style="dim"))
    if results[0].model.encoder_positions:
        console.print(Text(OF_SPEECH, style="dim"))
    elif any(result.plan for result in results):
        console.print()
        console.print(_speed_heading(results, unit))
        console.print(_speed_table(results, unit))
        for result in results:
            estimate = None if result.plan is None or result.asked.ideal else _estimate(result)
            if estimate is not None and (whence := measured_text([estimate])) is not None:
                console.print(f"{result.accelerator.name}: {whence}.")


def _memory_table(results: list[PlanResult]) -> Table:
    replicas = ("REPLICAS",) if _has_replicas(results) else ()
    data = ("DP",) if any(one.plan and one.plan.layout.data_parallel_size > 1 for one in results) else ()
    is_encoder = results[0].model.is_encoder
    rest = ("UNUSED",) if is_encoder else ("CACHE", "TOKENS", "AT ONCE")
    columns = (*replicas, "NODES", *data, "TP", "PP", "USABLE", "WEIGHTS", *rest)
    table = plain_table("GPU", *columns, right=columns, padding=0)
    for result in results:
        if result.plan is None:
            table.add_row(result.accelerator.name, Text("no fit", style="red"))
            continue
        chosen, memory = result.plan, result.plan.memory
        sizes = (memory.requested_bytes, memory.weight_bytes, memory.kv_cache_bytes)
        table.add_row(
            result.accelerator.name,
            *((str(chosen.replicas),) if replicas else ()),
            f"{chosen.layout.num_nodes} x {chosen.layout.gpus_per_node}",
            *((str(chosen.layout.data_parallel_size),) if data else ()),
            str(chosen.layout.tensor_parallel_size),
            str(chosen.layout.pipeline_parallel_size),
            *(f"{size / GIB:.1f}" for size in sizes),
            *(() if is_encoder else (f"{memory.kv_cache_tokens:,}", f"{memory.max_concurrency:.1f}")),
        )
    return table


def _speed_heading(results: list[PlanResult], unit: str) -> str:
    traffic = results[0].traffic
    requests = requests_text(traffic)
    together = ", all replicas together" if _has_replicas(results) else ""
    allowing = "--max-num-seqs allows" if results[0].model.is_encoder else "--max-num-seqs and the cache allow"
    most = "" if _is_concurrency_asked(results[0]) else f", as many in flight as {allowing}"
    usd = results[0].asked.usd_per_gpu_hour
    price = f", each {unit} at {usd:g} dollars an hour" if usd else ""
    figures = "Ideal speed" if results[0].asked.ideal else "Speed to expect"
    return f"{figures}{together}, {requests}, {arrivals_text(traffic)}{most}{price}:"


def _speed_table(results: list[PlanResult], unit: str) -> Table:
    price, generates = results[0].asked.usd_per_gpu_hour, results[0].traffic.generates
    rates = ("TPOT", "TOKENS/S") if generates else ("TIME", "TEXTS/S")
    columns = (f"{unit.upper()}S", "IN FLIGHT", *rates, f"PER {unit.upper()}", *(("PER $",) if price else ()))
    table = plain_table("GPU", *columns, right=columns, padding=0)
    for result in results:
        if result.plan is None:
            continue
        copies, estimate = result.plan.replicas, _estimate(result)
        if estimate is None:
            table.add_row(result.accelerator.name, *("?" for _ in table.columns[1:]))
            continue
        dollar = [f"{estimate.output_tokens_per_usd / 1e6:.2f} M"] if estimate.output_tokens_per_usd else []
        table.add_row(
            result.accelerator.name,
            f"{copies * estimate.num_gpus:,}",
            f"{copies * estimate.traffic.concurrency:,}",
            f"{1000 * time_of(estimate):,.1f} ms",
            f"{copies * estimate.speed.output_tokens_per_s:,.0f}",
            f"{estimate.output_tokens_per_s_per_gpu:,.0f}",
            *dollar,
        )
    return table


def _estimate(result: PlanResult) -> SpeedEstimate | None:
    """One replica at the concurrency asked for, else with as many requests as it runs; None of unknown speed."""
    engine = replace(result.inputs.engine, max_num_seqs=result.chosen.memory.max_num_seqs)
    found = result.estimates(replace(result.inputs, engine=engine))
    if _is_concurrency_asked(result):
        found = [one for one in found if one.traffic.concurrency == result.traffic.concurrency]
    return found[-1] if found else None


def _is_concurrency_asked(result: PlanResult) -> bool:
    return result.inputs.workload.concurrency > 1


def _has_replicas(results: list[PlanResult]) -> bool:
    return any(result.plan and result.plan.replicas > 1 for result in results)


def _unit(results: list[PlanResult]) -> str:
    units = {result.accelerator.unit for result in results}
    return units.pop() if len(units) == 1 else "device"


# -- one plan

_BAR_WIDTH = 60
_VERDICTS = {"chosen": "bold green", "fits": "green", "too small": "yellow", "refused": "red"}


def print_plan(result: PlanResult, note: str | None, memory: str) -> None:
    """The plan for people: where bytes go, what was chosen and why, what to type.

    `note` says what was assumed, `memory` what of each node's memory is asked for.

    Raises NoLayoutError without a plan.
    """
    chosen = result.chosen
    console = Console(highlight=False, emoji=False, markup=False)
    _print_choice(console, result, _nearest(chosen.candidates), note, memory)
    for line in (speed_line(result), *gain_lines(result)):
        console.print(line)
    console.print(Text("--explain: all layouts, the speed by requests in flight, and the arithmetic.", style="dim"))
    console.print()
    words = " ".join(shlex.quote(word) for word in ("vllm", "serve", chosen.model, *chosen.vllm_args))
    Console(highlight=False, emoji=False, markup=False, soft_wrap=True).print(Text(words, style="bold"))


def print_explanation(result: PlanResult, words: Sequence[str], note: str | None, memory: str) -> None:
    """The plan with all layouts and speeds, and its arithmetic line by line; `words` are further ones of the engine."""
    chosen = result.chosen
    console = Console(highlight=False, emoji=False, markup=False)
    _print_choice(console, result, chosen.candidates, note, memory)
    _print_sharing(console, result)
    print_speed(console, result)
    for line in gain_lines(result):
        console.print(line)
    console.print()
    for line in explain(result.inputs, chosen.layout, chosen.memory, chosen.minimum_gpus, note=result.found.note):
        click.echo(line)
    print_speed_explanation(result)
    click.echo()
    click.echo(f"Loading the weights: {_loading(chosen, words)}")
    click.echo(
        "  The job decides by its nodes. Its log (`loading weights: …`) and `hpc-serve status NAME` say what it was."
    )


def _print_choice(
    console: Console, result: PlanResult, candidates: Sequence[Candidate], note: str | None, memory: str
) -> None:
    """The layout with its memory, these candidates beside it, and the notes of the plan."""
    console.print(_headline(result.chosen))
    if note:
        console.print(Text(f"({note})", style="dim"))
    console.print()
    _print_bar(console, result.chosen.memory, result.accelerator.unit)
    console.print()
    _print_layouts(console, result, candidates)
    console.print()
    for reason in result.chosen.notes:
        console.print(f"- {reason}")
    if memory:
        console.print(f"- `submit` asks for memory: {memory}.")
    console.print()


def _nearest(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """The chosen candidate between the largest smaller one and the runner-up."""
    place = next(number for number, candidate in enumerate(candidates) if candidate.verdict == "chosen")
    return (*on_most_gpus(candidates[:place]), *candidates[place : place + 2])


def _loading(chosen: ServePlan, words: Sequence[str]) -> str:
    from hpc_serve.submit.plans.preflight import foreseen_loading

    words = (*chosen.vllm_args, *words)
    return foreseen_loading(chosen.model, words, os.environ, ranks_per_node=chosen.layout.gpus_per_node)


def _headline(chosen: ServePlan) -> Text:
    layout = chosen.layout
    where = f"{number_of(layout.num_nodes, 'node')} x {layout.gpus_per_node} {chosen.accelerator.name}"
    sizes = layout.sizes(" x ")
    replicas = f"{chosen.replicas} replicas, each on " if chosen.replicas > 1 else ""
    return Text(chosen.model, style="bold").append(f": {replicas}{where}, {sizes}", style="not bold")


def _print_bar(console: Console, memory: MemoryEstimate, unit: str) -> None:
    """The GPU's memory as a bar and a legend."""
    graphs = 0 if memory.graphs_outside else memory.cuda_graph_bytes
    parts = [
        ("weights", memory.model_loading_bytes, "blue", "█"),
        ("activations", memory.activation_bytes, "yellow", "▓"),
        ("CUDA graphs", graphs, "magenta", "▒"),
        ("non-torch", memory.non_torch_bytes, "red", "▒"),
        ("KV cache" if memory.blocks_per_request else "unused", max(0, memory.kv_cache_bytes), "green", "░"),
        ("left free", memory.total_bytes - memory.requested_bytes, "bright_black", "·"),
    ]
    console.print(f"One {unit} of {_gib(memory.total_bytes)} GiB, the tightest:")
    bar = Text("  ")
    widths = _widths([size for _, size, _, _ in parts], min(_BAR_WIDTH, console.width - 2))
    for width, (_, _, colour, mark) in zip(widths, parts):
        bar.append(mark * width, style=colour)
    console.print(bar)
    for name, size, colour, mark in parts:
        if size:
            share = 100 * size / memory.total_bytes
            console.print(Text(f"  {mark} ", style=colour).append(f"{name:12}{_gib(size):>8} GiB {share:5.1f} %"))


def _widths(sizes: list[int], columns: int) -> list[int]:
    """Columns of the bar for each size, at least one for what is there; they add up to the bar."""
    total = sum(sizes)
    widths = [max(1, round(columns * size / total)) if size else 0 for size in sizes]
    widths[widths.index(max(widths))] += columns - sum(widths)
    return widths


def _print_layouts(console: Console, result: PlanResult, candidates: Sequence[Candidate]) -> None:
    """The candidates, and the reason of each; with `--max-model-len auto` the context that each holds."""
    verdicts: dict[Layout, tuple[str, tuple[str, ...]]] = {
        candidate.layout: (candidate.verdict, (candidate.reason,)) for candidate in candidates
    }
    data = ("DP",) if any(layout.data_parallel_size > 1 for layout in verdicts) else ()
    sizes = (*data, "TP", "PP", "NODES")
    if result.contexts:
        first, *counts = map(str, next(iter(result.contexts.values())))
        table = wide_table(console, *sizes, "", f"{first} AT ONCE", *counts, left=("",))
        verdicts = _with_contexts(verdicts, result.contexts)
        console.print("Longest context by layout, for so many requests of that length at once:")
    else:
        table = plain_table(*sizes, "", "WHY", right=sizes, folded=("WHY",))
    for layout, (verdict, cells) in verdicts.items():
        table.add_row(
            *((str(layout.data_parallel_size),) if data else ()),
            str(layout.tensor_parallel_size),
            str(layout.pipeline_parallel_size),
            f"{layout.num_nodes} x {layout.gpus_per_node}",
            Text(verdict, style=_VERDICTS[verdict]),
            *cells,
        )
    console.print(table)


def _with_contexts(
    verdicts: Mapping[Layout, tuple[str, tuple[str, ...]]], contexts: Contexts
) -> dict[Layout, tuple[str, tuple[str, ...]]]:
    """The layouts with their contexts in place of the reasons. One that holds some context fits."""
    none = dict.fromkeys(next(iter(contexts.values())), 0)
    order = sorted({*verdicts, *contexts}, key=lambda one: (one.num_gpus, one.pipeline_parallel_size))
    found = {}
    for layout in order:
        verdict = verdicts[layout][0] if layout in verdicts else "fits"
        verdict = "fits" if layout in contexts and verdict != "chosen" else verdict
        lengths = contexts.get(layout, none).values()
        found[layout] = verdict, tuple(f"{length:,}" if length else "-" for length in lengths)
    return found


def _print_sharing(console: Console, result: PlanResult) -> None:
    """How replicas could share a whole node, where the plan takes a part of one and no sizes were asked for."""
    workload, engine = result.inputs.workload, result.inputs.engine
    is_asked = engine.has_asked_layout or workload.replicas
    if result.chosen.layout.num_nodes > 1 or result.inputs.cluster.node_size == 1 or is_asked:
        return
    ways = replica_options(result.inputs)
    if (sentence := compare_sharing(ways, result.inputs.max_model_len)) is None:
        return
    requests = f"REQUESTS OF {TYPICAL_REQUEST_TOKENS:,}"
    table = wide_table(console, "REPLICAS", "TP", "WEIGHTS", "CACHE", "TOKENS IN ALL", requests)
    for way in ways:
        table.add_row(
            str(way.replicas),
            str(way.layout.tensor_parallel_size),
            _gib(way.memory.weight_bytes),
            _gib(way.memory.kv_cache_bytes),
            f"{way.total_tokens:,}",
            f"{way.typical_requests:,}",
        )
    console.print(f"A whole node of {result.inputs.cluster.node_size}, shared (GiB per {result.accelerator.unit}):")
    console.print(table)
    console.print(f"- {sentence}")
    console.print()


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
