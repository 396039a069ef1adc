"""The figures of runs as text: one run in the words of `vllm bench serve`, several as a table, replicas below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpc_serve.bench.figures import FIGURES, Figures
from hpc_serve.bench.measured import Measured
from hpc_serve.bench.outcome import Prediction

_WIDTH = 50
_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


def run_lines(measured: Measured) -> Iterator[str]:
    """All of one run, line by line as `vllm bench serve` prints it, then its replicas and what must be said of it."""
    pace, figures = measured.run.pace, measured.figures
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    for name, _, words in FIGURES:
        if (value := getattr(figures, name)) is not None:
            yield _line(words, float(value) if name == "peak_concurrency" else value)
        if name == "failed" and pace.max_concurrency is not None:
            yield _line("Maximum request concurrency:", pace.max_concurrency)
        if name == "failed" and pace.is_rate:
            yield _line("Request rate configured (RPS):", pace.request_rate)
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
        medians = (figures.times[kind].median for kind in ("ttft", "tpot"))
        counts = [str(figures.completed), str(figures.failed)]
        rows.append([name or "(none answered)", *counts, *map(_number, (figures.output_rate, *medians))])
    return rows


def sweep_rows(runs: Sequence[Measured]) -> list[list[str]]:
    """Return a heading, and a row for each run. Medians are of the requests that were answered."""
    figures = [one.figures for one in runs]
    predicted, good = [one.predicted_rate for one in runs], [one.goodput for one in figures]
    columns = [
        ["service", *(one.run.service for one in runs)],
        ["replicas", *(str(len(one.run.replicas)) for one in runs)],
        ["workload", *(one.run.workload for one in runs)],
        ["pace", *(str(one.run.pace) for one in runs)],
        ["requests", *(str(one.completed) for one in figures)],
        ["failed", *(str(one.failed) for one in figures)],
        ["req/s", *(_number(one.request_rate) for one in figures)],
        *([["good/s", *map(_number, good)]] if any(rate is not None for rate in good) else []),
        ["tokens/s out", *(_number(one.output_rate) for one in figures)],
        *([["predicted", *map(_number, predicted)]] if any(rate is not None for rate in predicted) else []),
        ["tokens/s all", *(_number(one.total_rate) for one in figures)],
    ]
    for name in ("ttft", "tpot"):
        columns.append([f"{name.upper()} ms", *(_number(one.times[name].median) for one in figures)])
        columns.append(["P99", *(_number(one.times[name].percentiles[99.0]) for one in figures)])
    return [list(row) for row in zip(*columns)]


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows in columns: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    is_text = [not is_number(cell) for cell in (rows[1] if len(rows) > 1 else rows[0])]
    for row in rows:
        cells = [cell.ljust(width) if left else cell.rjust(width) for cell, width, left in zip(row, widths, is_text)]
        yield "  ".join(cells).rstrip()


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


def is_number(cell: str) -> bool:
    """Return whether a cell of a table goes to the right."""
    return cell.replace(",", "").replace(".", "").isdigit() or cell == "-"
