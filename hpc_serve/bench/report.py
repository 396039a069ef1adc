"""The figures of runs as text: one run in the words of `vllm bench serve`, several as a table, replicas below."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hpc_serve.bench.figures import Figures
from hpc_serve.bench.measured import Measured
from hpc_serve.bench.outcome import Run
from hpc_serve.bench.prediction import Prediction

_WIDTH = 50
_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


def run_lines(measured: Measured) -> Iterator[str]:
    """All of one run, line by line as `vllm bench serve` prints it, then its replicas and what must be said of it."""
    run, figures = measured.run, measured.figures
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield _line("Successful requests:", figures.completed)
    yield _line("Failed requests:", figures.failed)
    if run.max_concurrency is not None:
        yield _line("Maximum request concurrency:", run.max_concurrency)
    if not math.isinf(run.request_rate):
        yield _line("Request rate configured (RPS):", run.request_rate)
    yield _line("Benchmark duration (s):", figures.duration_s)
    yield _line("Total input tokens:", figures.total_input)
    yield _line("Total generated tokens:", figures.total_output)
    yield _line("Request throughput (req/s):", figures.request_rate)
    if figures.goodput is not None:
        yield _line("Request goodput (req/s):", figures.goodput)
    yield _line("Output token throughput (tok/s):", figures.output_rate)
    yield _line("Peak output token throughput (tok/s):", figures.peak_output_rate)
    yield _line("Peak concurrent requests:", float(figures.peak_concurrency))
    yield _line("Total token throughput (tok/s):", figures.total_rate)
    for name, (short, title) in _TITLES.items():
        spread = figures.times[name]
        yield f"{title:-^{_WIDTH}}"
        yield _line(f"Mean {short} (ms):", spread.mean)
        yield _line(f"Median {short} (ms):", spread.median)
        for percent, value in spread.percentiles.items():
            if percent != 50:
                yield _line(f"P{percent:g} {short} (ms):", value)
    yield "=" * _WIDTH
    yield from prediction_lines(measured.prediction, figures)
    yield ""
    yield from table(replica_rows(measured))
    yield from measured.notes


def prediction_lines(prediction: Prediction | None, figures: Figures) -> Iterator[str]:
    """Yield lines with the prediction beside the measured figures."""
    if prediction is None:
        return
    if prediction.reason:
        yield f"No prediction: {prediction.reason}"
        return
    yield f"{'':<32}{'predicted':>11}{'measured':>11}"
    for name, expected, seen in (
        ("Output tokens/s", prediction.output_rate, figures.output_rate),
        ("Mean TTFT (ms)", prediction.ttft_ms, figures.times["ttft"].mean),
        ("Mean TPOT (ms)", prediction.tpot_ms, figures.times["tpot"].mean),
    ):
        yield f"{name:<32}{_number(expected):>11}{_number(seen):>11}"


def replica_rows(measured: Measured) -> list[list[str]]:
    """Return a heading, and a row for each replica. Medians are of the requests that were answered."""
    rows = [["replica", "requests", "failed", "tokens/s out", "TTFT ms", "TPOT ms"]]
    for name, figures in measured.of_replicas().items():
        rows.append([name or "(none answered)", *_counts(figures), *_medians(figures)])
    return rows


def sweep_rows(runs: Sequence[Measured]) -> list[list[str]]:
    """Return a heading, and a row for each run. Medians are of the requests that were answered."""
    has_goals = any(one.goals_ms for one in runs)
    has_predictions = any(one.prediction and one.prediction.output_rate is not None for one in runs)
    heading = ["service", "replicas", "workload", "pace", "requests", "failed", "req/s"]
    heading += [*(["good/s"] if has_goals else []), "tokens/s out", *(["predicted"] if has_predictions else [])]
    rows = [[*heading, "tokens/s all", "TTFT ms", "P99", "TPOT ms", "P99"]]
    for one in runs:
        run, figures = one.run, one.figures
        expected = one.prediction.output_rate if one.prediction else None
        row = [run.service, str(len(run.replicas)), run.workload, pace(run), str(figures.completed)]
        row += [str(figures.failed), _number(figures.request_rate)]
        row += [_number(figures.goodput)] if has_goals else []
        row += [_number(figures.output_rate), *([_number(expected)] if has_predictions else [])]
        row.append(_number(figures.total_rate))
        for name in ("ttft", "tpot"):
            row += [_number(figures.times[name].median), _number(figures.times[name].percentiles[99.0])]
        rows.append(row)
    return rows


def pace(run: Run) -> str:
    """Return how requests come, in few words.

    64 at once; 4/s; 4/s, 64 at once at most
    """
    at_once = "all at once" if run.max_concurrency is None else f"{run.max_concurrency} at once"
    if math.isinf(run.request_rate):
        return at_once
    return f"{run.request_rate:g}/s" + ("" if run.max_concurrency is None else f", {at_once} at most")


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows in columns: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    is_text = [not _is_number(cell) for cell in (rows[1] if len(rows) > 1 else rows[0])]
    for row in rows:
        cells = [cell.ljust(width) if left else cell.rjust(width) for cell, width, left in zip(row, widths, is_text)]
        yield "  ".join(cells).rstrip()


def _counts(figures: Figures) -> list[str]:
    return [str(figures.completed), str(figures.failed), _number(figures.output_rate)]


def _medians(figures: Figures) -> list[str]:
    return [_number(figures.times[name].median) for name in ("ttft", "tpot")]


def _line(name: str, value: float | int) -> str:
    return f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}"


def _number(value: float | None) -> str:
    """
    >>> _number(1234.5), _number(12.34), _number(1.234), _number(None)
    ('1,234', '12.3', '1.23', '-')
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").isdigit() or cell == "-"
