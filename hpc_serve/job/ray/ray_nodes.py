"""Lists Ray's nodes: a program beside Ray's head prints them at each change, and the launcher reads its lines.

    python -m hpc_serve.job.ray.ray_nodes FOLDER ADDRESS GPU [PORT]     (or another resource of Ray, counted by node)

FOLDER is Ray's own folder, ADDRESS is the head's. PORT is the port of Ray's GCS. If it is given, only public names of
Ray are used; if not, Ray writes the port into FOLDER. The port is printed as soon as it is known. The program ends when
its standard input is closed. It is a thread of Ray's head where that is possible, since `import ray` takes more than a
second. The launcher never imports Ray.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Mapping

from hpc_serve.job.ray import ray_private

# The steps of polls; the launcher holds the deadline.
_STEP_S, _STEP_AFTER_ERROR_S = 0.05, 0.3
_ERRORS_BEFORE_WORDS = 10


RayNodes = dict[str, int]
"""The number of devices of the wanted kind that each node of Ray has, by its address."""


def missing_nodes(found: RayNodes, expected: Mapping[str, str], device: str, per_node: int) -> list[str]:
    """Return a sentence for each node that is absent, has another number of devices, or is not of this job.

    `expected` maps addresses to node names.
    """
    sentences = []
    for address, name in expected.items():
        if address not in found:
            sentences.append(f"{name} ({address}) has not joined")
        elif found[address] != per_node:
            sentences.append(f"{name} ({address}) has {found[address]} {device}s instead of {per_node}")
    unexpected = sorted(set(found) - set(expected))
    return [*sentences, *(f"{address} joined but is not of this job" for address in unexpected)]


def parse_line(line: str) -> tuple[int, RayNodes] | None:
    """Return the GCS's port and the nodes that a line tells; None if the line is not of this program."""
    try:
        port, nodes = json.loads(line)["hpc_serve_ray"]
        return int(port), {str(address): int(count) for address, count in nodes.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def watch(folder: str, address: str, device: str, port: str = "") -> None:
    """Print the port, then the nodes, until standard input is closed."""
    while not (gcs_port := int(port or ray_private.read_gcs_port(folder) or 0)):
        if _is_closed(_STEP_S):
            return
    before: RayNodes = {}
    _say(gcs_port, before)
    errors = 0
    while not _is_closed(_STEP_AFTER_ERROR_S if errors else 0.0):
        try:
            with ray_private.listed_nodes(f"{address}:{gcs_port}", as_driver=bool(port)) as list_nodes:
                while True:
                    alive = {at: int(resources.get(device, 0)) for at, resources in list_nodes().items()}
                    if alive != before:
                        _say(gcs_port, alive)
                        before = alive
                    if _is_closed(_STEP_S):
                        return
        except Exception as error:  # its kind differs by version; the GCS may not listen yet
            errors += 1
            if errors == _ERRORS_BEFORE_WORDS:
                print(f"hpc-serve: Ray does not say which nodes it has: {type(error).__name__}: {error}", flush=True)


def _say(gcs_port: int, nodes: RayNodes) -> None:
    """Write a separate line, whatever Ray's head is just writing."""
    os.write(1, f"\n{json.dumps({'hpc_serve_ray': [gcs_port, nodes]})}\n".encode())


def _is_closed(within_s: float) -> bool:
    """Return whether standard input is closed within so many seconds."""
    return bool(select.select([0], [], [], within_s)[0])


if __name__ == "__main__":
    watch(*sys.argv[1:])
