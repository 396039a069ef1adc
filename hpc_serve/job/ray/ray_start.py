"""A child of a launcher: it imports Ray's command line, waits for a line on its standard input, and runs `ray start`.

The line is JSON: the command, the whole environment, and on the head what `ray_nodes` is to watch. Where `ray` is not
the script of this Python's package, the command itself is run. Without a line, the launcher has ended, and so it ends.
Ray's head starts no dashboard and no server for Ray Client here. Nobody uses them, each imports Ray for a second and
more, and Ray waits for the process of its dashboard even where the dashboard is off.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from typing import Any, cast

from hpc_serve.job.machine.own_script import is_own_script
from hpc_serve.job.ray import ray_nodes

_SCRIPT_MODULE = "ray.scripts.scripts"
# Commands of Ray's that are not for starting it, nearly half of the import. It goes on without those it cannot find.
_OTHER_COMMANDS = ("ray.util.state.state_cli", "ray.dashboard.modules.job.cli", "ray.serve.scripts")
_HOOK, _OUR_HOOK = "RAY_START_HOOK", "hpc_serve.job.ray.ray_start.without_unused_servers"


def main() -> None:
    scripts = _import_scripts()
    with open(0, "rb", buffering=0, closefd=False) as orders:
        line = orders.readline()  # and not one byte more: the end of the pipe is for `ray_nodes`
    if not line:
        return
    order = json.loads(line)
    os.environ.clear()
    os.environ.update(order["environ"])
    argv, watch = order["argv"], order["watch"]
    if scripts is None:
        if watch:
            subprocess.Popen([sys.executable, "-u", "-m", ray_nodes.__name__, *watch])
        os.execvp(argv[0], argv)
    if watch:
        ray_nodes.watch_in_thread(*watch)
        os.environ.setdefault(_HOOK, _OUR_HOOK)
    sys.argv = argv
    sys.exit(scripts.main())


def without_unused_servers(ray_params: Any, is_head: bool) -> None:
    """What Ray calls before it starts anything. No word of its command line turns these servers off."""
    del os.environ[_HOOK]
    ray_params.ray_client_server_port = None
    services: Any = importlib.import_module("ray._private.services")
    services.start_api_server = lambda *words, **named: ("", None)  # as where the dashboard could not start


def _import_scripts() -> Any:
    """The module of Ray's command line, if that is what `ray` runs."""
    if not is_own_script(shutil.which("ray"), _SCRIPT_MODULE):
        return None
    modules: dict[str, Any] = cast(Any, sys.modules)
    modules.update(dict.fromkeys(_OTHER_COMMANDS))  # None: an import of it fails
    try:
        return importlib.import_module(_SCRIPT_MODULE)
    except Exception:  # the command itself says what is wrong
        return None
    finally:
        for name in _OTHER_COMMANDS:
            del modules[name]


if __name__ == "__main__":
    main()
