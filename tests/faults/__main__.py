"""The fault suite: python -m tests.faults [--short | --real | --front NAME ...] [--only NAME ...] [--json FILE]

The long form needs root, for the test cluster; --short needs neither, nor does --real, which starts two real tiny
engines of vLLM on the CPUs of this machine and compares greedy streams token for token. Prints a table, and below it
what was lost and why. The exit code is 1 if more is lost than is known of today's product (tests/faults/expected.py).
With --front the load goes through another program to local replicas, a table for each: it compares, and expects
nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import tempfile
from pathlib import Path

from tests.faults.catalogue import FAULTS
from tests.faults.expected import surpasses
from tests.faults.fronts import FRONTS, run_front
from tests.faults.long import run_long
from tests.faults.outcomes import Outcome
from tests.faults.real import run_real
from tests.faults.short import run_short
from tests.faults.table import HEAD, LEGEND, comparison, line, remarks, table


def main(words: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the clusters go with us
    options = _parser().parse_args(words)
    unknown = [name for name in options.only if name not in FAULTS]
    if unknown:
        print(f"no fault {unknown[0]!r}; there are: {', '.join(FAULTS)}", file=sys.stderr)
        return 2
    is_local = options.short or options.real or options.front
    if is_local and (unfit := [name for name in options.only if FAULTS[name].needs_slurm]):
        print(f"{unfit[0]} needs Slurm: leave out --short, --real and --front", file=sys.stderr)
        return 2
    if options.front:
        return _compare(options)
    if options.real:
        print(HEAD, flush=True)
        with tempfile.TemporaryDirectory(prefix="hpc-serve-faults-") as folder:
            outcomes = run_real(Path(folder), only=options.only, on_outcome=_print)
    elif options.short:
        with tempfile.TemporaryDirectory(prefix="hpc-serve-faults-") as folder:
            outcomes = run_short(Path(folder), only=options.only)
    else:
        print(HEAD, flush=True)
        outcomes = run_long(only=options.only, at_once=options.at_once, on_outcome=_print)
    print(f"\n{table(outcomes)}\n{LEGEND}")
    print(remarks(outcomes))
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=2) + "\n")
    return 1 if any(map(surpasses, outcomes)) else 0


def _compare(options: argparse.Namespace) -> int:
    """A table for each front. The exit code is 1 if one could not be measured."""
    broken = False
    for front in options.front:
        with tempfile.TemporaryDirectory(prefix="hpc-serve-faults-") as folder:
            outcomes = run_front(Path(folder), front, router=options.router, only=options.only)
        print(f"\nthrough {front}:\n{comparison(outcomes)}", flush=True)
        broken = broken or any(outcome.broken for outcome in outcomes)
    return int(broken)


def _print(outcome: Outcome) -> None:
    print(line(outcome), outcome.broken, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "--short", action="store_true", help="the faults that need no Slurm, all at once on this machine"
    )
    parser.add_argument("--real", action="store_true", help="some faults of two real engines on this machine's CPUs")
    parser.add_argument(
        "--front",
        action="append",
        choices=FRONTS,
        default=[],
        help="the load goes through this program to replicas on this machine; may be repeated",
    )
    parser.add_argument(
        "--router", default="vllm-router", metavar="PROGRAM", help="vllm-router's program [%(default)s]"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only this fault; may be repeated")
    parser.add_argument(
        "--at-once",
        type=int,
        default=2,
        metavar="N",
        help="clusters side by side, without --short (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the outcomes there")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
