"""A child of the head's launcher: it asks Ray which nodes are alive, and prints them as JSON whenever they change.

    python -m hpc_serve.job.ray_nodes GPU      (or another resource of Ray, which is counted on each node)

`ray.nodes()` works only inside a Ray driver. This is a program of its own, so that the launcher need not be one. It
ends when its standard output is closed, or when the launcher ends it.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
from typing import Any


def main(device: str) -> None:
    ray: Any = importlib.import_module("ray")
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.ERROR)
    before: dict[str, int] | None = None
    while True:
        alive = {
            node["NodeManagerAddress"]: int(node["Resources"].get(device, 0)) for node in ray.nodes() if node["Alive"]
        }
        if alive != before:
            print(json.dumps({"hpc_serve_nodes": alive}), flush=True)
            before = alive
        time.sleep(0.3)  # the step of a poll; the launcher holds the deadline


if __name__ == "__main__":
    main(sys.argv[1])
