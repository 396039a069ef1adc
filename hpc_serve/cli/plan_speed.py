"""What `plan` shows of speed: a table by requests in flight, lines of --explain, and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan import ClusterSpec, EngineConfig, Workload
from hpc_serve.plan.choice.minimum import minimum_gpus
from hpc_serve.plan.choice.planner import NoLayoutError, ServePlan
from hpc_serve.plan.report.speed import explain_lines, knee_text, sweep
from hpc_serve.plan.speed.estimate import PerformanceEstimate, Roofline, Traffic
from hpc_serve.plan.speed.target import Target, choose, parse_target

if TYPE_CHECKING:
    from hpc_serve.plan.choice.candidates import Question


_TRUST = {
    "gpu": "tokens/s of two thirds of 233 published measurements is within a quarter",
    "tpu": "tokens/s of half of 21 published measurements on TPUs is within a quarter",
    "cpu": "fitted on GPUs and TPUs, on no CPU: eight published measurements, of another engine, are a fifth to two "
    "fifths lower",
}
DEFAULT_INPUT_TOKENS, DEFAULT_OUTPUT_TOKENS = 1024, 256


def traffic_of(options: Mapping[str, Any], max_model_len: int) -> Traffic:
    """What each request is: the lengths said, else the defaults as far as the context allows.

    Raises InvalidRequestError where the lengths said are more than the context.
    """
    inputs, outputs = options["input_tokens"], options["output_tokens"]
    outputs = outputs or min(DEFAULT_OUTPUT_TOKENS, max(1, max_model_len // 5))
    inputs = inputs or max(1, min(DEFAULT_INPUT_TOKENS, max_model_len - outputs))
    if inputs + outputs > max_model_len:
        raise InvalidRequestError(
            f"{inputs:,} tokens in and {outputs:,} out are {inputs + outputs:,}, but a request has at most "
            f"{max_model_len:,}; use a longer --max-model-len, or fewer tokens."
        )
    return Traffic(input_tokens=inputs, output_tokens=outputs, concurrency=options["concurrency"])


def roofline_of(question: Question, plan: ServePlan) -> Roofline:
    """The roofline of a plan's layout. Raises InvalidRequestError where the accelerator's speed is not known."""
    return Roofline(question.model, plan.accelerator, question.engine, plan.layout)


def estimates(
    question: Question, plan: ServePlan, traffic: Traffic, usd_per_gpu_hour: float | None
) -> list[PerformanceEstimate]:
    """Estimates by requests in flight; none where the accelerator's speed is not known."""
    try:
        roofline = roofline_of(question, plan)
    except InvalidRequestError:
        return []
    return sweep(roofline, traffic, plan.memory, usd_per_gpu_hour=usd_per_gpu_hour)


def print_speed(console: Console, question: Question, plan: ServePlan, traffic: Traffic, usd: float | None) -> None:
    """The table: what to expect, and the ideal beside it."""
    found = estimates(question, plan, traffic, usd)
    if not found:
        console.print(Text("Speed: no source confirms this accelerator's FLOP/s and bandwidth.", style="dim"))
        return
    unit = question.cluster.accelerator.unit.upper()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for heading in ("IN FLIGHT", "TTFT", "TPOT", "TOKENS/S", "IDEAL", f"PER {unit}", *(("PER $",) if usd else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("BOUND BY", no_wrap=True)
    for estimate in found:
        expected = estimate.expected
        dollar = [f"{estimate.output_tokens_per_usd / 1e6:.2f} M"] if estimate.output_tokens_per_usd else []
        table.add_row(
            f"{estimate.traffic.concurrency:,}",
            _time(expected.ttft_s),
            _time(expected.tpot_s),
            f"{expected.output_tokens_per_s:,.0f}",
            f"{estimate.ideal.output_tokens_per_s:,.0f}",
            f"{estimate.output_tokens_per_s_per_gpu:,.0f}",
            *dollar,
            estimate.bound,
        )
    each = " of each replica" if plan.replicas > 1 else ""
    console.print(
        Text(
            f"Speed to expect{each}, requests of {traffic.input_tokens:,} tokens in and {traffic.output_tokens:,} out "
            f"({_TRUST[question.cluster.accelerator.kind]}; TTFT is of a steady stream, in bursts it is longer; "
            "--explain shows the factors):"
        )
    )
    console.print(table)
    console.print(Text(knee_text(roofline_of(question, plan), traffic, plan.memory)))


def print_speed_explanation(question: Question, plan: ServePlan, traffic: Traffic) -> None:
    """The step of the plan at the concurrency asked for, or with the cache full."""
    found = estimates(question, plan, traffic, None)
    if not found:
        return
    asked = [one for one in found if one.traffic.concurrency == traffic.concurrency and traffic.concurrency > 1]
    click.echo()
    for line in explain_lines(roofline_of(question, plan), (asked or found)[-1]):
        click.echo(line)


def for_target(
    question: Question, traffic: Traffic, text: str
) -> tuple[ClusterSpec, EngineConfig, Workload, list[str]]:
    """The machines, sizes and replicas that meet `--target`, and why.

    Raises NoLayoutError where none does, InvalidRequestError for another target or where replicas were asked for.
    """
    target = parse_target(text)
    cluster, workload = replace(question.cluster, is_whole=False), question.workload
    question = replace(question, cluster=cluster)
    if workload.replicas is not None:
        raise InvalidRequestError("--target chooses the number of replicas: leave out --replicas, or --target.")
    try:
        option, reasons = choose(question, traffic, target)
    except DoesNotFitError as error:
        minimum = minimum_gpus(question, at_most=0)
        raise NoLayoutError(str(error), candidates=(), remedies=(), minimum_gpus=minimum) from None
    layout = option.layout
    engine = replace(
        question.engine,
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
    )
    batch = option.estimate.traffic.concurrency
    if target != Target() and engine.max_num_seqs is None and traffic.concurrency == 1:
        # The target is met as long as no more requests share a step than that.
        engine = replace(engine, max_num_seqs=batch)
        reasons = [*reasons, f"--max-num-seqs {batch}: a request beyond waits, so that those that run stay in time."]
    nodes = max(1, layout.num_gpus * option.replicas // cluster.node_size_of(layout.num_nodes))
    concurrency = -(-workload.concurrency // option.replicas)
    workload = replace(workload, replicas=option.replicas, concurrency=concurrency)
    return cluster.with_nodes(nodes), engine, workload, reasons


def _time(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"
