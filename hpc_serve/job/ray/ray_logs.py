"""Keeps the ends of the logs of Ray's own processes on a node, in one file of the job's folder of logs.

Ray writes into the node's private folder, which goes with the run. So the ends are copied while the run lasts, and once
more at its end. If a node is lost, its last copy stays. `diagnose` decides what the lines mean.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from hpc_serve.errors import HpcServeError
from hpc_serve.job.run.node import Node
from hpc_serve.rendezvous.fields import replica_name
from hpc_serve.rendezvous.files import write_private
from hpc_serve.units import MIB

_log = logging.getLogger(__name__)
# The files that tell of an end come first. Ray also sends the workers' lines to the head's log, unless it ended before.
_FILES = (
    *("gcs_server.err", "gcs_server.out", "raylet.err", "raylet.out"),
    *("runtime_env_agent.err", "dashboard_agent.err", "worker-*.err", "worker-*.out"),
)
_BYTES_OF_A_FILE, _BYTES_OF_A_NODE = MIB, 8 * MIB
_FIRST_AFTER_S, _THEN_EVERY_S = 5.0, 60.0
_LAST_COPY_S = 10.0


@contextlib.contextmanager
def kept_ray_logs(node: Node) -> Iterator[None]:
    """While this lasts, and at its end, keep the ends of Ray's logs of this node."""
    log_dir = node.environ.get("HPC_SERVE_LOG_DIR")
    if node.backend != "ray" or not log_dir:
        yield
        return
    allocation = node.allocation
    name = replica_name(allocation.job_id, allocation.share.index, allocation.share.count)
    target = Path(log_dir) / f"{name}-node{allocation.node_rank}-ray.log"
    ends = threading.Event()
    keeper = threading.Thread(target=_keep, args=(Path(node.ray_dir), target, ends), name="ray logs", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ends.set()
        keeper.join(_LAST_COPY_S)  # a filesystem that hangs must not hold up the end


def _keep(ray_dir: Path, target: Path, ends: threading.Event) -> None:
    wait_s, copied = _FIRST_AFTER_S, ""
    is_last = False
    while not is_last:
        is_last = ends.wait(wait_s)
        wait_s = min(2 * wait_s, _THEN_EVERY_S)
        text = read_ends(ray_dir)
        if text and text != copied:
            try:
                write_private(target, text)
                copied = text
            except (HpcServeError, OSError) as error:
                _log.warning("Ray's logs cannot be kept: %s", error)
                return


def read_ends(ray_dir: Path) -> str:
    """Return the ends of the logs of Ray's latest session in a folder, each below its name; "" if there are none."""
    parts: list[str] = []
    left = _BYTES_OF_A_NODE
    for pattern in _FILES:
        for path in sorted((ray_dir / "session_latest" / "logs").glob(pattern)):
            end = _end_of(path, min(_BYTES_OF_A_FILE, left))
            left -= len(end)
            if end.strip():
                parts.append(f"==> {path.name}\n{end.decode(errors='replace').rstrip()}\n")
    return "".join(parts)


def _end_of(path: Path, most_bytes: int) -> bytes:
    """Return the last whole lines of a file; of a longer line, its end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = file.seek(max(0, size - most_bytes))
            end = file.read(most_bytes)
    except OSError:
        return b""
    return end if begin == 0 else end.partition(b"\n")[2] or end
