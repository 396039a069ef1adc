"""The pains, one after the other, on a cluster of their own: python -m tests.pains [--only NAME ...] [--no-engine]

Needs root, for the cluster. Brings each about, asks `doctor`, `status` or `submit` as a user would, and prints a table:
what was named first, by whom, whether that is right, and whether it was before a weight was read. One that breaks says
why, with the jobs' states and the ends of their logs, and the others go on. The exit code is 1 if a wrong cause was
named first, or one was not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.cluster import ClusterConfig, SlurmCluster
from tests.cluster.environment import visible_folders
from tests.pains import engine_pains, further_pains, slurm_pains  # noqa: F401  # they enter theirs
from tests.pains.pain import PAINS, Pain, Seen
from tests.pains.site import Site
from tests.pains.table import NOT_HERE, Surroundings, heading, line, results_page, summary


def main(words: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the cluster goes with us
    signal.signal(signal.SIGALRM, _raise_too_long)
    options = _parser().parse_args(words)
    if unknown := [name for name in options.only if name not in PAINS]:
        print(f"no pain {unknown[0]!r}; there are: {', '.join(PAINS)}", file=sys.stderr)
        return 2
    chosen = [PAINS[name] for name in options.only] or [
        one for one in PAINS.values() if not (options.no_engine and one.needs_engine)
    ]
    begin = Surroundings.now()
    outcomes: list[tuple[Pain, Seen]] = []
    print(heading(), flush=True)
    with SlurmCluster(ClusterConfig(name=f"pains-{os.getpid()}"[:15], visible=visible_folders())) as cluster:
        site = Site(cluster)
        for pain in chosen:
            outcomes.append((pain, _provoke(site, pain, options.deadline)))
            print(line(*outcomes[-1]), flush=True)
            _write(options, outcomes, begin)
    print("\n".join(f"{number:>2}  not brought about: {why}" for number, why in NOT_HERE.items()))
    print(summary(outcomes))
    return 0 if all(pain.is_right(seen) for pain, seen in outcomes) else 1


def _write(options: argparse.Namespace, outcomes: Sequence[tuple[Pain, Seen]], begin: Surroundings) -> None:
    """Keep what was seen so far, so that a run that is cut off leaves what it had."""
    if options.json:
        told = [{"pain": pain.name, "number": pain.number, **vars(seen)} for pain, seen in outcomes]
        options.json.write_text(json.dumps(told, indent=2) + "\n")
    if options.results:
        options.results.write_text(results_page(outcomes, begin, Surroundings.now()))


class _TooLongError(Exception):
    """A pain took longer than its deadline."""


def _raise_too_long(*_: object) -> None:
    raise _TooLongError


def _provoke(site: Site, pain: Pain, deadline_s: float) -> Seen:
    """What was seen of one pain. One that breaks, or takes too long, says why, and does not end the others."""
    began_s = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    try:
        seen = pain.provoke(site)
    except Exception as error:
        why = f"not over after {deadline_s:g} s" if isinstance(error, _TooLongError) else f"{error!r}"
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(f"{pain.name}: {why}", file=sys.stderr)
        traceback.print_exc()
        print(site.evidence(), file=sys.stderr, flush=True)
        took_s = time.monotonic() - began_s
        seen = Seen(said=why, by="-", is_before_weights=None, seconds=took_s, is_measured=False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if not (pain.keeps_job and pain.is_right(seen)):
        _tidy(site, pain)
    return seen


def _tidy(site: Site, pain: Pain) -> None:
    """End what is left of a pain; a cluster that is not well by then is made anew."""
    try:
        site.clear()
        unwell = site.cluster.what_is_unwell()
    except Exception as error:
        unwell = f"{error!r}"
    if unwell:
        print(f"after {pain.name}: {unwell}; the cluster is made anew", file=sys.stderr)
        site.cluster.down()
        site.cluster.up()
        site.make_model()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.pains", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only this; may be repeated")
    parser.add_argument("--no-engine", action="store_true", help="without those that start real vLLM")
    parser.add_argument(
        "--deadline", type=float, default=240.0, metavar="S", help="so long may each take [default: 240]"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="also write the table there, with date and machine"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was seen there")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
