"""The pains, one after the other, on a cluster of their own: python -m tests.pains [--only NAME ...] [--no-engine]

Needs root, for the cluster. Brings each about, asks `doctor`, `status` or `submit` as a user would, and prints a table:
what was named first, by whom, whether that is right, and whether it was before a weight was read. The exit code is 1 if
a wrong cause was named first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from tests.cluster import ClusterConfig, SlurmCluster
from tests.cluster.environment import visible_folders
from tests.pains import engine_pains, further_pains, slurm_pains  # noqa: F401  # they enter theirs
from tests.pains.pain import PAINS, Pain, Seen
from tests.pains.site import Site
from tests.pains.table import NOT_HERE, heading, line, summary


def main(words: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the cluster goes with us
    options = _parser().parse_args(words)
    if unknown := [name for name in options.only if name not in PAINS]:
        print(f"no pain {unknown[0]!r}; there are: {', '.join(PAINS)}", file=sys.stderr)
        return 2
    chosen = [PAINS[name] for name in options.only] or [
        one for one in PAINS.values() if not (options.no_engine and one.needs_engine)
    ]
    outcomes: list[tuple[Pain, Seen]] = []
    print(heading(), flush=True)
    with SlurmCluster(ClusterConfig(name=f"pains-{os.getpid()}"[:15], visible=visible_folders())) as cluster:
        site = Site(cluster)
        for pain in chosen:
            outcomes.append((pain, _provoke(site, pain)))
            print(line(*outcomes[-1]), flush=True)
    print("\n".join(f"{number:>2}  not brought about: {why}" for number, why in NOT_HERE.items()))
    print(summary(outcomes))
    if options.json:
        told = [{"pain": pain.name, "number": pain.number, **vars(seen)} for pain, seen in outcomes]
        options.json.write_text(json.dumps(told, indent=2) + "\n")
    return 0 if all(pain.is_right(seen) for pain, seen in outcomes) else 1


def _provoke(site: Site, pain: Pain) -> Seen:
    try:
        return pain.provoke(site)
    except Exception:
        traceback.print_exc()
        return Seen(said="(not measured: see above)", by="-", is_before_weights=None, seconds=0.0)
    finally:
        if not pain.keeps_job:
            site.clear()
        if unwell := site.cluster.what_is_unwell() if not pain.keeps_job else "":
            print(f"after {pain.name}: {unwell}; the cluster is made anew", file=sys.stderr)
            site.cluster.down()
            site.cluster.up()
            site.make_model()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.pains", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only this; may be repeated")
    parser.add_argument("--no-engine", action="store_true", help="without those that start real vLLM")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was seen there")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
