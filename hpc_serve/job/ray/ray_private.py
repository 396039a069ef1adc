"""The private names of Ray that a start uses. This is the only module that uses any.

They spare a start several seconds. `ray_start` and `ray_nodes` look for them in the installed Ray before they use one.
If a name is missing, the plain command `ray start` runs, and Ray's public functions list the nodes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

COMMAND_LINE = "ray.scripts.scripts"
"""The module that the command `ray` runs."""
_HOOK, _OUR_HOOK = "ray._private.ray_constants:RAY_START_HOOK", f"{__name__}.without_unused_servers"
_MAIN, _START_DASHBOARD = f"{COMMAND_LINE}:main", "ray._private.services:start_api_server"
_PORT_FILE = "ray._raylet:GCS_SERVER_PORT_NAME"
_LIST_NODES = ("ray._raylet:GcsClient", "ray._raylet:InnerGcsClient.get_all_node_info")  # the first calls the second
NAMES = (_MAIN, _HOOK, _START_DASHBOARD, _PORT_FILE, *_LIST_NODES)
"""All names that a start uses."""
# Commands of Ray that do not start it, nearly half of the import. Ray goes on if it cannot find them.
_OTHER_COMMANDS = ("ray.util.state.state_cli", "ray.dashboard.modules.job.cli", "ray.serve.scripts")
_ALIVE = 0

ListNodes = Callable[[], Mapping[str, Mapping[str, float]]]
"""Returns the resources of each node that is alive, by its address."""


def missing_names() -> list[str]:
    """Return those of the names that the installed Ray does not have, with dots."""
    return [name.replace(":", ".") for name in NAMES if not _has(name)]


def _has(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except Exception:  # an import of another version of Ray may raise anything
        return False
    return True


def import_command_line() -> None:
    """Import Ray's command line without the commands that do not start Ray. Raises what the import raises."""
    modules: dict[str, Any] = cast(Any, sys.modules)
    modules.update(dict.fromkeys(_OTHER_COMMANDS))  # None: an import of it fails
    try:
        importlib.import_module(COMMAND_LINE)
    finally:
        for name in _OTHER_COMMANDS:
            del modules[name]


def run_command_line(argv: Sequence[str], *, is_head: bool) -> int:
    """Run `ray start` in this process, on the head without servers that nobody uses."""
    if is_head:
        os.environ.setdefault(pkgutil.resolve_name(_HOOK), _OUR_HOOK)
    sys.argv = list(argv)
    return cast(int, pkgutil.resolve_name(_MAIN)())


def without_unused_servers(ray_params: Any, is_head: bool) -> None:
    """Leave out Ray's dashboard and the server of Ray Client. Ray calls this before it starts anything.

    No option of Ray's command line turns these servers off. Each imports Ray for more than a second, and Ray waits for
    the process of its dashboard even where the dashboard is off.
    """
    del os.environ[pkgutil.resolve_name(_HOOK)]
    ray_params.ray_client_server_port = None
    services: Any = importlib.import_module(_START_DASHBOARD.partition(":")[0])
    services.start_api_server = lambda *words, **named: ("", None)  # as where the dashboard could not start


def read_gcs_port(temp_dir: str) -> int | None:
    """Return the port of the GCS below Ray's folder; None until the GCS listens."""
    for path in Path(temp_dir).glob("session_latest/gcs_server_port*"):
        with contextlib.suppress(OSError, ValueError):
            return int(path.read_text())
    return None


@contextlib.contextmanager
def listed_nodes(gcs: str, *, as_driver: bool) -> Iterator[ListNodes]:
    """Ask the GCS at "address:port" for its nodes: by public names as its driver, or by its private client."""
    if not as_driver:
        client: Any = importlib.import_module("ray._raylet").GcsClient(address=gcs)
        yield lambda: {
            node.node_manager_address: node.resources_total
            for node in client.get_all_node_info(timeout=10).values()
            if node.state == _ALIVE
        }
        return
    ray: Any = importlib.import_module("ray")
    try:
        ray.init(address=gcs, log_to_driver=False)
        yield lambda: {node["NodeManagerAddress"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    finally:
        ray.shutdown()
