"""Shows the speed in `plan`: a table by requests in flight, and the lines of --explain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpc_serve.cli.console import plain_table
from hpc_serve.plan.make import PlanResult
from hpc_serve.plan.report.explain import explain_lines
from hpc_serve.plan.report.speed import (
    accuracy_text,
    arrivals_text,
    critical_text,
    knee_text,
    measured_text,
    offloading_text,
    range_of,
    range_text,
    requests_text,
    speculation_text,
    start_text,
    time_of,
    waiting_text,
)
from hpc_serve.plan.speed.estimate import SpeedEstimate, class_texts, speed_range
from hpc_serve.plan.speed.measured import known_draft

_UNKNOWN = "Speed: no source confirms this accelerator's FLOP/s and bandwidth."
OF_SPEECH = "Speed: not planned for models that attend to an encoder of sound."
"""Why there is no speed of Whisper."""
_ARRIVALS = {
    "steady": ("so many always in flight", " For N at once and then no more: --requests N."),
    "burst": ("all at once and then no more", ""),
    "decoding": ("decoding alone", ""),
}
"""By arrivals: the words for them, and a sentence on the other way."""
_CAUSES = {
    "weights": "reading weights",
    "FLOP/s": "arithmetic",
    "KV cache": "reading the cache",
    "engine": "the engine's own work",
    "communication": "communication between GPUs",
    "bubbles": "waiting for pipeline stages",
}
"""What a step's causes (plan/speed/step.py) are called in a sentence."""
_WIDE = 80
"""Columns of a terminal from which the table has all its columns and wide gaps."""


def wide_table(console: Console, *headings: str, left: Sequence[str] = ()) -> Table:
    """Return an empty table with many columns of numbers; those in `left` are of words."""
    right = [heading for heading in headings if heading not in left]
    return plain_table(*headings, right=right, padding=1 if console.width >= _WIDE else 0)


def speed_line(result: PlanResult) -> str:
    """The speed in one sentence: for one request in flight, for as many as were asked for, and for the most."""
    shown, traffic = _shown(result), result.traffic
    if not shown:
        return _why_none(result)
    unit = "token" if traffic.generates else "text"
    parts = [
        f"{one.speed.output_tokens_per_s:,.0f} {unit}s/s{_range(one)} with {count:,} in flight "
        f"({_time(time_of(one))} a {unit}"
        + (f", {one.output_tokens_per_usd / 1e6:.2f} M tokens a dollar)" if one.output_tokens_per_usd else ")")
        for count, one in shown.items()
    ]
    arrivals, other = _ARRIVALS["decoding" if traffic.decode_only else traffic.arrivals]
    whence = None if result.asked.ideal else measured_text(list(shown.values()))
    measured = f"; {whence}" if whence else ""
    line = f"{_what_speed(result)}: {', '.join(parts)}; {requests_text(traffic)}, {arrivals}{measured}.{other}"
    return f"{line} {_bounds(result, shown)}"


def _what_speed(result: PlanResult) -> str:
    figures = "Ideal speed" if result.asked.ideal else "Speed to expect"
    return f"{figures} of each replica" if result.chosen.replicas > 1 else figures


def _bounds(result: PlanResult, shown: Mapping[int, SpeedEstimate]) -> str:
    """What takes most of the time, and how the range is known."""
    bounds: dict[str, list[str]] = {}
    for count, one in shown.items():
        bounds.setdefault(_CAUSES[one.speed.bound], []).append(f"{count:,}")
    each = [f"{bound} with {' and '.join(counts)} in flight" for bound, counts in bounds.items()]
    most = f"Most of the time goes to {', to '.join(each) if len(each) > 1 else next(iter(bounds))}."
    if result.asked.ideal or any(one.measured for one in shown.values()):
        return most
    found = speed_range(shown[1].roofline, result.traffic)
    if found is None:
        return f"{most} Too few runs of this kind were published to give a range."
    return f"{most} The range is that of {found['sources']} published sources."


def gain_lines(result: PlanResult) -> Iterator[str]:
    """What the engine's options gain. Nothing where the speed is not known, or no text is generated."""
    engine = result.inputs.engine
    has_offloading = engine.kv_offloading_size and result.accelerator.kind == "gpu"
    if not result.traffic.generates or not (has_offloading or engine.speculative_tokens):
        return
    shown = list(_shown(result).values())
    if not shown:
        return
    if has_offloading:
        yield offloading_text(result.speeds().roofline)
    if (plain := result.plain_speeds()) is None:
        return
    known = known_draft(result.model.name, engine)
    if known and known.acceptance_length(engine.speculative_tokens) != result.traffic.acceptance_length:
        known = None
    yield speculation_text(result.speeds(), plain, shown, known)


def _shown(result: PlanResult) -> dict[int, SpeedEstimate]:
    """The estimates for one request in flight, for as many as were asked for, and for the most, by that number."""
    found = result.estimates()
    chosen = (found[0], _asked(found, result.traffic.concurrency), found[-1]) if found else ()
    return {one.traffic.concurrency: one for one in chosen}


def _why_none(result: PlanResult) -> str:
    """Why there is no speed."""
    return OF_SPEECH if result.model.encoder_positions else _UNKNOWN


def _range(estimate: SpeedEstimate) -> str:
    """The tokens/s between which 17 of 20 measurements would be, to two digits."""
    bounds = None if estimate.is_ideal else range_of(estimate)
    if bounds is None:
        return ""
    low, high = (float(f"{bound * estimate.speed.output_tokens_per_s:.1e}") for bound in bounds)
    return f" ({low:,.0f} to {high:,.0f})"


def print_speed(console: Console, result: PlanResult) -> None:
    """The table: what to expect, and the ideal beside it; or the ideal alone."""
    found, traffic, usd = result.estimates(), result.traffic, result.asked.usd_per_gpu_hour
    if not found:
        console.print(Text(_why_none(result), style="dim"))
        return
    ideal, alone = result.asked.ideal, traffic.decode_only
    time, rate = ("TPOT", "TOKENS/S") if traffic.generates else ("TIME", "TEXTS/S")
    rows = []
    for one in found:
        row = {"IN FLIGHT": f"{one.traffic.concurrency:,}"}
        if traffic.generates and not alone:
            row["TTFT"] = _time(one.speed.ttft_s)
        row |= {time: _time(time_of(one)), rate: f"{one.speed.output_tokens_per_s:,.0f}"}
        if not ideal:
            row["IDEAL"] = f"{one.ideal.output_tokens_per_s:,.0f}"
        if not usd or console.width >= _WIDE:
            row[f"PER {result.accelerator.unit.upper()}"] = f"{one.output_tokens_per_s_per_gpu:,.0f}"
        if one.output_tokens_per_usd:
            row["PER $"] = f"{one.output_tokens_per_usd / 1e6:.2f} M"
        rows.append({**row, "BOUND BY": one.speed.bound})
    table = wide_table(console, *rows[0], left=("BOUND BY",))
    for row in rows:
        table.add_row(*row.values())
    best = "every rate at its peak, communication hidden: no published measurement is above it"
    about = best if ideal else accuracy_text(traffic, result.accelerator.kind)
    about += "; the factors are below" if traffic.generates else ""
    console.print(f"{_what_speed(result)}, {requests_text(traffic)}, {arrivals_text(traffic)} ({about}):")
    console.print(table)
    if not traffic.generates:
        return
    replica = result.speeds()
    sentences = (
        None if ideal else range_text(found),
        *map(waiting_text, found),
        start_text(_asked(found, traffic.concurrency)),
        *(f"{text}." for text in class_texts(replica.roofline) if not (ideal or alone)),
        knee_text(replica),
        critical_text(replica) if ideal or alone else None,
    )
    for sentence in filter(None, sentences):
        console.print(sentence)


def print_speed_explanation(result: PlanResult) -> None:
    """The step of the plan at the concurrency asked for, or with the cache full."""
    found = result.estimates()
    if not found or not result.traffic.generates:
        return
    click.echo()
    for line in explain_lines(_asked(found, result.traffic.concurrency)):
        click.echo(line)


def _asked(found: list[SpeedEstimate], concurrency: int) -> SpeedEstimate:
    """The estimate for the number of requests that was asked for, else the one for the most."""
    asked = [one for one in found if one.traffic.concurrency == concurrency and concurrency > 1]
    return (asked or found)[-1]


def _time(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"
