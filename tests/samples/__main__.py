"""Writes the printed samples of the documents anew: python -m tests.samples [--cluster]

Without an option it runs the commands that need no cluster. With --cluster (root; four minutes on two cores) it runs
the others as well on the test cluster, with real Slurm and real vLLM, and makes the recording.
"""

from __future__ import annotations

import argparse
import sys

from tests.samples import kept, pages


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.samples", description=__doc__)
    parser.add_argument("--cluster", action="store_true", help="also run what needs a cluster")
    if parser.parse_args(words).cluster:
        from tests.samples import on_cluster

        kept.keep(on_cluster.run())
    pages.write(kept.block_of)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
