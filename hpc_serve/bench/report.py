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
        rows.append([name or "(none answered)", *_counts(figures), *_medians(figures)])
    return rows


def sweep_rows(runs: Sequence[Measured]) -> list[list[str]]:
    """Return a heading, and a row for each run. Medians are of the requests that were answered."""
    has_goals = any(one.goals_ms for one in runs)
    has_predictions = any(one.predicted_rate is not None for one in runs)
    heading = ["service", "replicas", "workload", "pace", "requests", "failed", "req/s"]
    heading += [*(["good/s"] if has_goals else []), "tokens/s out", *(["predicted"] if has_predictions else [])]
    rows = [[*heading, "tokens/s all", "TTFT ms", "P99", "TPOT ms", "P99"]]
    for one in runs:
        run, figures = one.run, one.figures
        row = [run.service, str(len(run.replicas)), run.workload, str(run.pace), str(figures.completed)]
        row += [str(figures.failed), _number(figures.request_rate)]
        row += [_number(figures.goodput)] if has_goals else []
        row += [_number(figures.output_rate), *([_number(one.predicted_rate)] if has_predictions else [])]
        row.append(_number(figures.total_rate))
        for name in ("ttft", "tpot"):
            row += [_number(figures.times[name].median), _number(figures.times[name].percentiles[99.0])]
        rows.append(row)
    return rows


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows in columns: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    is_text = [not is_number(cell) for cell in (rows[1] if len(rows) > 1 else rows[0])]
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


def is_number(cell: str) -> bool:
    """Return whether a cell of a table goes to the right."""
    return cell.replace(",", "").replace(".", "").isdigit() or cell == "-"
