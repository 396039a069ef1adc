"""For fastest.sh: imports Ray at once, and goes on when Ray's control store at RAY_ADDRESS is far enough.

python ray_when.py head -- RAY COMMAND     runs `ray COMMAND` in this process once the head has joined
python ray_when.py NODES -- COMMAND        becomes COMMAND once so many nodes have joined

Ray has a node that joins before the head look again only every two seconds.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

import ray.scripts.scripts
from ray import _raylet

_STEP_S = 0.05


def wait_until_it_listens(address: str) -> None:
    host, port = address.rsplit(":", 1)
    while True:
        with socket.socket() as connection:
            if connection.connect_ex((host, int(port))) == 0:
                return
        time.sleep(_STEP_S)


def wait_for_nodes(address: str, count: int) -> None:
    client: Any = _raylet.GcsClient(  # type: ignore[attr-defined]
        address=address
    )
    while sum(node.state == 0 for node in client.get_all_node_info(timeout=10).values()) < count:
        time.sleep(_STEP_S)


def main() -> None:
    until, words = sys.argv[1], sys.argv[3:]
    address = os.environ["RAY_ADDRESS"]
    wait_until_it_listens(address)
    if until == "head":
        wait_for_nodes(address, 1)
        sys.argv = ["ray", *words]
        ray.scripts.scripts.cli()
    wait_for_nodes(address, int(until))
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
