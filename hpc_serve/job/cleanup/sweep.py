"""Removes the leftovers of killed launchers on a node. One sweep process runs beside each launcher.

`python -m hpc_serve.job.cleanup.sweep FOLDER` first clears the folders of this user's dead launchers next to FOLDER.
Then it waits for the end of its own launcher (`node_dir`), which closes its standard input, and clears FOLDER if the
launcher has not. If the scheduler kills both at once, the sweep process of the next run on the node does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import sys
from pathlib import Path

from hpc_serve.job.cleanup import node_dir
from hpc_serve.job.cleanup.node_dir import DirOwner, Segment
from hpc_serve.job.machine.allocation import set_up_logging
from hpc_serve.job.machine.process import end_marked, marked_pids
from hpc_serve.job.weights import stage_folder

_log = logging.getLogger("hpc_serve.job.cleanup.sweep")  # __name__ is __main__ in the sweep process
_CHECK_INTERVAL_S = 0.5
_GRACE_S = 1.0
_KILLED_S = 10.0  # on a busy node a process may take so long to end after SIGKILL


def main(path: Path) -> None:
    # Slurm signals all processes of a step. This one ends with its launcher instead.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging(sys.stderr)
    for removed in [*remove_abandoned(path.parent), *stage_folder.remove_unused(os.environ)]:
        _log.info("removed %s, which a killed run had left", removed)
    _close_output()
    _list_shared_memory_until_end(path)
    with node_dir.lock_abandoned(path, wait=True) as owner:
        if owner is not None:
            _clear(path, owner)
    stage_folder.remove_unused(os.environ)


def remove_abandoned(root: Path) -> list[Path]:
    """Clear the folders in `root` of launchers of this node that have ended; return the removed folders."""
    removed = []
    with contextlib.suppress(OSError):
        for path in node_dir.list_private(root):
            with node_dir.lock_abandoned(path) as owner:
                if owner is not None and _clear(path, owner):
                    removed.append(path)
    return removed


def _clear(path: Path, owner: DirOwner) -> bool:
    """End the processes of a dead launcher and remove what it has left; returns whether all is removed."""
    # Segments that were made after the last check are in no list yet.
    unlisted = node_dir.mapped_by(marked_pids(owner.run_mark), node_dir.list_segments())
    asyncio.run(end_marked(owner.run_mark, grace_s=_GRACE_S, killed_s=_KILLED_S))
    # A process that the kernel holds (a dead filesystem, a driver) may still use the folder.
    if any(marked_pids(owner.run_mark)):
        return False
    node_dir.remove_segments(unlisted)
    node_dir.remove(path, owner)
    return not path.exists()


def _list_shared_memory_until_end(path: Path) -> None:
    """Write down the run's shared memory until its launcher ends.

    Reading the maps of a process slows the process down. The maps are therefore read only while some segments may be
    the run's. A segment that no process of the run has mapped at two checks in a row counts as another run's.
    """
    ours: set[Segment] = set()
    others: set[Segment] = set()
    unknown_before: set[Segment] = set()
    owner = node_dir.read_owner(path)
    while owner is not None and not select.select([sys.stdin], [], [], _CHECK_INTERVAL_S)[0]:
        unknown = node_dir.list_segments() - ours - others
        if mapped := unknown and node_dir.mapped_by(marked_pids(owner.run_mark), unknown):
            ours |= mapped
            node_dir.write_segments(path, ours, seen_by="watcher")
        others |= unknown & unknown_before - ours
        unknown_before = unknown


def _close_output() -> None:
    """Let go of the log: srun waits until every process has closed its output, and this one outlives its launcher."""
    with open(os.devnull, "w") as null:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(null.fileno(), stream.fileno())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
