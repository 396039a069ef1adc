"""Results of runs as lines in the words of `vllm bench serve`, as rows of tables, and as curves by load.

All of it is read from results (`results`); page.py and plot.py draw the same rows and curves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpc_serve.pages.frame import Curve, number_columns

Result = Mapping[str, Any]

PREDICTED, WORST = "6 4", "2 3"
"""The dashes of a predicted curve, and of a 99th percentile."""
_WIDTH = 50
_WORDS = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "max_concurrency": "Maximum request concurrency:",
    "request_rate": "Request rate configured (RPS):",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total token throughput (tok/s):",
}
TIMES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}

_PREDICTED_WORDS = {
    "output_throughput": "Output tokens/s",
    "mean_ttft_ms": "Mean TTFT (ms)",
    "mean_tpot_ms": "Mean TPOT (ms)",
}


def run_lines(result: Result) -> Iterator[str]:
    """All of one run, line by line as `vllm bench serve` prints it, then its replicas and what must be said of it."""
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    for key, words in _WORDS.items():
        if (value := result[key]) not in (None, "inf"):
            yield _line(words, float(value) if key == "max_concurrent_requests" else value)
    for name, title in TIMES.items():
        yield f"{title:-^{_WIDTH}}"
        for kind in ("mean", "median", "p90", "p99"):
            yield _line(f"{kind.capitalize()} {name.upper()} (ms):", result[f"{kind}_{name}_ms"])
    yield "=" * _WIDTH
    yield from _prediction_lines(result)
    yield ""
    yield from table(replica_rows(result))
    yield from result["notes"]


def no_prediction(result: Result) -> str:
    """Return why there is no prediction, as a sentence; "" if there is one or none was asked for."""
    reason = (result["predicted"] or {}).get("reason")
    return f"No prediction: {reason}" if reason else ""


def _prediction_lines(result: Result) -> Iterator[str]:
    """Yield lines with the prediction beside the measured figures, or why there is none."""
    predicted = result["predicted"]
    if why := no_prediction(result):
        yield why
    elif predicted:
        yield f"{'':<32}{'predicted':>11}{'measured':>11}"
        for key, name in _PREDICTED_WORDS.items():
            yield f"{name:<32}{_number(predicted[key]):>11}{_number(result[key]):>11}"


def replica_rows(result: Result) -> list[list[str]]:
    """Return a heading, and a row for each replica. Medians are of the requests that were answered."""
    rows = [["replica", "requests", "failed", "tokens/s out", "TTFT ms", "TPOT ms"]]
    for name, figures in result["replicas"].items():
        numbers = (figures[key] for key in ("output_throughput", "median_ttft_ms", "median_tpot_ms"))
        counts = [str(figures["completed"]), str(figures["failed"])]
        rows.append([name or "(none answered)", *counts, *map(_number, numbers)])
    return rows


def sweep_rows(results: Sequence[Result]) -> list[list[str]]:
    """Return a heading, and a row for each run. Medians are of the requests that were answered."""
    columns = [
        ["service", *(one["service"] for one in results)],
        ["replicas", *(str(sum(map(bool, one["replicas"]))) for one in results)],
        *([name, *(one[name] for one in results)] for name in ("workload", "pace")),
        ["requests", *(str(one["completed"]) for one in results)],
        ["failed", *(str(one["failed"]) for one in results)],
        ["req/s", *_column(results, "request_throughput")],
        ["good/s", *_column(results, "request_goodput")],
        ["tokens/s out", *_column(results, "output_throughput")],
        ["predicted", *(_number(_predicted(one)) for one in results)],
        ["tokens/s all", *_column(results, "total_token_throughput")],
    ]
    for name in ("ttft", "tpot"):
        columns.append([f"{name.upper()} ms", *_column(results, f"median_{name}_ms")])
        columns.append(["P99", *_column(results, f"p99_{name}_ms")])
    return [list(row) for row in zip(*(column for column in columns if set(column[1:]) != {"-"}))]


def _column(results: Sequence[Result], key: str) -> list[str]:
    return [_number(one[key]) for one in results]


def _predicted(result: Result) -> float | None:
    rate: float | None = (result["predicted"] or {}).get("output_throughput")
    return rate


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows in columns, the first of them headings: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    right = number_columns(rows[1:])
    for row in rows:
        cells = [cell.rjust(width) if number else cell.ljust(width) for cell, width, number in zip(row, widths, right)]
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


def load_of(result: Result) -> float:
    """Return how many requests come: per second at a rate, else at once."""
    rate = result["request_rate"]
    return float(rate if rate != "inf" else result["max_concurrency"] or result["num_prompts"])


def load_title(results: Sequence[Result]) -> str:
    """Return what the load of these runs counts."""
    return "requests per second" if any(one["request_rate"] != "inf" for one in results) else "requests at once"


def load_curves(results: Sequence[Result]) -> dict[str, list[Curve]]:
    """Return the charts of throughput and times by load: by their titles, the curves of each service and workload."""
    series: dict[str, list[Result]] = {}
    for one in sorted(results, key=load_of):
        series.setdefault(f"{one['service']}, {one['workload']}", []).append(one)

    def curves(key: str, dashes: str = "") -> list[Curve]:
        found = []
        for place, (title, ones) in enumerate(series.items()):
            seen = [(load_of(one), _predicted(one) if dashes == PREDICTED else one[key]) for one in ones]
            points = [(load, value) for load, value in seen if value is not None]
            if points:
                found.append(Curve(name=title, points=points, series=place, dashes=dashes))
        return found

    expected = curves("output_throughput", PREDICTED)
    return {
        f"Output tokens/s{', predicted dashed' if expected else ''}": curves("output_throughput") + expected,
        **{
            f"{name} (ms): median, P99 dotted": curves(f"median_{name.lower()}_ms")
            + curves(f"p99_{name.lower()}_ms", WORST)
            for name in ("TTFT", "TPOT")
        },
    }
