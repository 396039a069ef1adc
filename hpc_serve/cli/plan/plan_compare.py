"""Shows `plan --compare`: the memory of each accelerator in one table, the speed in another.

Plans and speeds were made before; this module only sets them side by side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpc_serve.cli.console import plain_table
from hpc_serve.cli.plan.plan_speed import OF_SPEECH
from hpc_serve.plan.report.speed import arrivals_text, measured_text, requests_text, time_of
from hpc_serve.sizes import GIB

if TYPE_CHECKING:
    from hpc_serve.plan.make import PlanResult
    from hpc_serve.plan.speed.estimate import SpeedEstimate


def print_comparison(results: list[PlanResult]) -> None:
    """One line an accelerator: where bytes go, then how fast all its replicas are together."""
    console = Console(highlight=False, emoji=False)
    first, unit = results[0], _unit(results)
    each = "; sizes of each replica" if _has_replicas(results) else ""
    length = first.inputs.max_model_len
    requests = f"texts of up to {length:,}" if first.model.is_encoder else f"requests of {length:,}"
    console.print(Text(f"{first.model.name}, {requests} tokens; GiB per {unit}{each}:"))
    console.print(_memory_table(results))
    for result in results:
        if result.error is not None:
            console.print(Text(f"{result.accelerator.name}: {result.error}", style="dim"))
    if results[0].model.encoder_positions:
        console.print(Text(OF_SPEECH, style="dim"))
    elif any(result.plan for result in results):
        console.print()
        console.print(Text(_speed_heading(results, unit)))
        console.print(_speed_table(results, unit))
        for result in results:
            estimate = None if result.plan is None or result.asked.ideal else _estimate(result)
            if estimate is not None and (whence := measured_text([estimate])) is not None:
                console.print(Text(f"{result.accelerator.name}: {whence}."))


def _memory_table(results: list[PlanResult]) -> Table:
    replicas = ("REPLICAS",) if _has_replicas(results) else ()
    data = ("DP",) if any(one.plan and one.plan.layout.data_parallel_size > 1 for one in results) else ()
    is_encoder = results[0].model.is_encoder
    rest = ("UNUSED",) if is_encoder else ("CACHE", "TOKENS", "AT ONCE")
    table = _table(*replicas, "NODES", *data, "TP", "PP", "USABLE", "WEIGHTS", *rest)
    for result in results:
        if result.plan is None:
            table.add_row(Text(result.accelerator.name), Text("no fit", style="red"))
            continue
        chosen, memory = result.plan, result.plan.memory
        sizes = (memory.requested_bytes, memory.weight_bytes, memory.kv_cache_bytes)
        table.add_row(
            Text(result.accelerator.name),
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
    columns = ("TPOT", "TOKENS/S") if generates else ("TIME", "TEXTS/S")
    table = _table(f"{unit.upper()}S", "IN FLIGHT", *columns, f"PER {unit.upper()}", *(("PER $",) if price else ()))
    for result in results:
        if result.plan is None:
            continue
        copies, estimate = result.plan.replicas, _estimate(result)
        if estimate is None:
            table.add_row(Text(result.accelerator.name), *("?" for _ in table.columns[1:]))
            continue
        dollar = [f"{estimate.output_tokens_per_usd / 1e6:.2f} M"] if estimate.output_tokens_per_usd else []
        table.add_row(
            Text(result.accelerator.name),
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


def _table(*headings: str) -> Table:
    table = plain_table("GPU", *headings, right=headings)
    table.padding = 0
    return table
