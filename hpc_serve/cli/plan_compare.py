"""What `plan --compare` shows: the memory of each accelerator in one table, the speed in another.

Answers come from plan_view.py, speeds from plan_speed.py; this module only sets them side by side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpc_serve.cli.plan_speed import estimates
from hpc_serve.sizes import GIB

if TYPE_CHECKING:
    from hpc_serve.cli.plan_view import Answer
    from hpc_serve.plan.choice.planner import ServePlan
    from hpc_serve.plan.speed.estimate import PerformanceEstimate


def print_comparison(answers: list[Answer]) -> None:
    """One line an accelerator: where bytes go, then how fast all its replicas are together."""
    console = Console(highlight=False)
    first, unit = answers[0], _unit(answers)
    each = "; sizes of each replica" if _has_replicas(answers) else ""
    length = first.question.max_model_len
    console.print(Text(f"{first.model.name}, requests of {length:,} tokens; GiB per {unit}{each}:"))
    console.print(_memory_table(answers))
    for given in answers:
        if given.error is not None:
            console.print(Text(f"{given.gpu.name}: {given.error}", style="dim"))
    if any(given.plan for given in answers):
        console.print()
        console.print(Text(_speed_heading(answers, unit)))
        console.print(_speed_table(answers, unit))


def _memory_table(answers: list[Answer]) -> Table:
    replicas = ("REPLICAS",) if _has_replicas(answers) else ()
    table = _table(*replicas, "NODES", "TP", "PP", "USABLE", "WEIGHTS", "CACHE", "TOKENS", "AT ONCE")
    for given in answers:
        if given.plan is None:
            table.add_row(Text(given.gpu.name), Text("no fit", style="red"))
            continue
        chosen, memory = given.plan, given.plan.memory
        sizes = (memory.requested_bytes, memory.weight_bytes, memory.kv_cache_bytes)
        table.add_row(
            Text(given.gpu.name),
            *((str(chosen.replicas),) if replicas else ()),
            f"{chosen.layout.num_nodes} x {chosen.layout.gpus_per_node}",
            str(chosen.layout.tensor_parallel_size),
            str(chosen.layout.pipeline_parallel_size),
            *(f"{size / GIB:.1f}" for size in sizes),
            f"{memory.kv_cache_tokens:,}",
            f"{memory.max_concurrency:.1f}",
        )
    return table


def _speed_heading(answers: list[Answer], unit: str) -> str:
    traffic = answers[0].traffic
    requests = f"requests of {traffic.input_tokens:,} tokens in and {traffic.output_tokens:,} out"
    together = ", all replicas together" if _has_replicas(answers) else ""
    most = "" if _is_concurrency_asked(answers[0]) else ", as many in flight as --max-num-seqs and the cache allow"
    usd = next((given.usd_per_gpu_hour for given in answers if given.usd_per_gpu_hour), None)
    price = f", each {unit} at {usd:g} dollars an hour" if usd else ""
    return f"Speed to expect{together}, {requests}{most}{price}:"


def _speed_table(answers: list[Answer], unit: str) -> Table:
    price = any(given.usd_per_gpu_hour for given in answers)
    table = _table(
        f"{unit.upper()}S", "IN FLIGHT", "TPOT", "TOKENS/S", f"PER {unit.upper()}", *(("PER $",) if price else ())
    )
    for given in answers:
        if given.plan is None:
            continue
        copies, estimate = given.plan.replicas, _estimate(given, given.plan)
        if estimate is None:
            table.add_row(Text(given.gpu.name), *("?" for _ in table.columns[1:]))
            continue
        dollar = [f"{estimate.output_tokens_per_usd / 1e6:.2f} M"] if estimate.output_tokens_per_usd else []
        table.add_row(
            Text(given.gpu.name),
            f"{copies * estimate.num_gpus:,}",
            f"{copies * estimate.traffic.concurrency:,}",
            f"{1000 * estimate.expected.tpot_s:,.1f} ms",
            f"{copies * estimate.expected.output_tokens_per_s:,.0f}",
            f"{estimate.output_tokens_per_s_per_gpu:,.0f}",
            *dollar,
        )
    return table


def _estimate(given: Answer, chosen: ServePlan) -> PerformanceEstimate | None:
    """One replica at the concurrency asked for, else with as many requests as it runs; None of unknown speed."""
    engine = replace(given.question.engine, max_num_seqs=chosen.memory.max_num_seqs)
    question = replace(given.question, engine=engine)
    found = estimates(question, chosen, given.traffic, given.usd_per_gpu_hour)
    if _is_concurrency_asked(given):
        found = [one for one in found if one.traffic.concurrency == given.traffic.concurrency]
    return found[-1] if found else None


def _is_concurrency_asked(given: Answer) -> bool:
    return given.question.workload.concurrency > 1


def _has_replicas(answers: list[Answer]) -> bool:
    return any(given.plan and given.plan.replicas > 1 for given in answers)


def _unit(answers: list[Answer]) -> str:
    units = {given.gpu.unit for given in answers}
    return units.pop() if len(units) == 1 else "device"


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("GPU", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
