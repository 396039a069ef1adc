"""The fault suite: python -m tests.faults [--short] [--only NAME ...] [--json FILE]

Prints one line per fault, then the table with what is lost and why. The exit code is 1 if anything is lost beyond what
is known of today's product (tests/faults/expected.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from tests.faults.expected import surpasses
from tests.faults.faults import FAULTS
from tests.faults.short import run_short
from tests.faults.table import remarks, table


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    unknown = [name for name in options.only if name not in FAULTS]
    if unknown:
        print(f"no fault {unknown[0]!r}; there are: {', '.join(FAULTS)}", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="hpc-serve-faults-"))
    outcomes = run_short(folder, only=options.only)
    print(table(outcomes))
    print(remarks(outcomes))
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=2) + "\n")
    return 1 if any(map(surpasses, outcomes)) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "--short", action="store_true", help="the faults that need no Slurm, all at once on this machine"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only this fault; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the outcomes there")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
