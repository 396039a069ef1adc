"""Figures that documents quote from files that programs wrote; `python -m tests.support.quoted_figures` renews them.

A quoted figure has its place behind it in a comment, which readers of the page do not see:
`1.47<!--client_throughput / streams, 64 threads / client / requests/s / ratio-->`. The first word is a file of
benchmarks/results/. The last may be `ratio`, `more`, `least` or `most`, and is else the median. A place like
`faults / node-off / gap s` is in the first table of tests/faults/RESULTS.md. The tables that follow there are called
`gateway`, `vllm-router` and `real`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.arguments import given_words

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    *("README.md", "SECURITY.md", "ARCHITECTURE.md", "CONTRIBUTING.md"),
    *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.md"))),
)
FAULTS = ("faults", "gateway", "vllm-router", "real")
PARTS = ("ratio", "more", "least", "most")
QUOTED = re.compile(r"([\d,]*\d(?:\.\d+)?)<!--(\S+ / [^>]+?)-->")

_NAMES_RESULTS = re.compile(
    r"benchmarks\.([a-z_]+)\b(?!\.)|make faults|tests\.faults|(?:faults|pains|benchmarks)/RESULTS"
)
_NO_FIGURE = re.compile(r"`[^`]*`|\]\([^)]*\)|\d{4}-\d\d-\d\d|\d+(?:\.\d+){2,}")
_FIGURE = re.compile(r"\d+\.\d+|\d[\d,]*\s?(?:s|ms|%|times|requests/s)(?![\w/])")


def figure(place: str) -> float:
    """Return the figure at a place. Raises KeyError if there is none."""
    name, case, *words = place.split(" / ")
    if name in FAULTS:
        return _fault_tables()[name][case][words[0]]
    part = words.pop() if words[-1] in PARTS else "median"
    contender, what = words
    rows = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        if (row["case"], row["contender"]) == (case, contender):
            found = row["figures"][what]
            return float(found["ratio"]["median"] if part == "ratio" else found[part])
    raise KeyError(place)


def renewed(text: str) -> str:
    """Return the text with each quoted figure as its file has it, to as many digits as before, without a sign."""
    return QUOTED.sub(lambda match: f"{_as_written(match[1], figure(match[2]))}<!--{match[2]}-->", text)


def unheld(text: str) -> list[str]:
    """Return the figures without a place in paragraphs and rows that name a benchmark, or the tables of faults."""
    found = []
    for block in re.split(r"\n\n|\n(?=\||- )|(?<=\|)\n", text):
        if any(_is_kept(match[1]) for match in _NAMES_RESULTS.finditer(block)):
            found += _FIGURE.findall(_NO_FIGURE.sub("", QUOTED.sub("", block)))
    return found


def _is_kept(benchmark: str | None) -> bool:
    """Return whether a benchmark is to keep its results; studies of accuracy are held by tests of their own."""
    return benchmark is None or (ROOT / "benchmarks" / f"{benchmark}.py").exists()


def _as_written(before: str, value: float) -> str:
    digits = len(before.partition(".")[2])
    return f"{abs(value):,.{digits}f}" if "," in before else f"{abs(value):.{digits}f}"


def _fault_tables() -> dict[str, dict[str, dict[str, float]]]:
    text = (ROOT / "tests" / "faults" / "RESULTS.md").read_text(encoding="utf-8")
    return dict(zip(FAULTS, map(_table, re.findall(r"```\n(fault .*?)```", text, re.DOTALL)), strict=True))


def _table(text: str) -> dict[str, dict[str, float]]:
    head, *lines = text.splitlines()
    names = re.split(r" {2,}", head)[1:]
    rows = {line.split()[0]: line.split()[1 : len(names) + 1] for line in lines if not line.startswith(" ")}
    return {
        fault: {name: float(cell) for name, cell in zip(names, cells, strict=True) if re.fullmatch(r"-?[\d.]+", cell)}
        for fault, cells in rows.items()
    }


if __name__ == "__main__":
    given_words(__doc__, 0)
    for document in DOCUMENTS:
        path = ROOT / document
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
