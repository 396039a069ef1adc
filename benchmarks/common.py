"""What all benchmarks share: turns that change by chance, medians and spread, the machine, the table and the JSON.

A benchmark is a module of this folder with a `BENCHMARK`: its `measure` fills a `Measured`, `run_alone` makes a program
of it, and `python -m benchmarks` runs all of them. What is measured, and how, is each module's own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

from hpc_serve import __version__

PACKAGES = ("openai", "httpx2", "httpcore2", "httpx", "anyio", "aiohttp", "vllm", "ray", "vllm-router")
ROOT = Path(__file__).parents[1]

Figures = Mapping[str, float]
"""One turn's figures by what they are and their unit: "requests/s", "CPU ms a request"."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one contender did in one case, figure by figure, a value for each round.

    The values of `base`, another contender of the same case, are what its ratios are to, round by round.
    """

    case: str
    contender: str
    figures: Mapping[str, Sequence[float]]
    base: str = ""
    note: str = ""


@dataclass
class Measured:
    """What a benchmark has found so far."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self, case: str, contender: str, figures: Mapping[str, Sequence[float]], *, base: str = "", note: str = ""
    ) -> None:
        self.rows.append(Row(case=case, contender=contender, figures=figures, base=base, note=note))

    def take_turns(
        self, case: str, turns: Mapping[str, Callable[[], Figures]], *, rounds: int, base: str = "", warm: bool = True
    ) -> None:
        """Let the contenders take a turn each in every round, in an order that changes by chance.

        With `warm` each has one turn before that is not counted: connections, caches.
        """
        show(case)
        seen: dict[str, list[Figures]] = {name: [] for name in turns}
        for turn in turns.values() if warm else ():
            turn()
        for _ in range(rounds):
            for name in random.sample(list(turns), len(turns)):
                seen[name].append(turns[name]())
        for name, found in seen.items():
            self.add(case, name, {figure: [one[figure] for one in found] for figure in found[0]}, base=base)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A module's benchmark; `about` is its docstring, of which the first line says what it measures.

    `rounds` is the usual number of them, `options` adds others to the parser, and `short` has the values of all that
    make it a matter of seconds. One that `needs` something beyond this package and stub engines (a real engine) has no
    short form.
    """

    name: str
    about: str
    measure: Callable[[argparse.Namespace, Measured], None]
    rounds: int
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    short: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""


def run_alone(benchmark: Benchmark, words: Sequence[str] | None = None) -> dict[str, Any]:
    """Run a benchmark by its command line, print its table, and return what it found, as it stands in its JSON."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{benchmark.name}", description=benchmark.about)
    parser.add_argument("--rounds", type=int, default=benchmark.rounds)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep what was found")
    if not benchmark.needs:
        parser.add_argument("--short", action="store_true", help="see that it runs; its figures say nothing")
    benchmark.options(parser)
    options = parser.parse_args(words)
    if is_short := not benchmark.needs and options.short:
        parser.set_defaults(rounds=1, **benchmark.short)
        options = parser.parse_args(words)
    measured, load, began_s = Measured(), os.getloadavg()[0], time.monotonic()
    benchmark.measure(options, measured)
    found = {
        "benchmark": benchmark.name,
        "about": benchmark.about.split("\n\n")[0].split(":", 1)[0].strip().rstrip(".") + ".",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        "versions": versions(),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "seconds": round(time.monotonic() - began_s),
        "rounds": options.rounds,
        "short": is_short,
        "rows": [_row(row, measured.rows) for row in measured.rows],
        "notes": measured.notes,
    }
    print("\n".join(document(found)), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def show(text: str) -> None:
    """A line that tells who waits what is under way."""
    print(f"… {text}", flush=True)


# -- what helps to measure


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of the wall's clock and of this process's CPU, and what the work returned."""

    wall_s: float
    cpu_s: float
    result: Any


def cost_of(work: Callable[[], Any]) -> Cost:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = work()
    return Cost(wall_s=time.perf_counter() - wall_s, cpu_s=time.process_time() - cpu_s, result=result)


@contextlib.contextmanager
def variables(**added: str) -> Iterator[None]:
    """These environment variables for a while."""
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# -- on what


def machine() -> dict[str, Any]:
    """What a figure depends on of the machine; nothing that names it."""
    lines = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n") if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": fields.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30),
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    """Of this package (with the commit, where git knows it), of Python, and of the packages that were compared."""
    asked = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    commit = f" ({asked.stdout.strip()})" if asked.returncode == 0 else ""
    found = {"hpc-serve": f"{__version__}{commit}", "Python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


# -- what was found, as JSON and as text


def _row(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    bases = [one for one in rows if one.case == row.case and one.contender == row.base and one is not row]
    figures = {}
    for name, values in row.figures.items():
        figures[name] = _spread(values)
        for base in bases:
            pairs = list(zip(values, base.figures.get(name, ()), strict=False))
            if pairs and all(least for _, least in pairs):
                figures[name]["ratio"] = _spread([mine / least for mine, least in pairs])
                figures[name]["more"] = _rounded(statistics.median(mine - least for mine, least in pairs))
    return {"case": row.case, "contender": row.contender, "base": row.base, "note": row.note, "figures": figures}


def _spread(values: Sequence[float]) -> dict[str, Any]:
    spread = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {**{name: _rounded(value) for name, value in spread.items()}, "rounds": [_rounded(one) for one in values]}


def _rounded(value: float) -> float:
    """Four digits: more are never measured."""
    return float(f"{value:.4g}")


def document(found: Mapping[str, Any]) -> list[str]:
    """The Markdown lines of what a benchmark found."""
    machine, load = found["machine"], found["load"]
    hardware = f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, Linux {machine['kernel']}"
    rounds = "1 round" if found["rounds"] == 1 else f"{found['rounds']} rounds"
    lines = [
        f"## {found['benchmark']}",
        "",
        found["about"],
        "",
        f"{found['date']}; {hardware}; load {load[0]} before and {load[1]} after {found['seconds']} s; {rounds}.",
        "; ".join(f"{name} {version}" for name, version in found["versions"].items()) + ".",
    ]
    if found["short"]:
        lines += ["", "The short form: these figures say nothing."]
    for names, rows in groupby(found["rows"], key=lambda row: tuple(row["figures"])):
        lines += ["", *_table(names, list(rows))]
    for note in found["notes"]:
        lines += ["", note]
    return [*lines, ""]


def _table(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    has_note = any(row["note"] for row in rows)
    compared = [name for name in names if any("ratio" in row["figures"][name] for row in rows)]
    head = ["", "", *(words for name in names for words in (name, *(["ratio, more"] if name in compared else [])))]
    cells = [[*head, *([""] if has_note else [])]]
    for row in rows:
        line = [row["case"], row["contender"]]
        for name in names:
            figure = row["figures"][name]
            line.append(_with_spread(figure))
            if name in compared:
                line.append(f"{figure['ratio']['median']:.2f}, {figure['more']:+.4g}" if "ratio" in figure else "")
        cells.append([*line, *([row["note"]] if has_note else [])])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    cells.insert(1, ["-" * width for width in widths])
    return ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells]


def _with_spread(figure: Mapping[str, Any]) -> str:
    if len(figure["rounds"]) == 1:
        return f"{figure['median']:g}"
    return f"{figure['median']:g} ({figure['least']:g} to {figure['most']:g})"
