"""Removes what killed launchers left on a node: a small process beside each launcher, which outlives it for a moment.

`python -m hpc_serve.job.sweep FOLDER` clears the folders of this user's dead runs next to FOLDER, then watches over its
own launcher, whose end closes its standard input, however it came: what that one could not clear, it clears. Where a
scheduler kills everything at once, this process too, the next run on the node does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hpc_serve.job import node_dir as folder
from hpc_serve.job import shared_memory
from hpc_serve.job.node_dir import Owner
from hpc_serve.job.process import end_marked, marked
from hpc_serve.job.shared_memory import Segment

_LOOK_S = 0.5
_GRACE_S = 1.0
_FAREWELL_S = 5.0


@contextlib.contextmanager
def private_folder(path: Path, owner: Owner) -> Iterator[Path]:
    """Make the node-local folder, and remove it with all in it, also after this process was killed.

    Raises PortsInUseError if the name is taken, InvalidRequestError if it cannot be made.
    """
    with contextlib.ExitStack() as ending:
        lock = folder.make(path, owner)
        watcher = subprocess.Popen(
            [sys.executable, "-m", "hpc_serve.job.sweep", str(path)], stdin=subprocess.PIPE, start_new_session=True
        )
        ending.callback(_dismiss, watcher)
        if lock is not None:
            ending.callback(os.close, lock)
        ending.callback(folder.remove, path, owner)
        yield path


def _dismiss(watcher: subprocess.Popen[bytes]) -> None:
    assert watcher.stdin is not None
    watcher.stdin.close()
    try:
        watcher.wait(_FAREWELL_S)
    except subprocess.TimeoutExpired:  # it still clears what an earlier run left; the next one goes on with that
        watcher.kill()
        watcher.wait()


def main(path: Path) -> None:
    # The scheduler signals all processes of a step; the end of this one is its launcher's.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for swept in sweep(path.parent):
        print(f"hpc-serve: removed {swept}, left by a run that was killed", flush=True)
    _let_go_of_the_log()
    _watch(path)
    with folder.dead_owner(path, wait=True) as owner:
        if owner is not None:
            _clear(path, owner)


def sweep(root: Path) -> list[Path]:
    """Clear the folders in `root` whose launcher ran on this node and is dead; returns those that are gone."""
    swept = []
    with contextlib.suppress(OSError):
        for path in folder.found(root):
            with folder.dead_owner(path) as owner:
                if owner is not None and _clear(path, owner):
                    swept.append(path)
    return swept


def _clear(path: Path, owner: Owner) -> bool:
    shared = shared_memory.mapped_by(marked(owner.mark), shared_memory.listed())  # not noted yet, perhaps
    asyncio.run(end_marked(owner.mark, grace_s=_GRACE_S))
    if any(marked(owner.mark)):  # the kernel holds one (a dead filesystem, a driver): it may still use the folder
        return False
    shared_memory.remove(shared)
    folder.remove(path, owner)
    return not path.exists()


def _watch(path: Path) -> None:
    """Note what the run shares in memory until its launcher ends.

    A process is asked for its maps only when there is a segment that may be its own: asking slows it down. One that
    is nobody's at two looks is not the run's.
    """
    noted: set[Segment] = set()
    others: set[Segment] = set()
    unclear_before: set[Segment] = set()
    owner = folder.read_owner(path)
    while owner is not None and not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        unclear = shared_memory.listed() - noted - others
        if ours := unclear and shared_memory.mapped_by(marked(owner.mark), unclear):
            noted |= ours
            folder.note_shared_memory(path, noted)
        others |= unclear & unclear_before - noted
        unclear_before = unclear


def _let_go_of_the_log() -> None:
    with open(os.devnull, "w") as null:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(null.fileno(), stream.fileno())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
