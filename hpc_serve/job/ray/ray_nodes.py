"""Beside Ray's head: asks Ray's control store which nodes are alive, and prints them as JSON whenever they change.

    python -m hpc_serve.job.ray.ray_nodes FOLDER ADDRESS GPU     (or another resource of Ray, counted on each node)

FOLDER is Ray's own, where its head writes the port of its control store; ADDRESS is the head's. The port is printed as
soon as it is there. It ends when its standard input is closed. It runs in a thread of Ray's head where it can, since
`import ray` takes more than a second; the launcher itself never imports Ray.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
import threading
from typing import Any

from hpc_serve.job.run.ray_cluster import read_gcs_port

# The steps of polls; the launcher holds the deadline.
_STEP_S, _STEP_AFTER_ERROR_S = 0.05, 0.3
_ALIVE = 0
_ERRORS_BEFORE_WORDS = 10


def main() -> None:
    watch(*sys.argv[1:])


def watch_in_thread(folder: str, address: str, device: str) -> None:
    threading.Thread(target=watch, args=(folder, address, device), name="ray nodes", daemon=True).start()


def watch(folder: str, address: str, device: str) -> None:
    """Print the port, then the nodes, until standard input is closed."""
    while (port := read_gcs_port(folder)) is None:
        if _is_closed(_STEP_S):
            return
    _say({"hpc_serve_gcs": port})
    client: Any = None
    before: dict[str, int] | None = None
    errors, step_s = 0, 0.0
    while not _is_closed(step_s):
        try:
            client = client or importlib.import_module("ray._raylet").GcsClient(address=f"{address}:{port}")
            nodes = client.get_all_node_info(timeout=10).values()
            alive = {
                node.node_manager_address: int(node.resources_total.get(device, 0))
                for node in nodes
                if node.state == _ALIVE
            }
            step_s = _STEP_S
        except Exception as error:  # what it is differs by version; it may not listen yet
            client, step_s, errors = None, _STEP_AFTER_ERROR_S, errors + 1
            if errors == _ERRORS_BEFORE_WORDS:
                print(f"hpc-serve: Ray does not say which nodes it has: {type(error).__name__}: {error}", flush=True)
            continue
        if alive != before:
            _say({"hpc_serve_nodes": alive})
            before = alive


def _say(fact: dict[str, Any]) -> None:
    """One line of its own, whatever Ray's head is just writing."""
    os.write(1, f"\n{json.dumps(fact)}\n".encode())


def _is_closed(within_s: float) -> bool:
    """Whether standard input is closed within so many seconds."""
    return bool(select.select([0], [], [], within_s)[0])


if __name__ == "__main__":
    main()
