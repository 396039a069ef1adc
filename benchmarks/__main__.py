"""All benchmarks, one after another: `python -m benchmarks`, which is `make bench`. Leave the machine alone meanwhile.

Each is a process of its own. What it finds is kept in benchmarks/results/, and benchmarks/RESULTS.md is written from
the files there, whenever one is new. Those that need a real engine come last. `--short` sees that the others run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import benchmarks
from benchmarks.common import ROOT, Benchmark, document

RESULTS = Path(__file__).parent / "results"
RESULTS_TEXT = Path(__file__).parent / "RESULTS.md"
HEAD = """\
# What was measured

`make bench` writes this file, from the JSON files in `benchmarks/results/`, which hold each round. A figure is the
median of rounds in which the contenders take turns, with the least and the most of them behind it. A ratio is the
median of the rounds' ratios to the contender without one; "more" is the median of their differences. Ratios hold on
other machines, rates and times do not. The load is the machine's: above 1 at the beginning, other programs ran too.
"""


def all_benchmarks() -> list[Benchmark]:
    """By what they need and by name."""
    names = [found.name for found in iter_modules(benchmarks.__path__) if not found.ispkg and found.name != "__main__"]
    modules = [import_module(f"benchmarks.{name}") for name in names]
    found = [module.BENCHMARK for module in modules if hasattr(module, "BENCHMARK")]
    return sorted(found, key=lambda benchmark: (benchmark.needs != "", benchmark.name))


def results_text() -> str:
    """RESULTS.md as it follows from the files."""
    lines = [HEAD]
    for path in sorted(RESULTS.glob("*.json")):
        lines += document(json.loads(path.read_text()))
    return "\n".join(lines)


def run(benchmark: Benchmark, *, short: bool) -> dict[str, Any] | None:
    """What it finds; None if it fails."""
    print(f"\n===== {benchmark.name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        argv = [
            sys.executable,
            "-m",
            f"benchmarks.{benchmark.name}",
            "--json",
            str(path),
            *(["--short"] if short else []),
        ]
        if subprocess.run(argv, cwd=ROOT, check=False).returncode:
            return None
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def main() -> None:
    known = all_benchmarks()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [one.name for one in known]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help="this one; may be repeated")
    parser.add_argument("--short", action="store_true", help="see that those without a real engine run; keep nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all that was found, in one file too")
    parser.add_argument("--list", action="store_true", help="their names")
    options = parser.parse_args()
    chosen = [one for one in known if one.name in (options.only or [one.name])]
    if options.short:
        chosen = [one for one in chosen if not one.needs]
    if options.list:
        for one in known:
            print(f"{one.name:20} {one.needs or 'stub engines alone'}")
        return
    found, failed = [], []
    for benchmark in chosen:
        result = run(benchmark, short=options.short)
        if result is None:
            failed.append(benchmark.name)
            continue
        found.append(result)
        if not options.short:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{benchmark.name}.json").write_text(json.dumps(result, indent=1) + "\n")
            RESULTS_TEXT.write_text(results_text())
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
