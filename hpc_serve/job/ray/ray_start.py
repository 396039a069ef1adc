"""A child of a launcher: it imports Ray's command line, waits for a line on its standard input, and runs `ray start`.

The line is JSON: the command, the whole environment, and on the head the arguments of `ray_nodes`. If no line comes,
the launcher has ended, and this program ends too. The plain command runs in two cases: `ray` is not the script of this
Python's package, or the installed Ray lacks a private name (`ray_private`). The log then says which name.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading

from hpc_serve.job.machine.network import choose_port
from hpc_serve.job.machine.process import is_own_script
from hpc_serve.job.ray import ray_nodes, ray_private


def main() -> None:
    is_in_process = _prepare()
    with open(0, "rb", buffering=0, closefd=False) as orders:
        line = orders.readline()  # and not one byte more: the end of the pipe is for `ray_nodes`
    if not line:
        return
    order = json.loads(line)
    os.environ.clear()
    os.environ.update(order["environ"])
    argv, watch = order["argv"], order["watch"]
    if is_in_process:
        if watch:
            threading.Thread(target=ray_nodes.watch, args=watch, name="ray nodes", daemon=True).start()
        sys.exit(ray_private.run_command_line(argv, is_head=bool(watch)))
    if watch:
        if ray_private.missing_names():  # a port in a command line is one that a stranger can take
            port = choose_port()
            argv = [f"--port={port}" if word == "--port=0" else word for word in argv]
            watch = [*watch, str(port)]
        subprocess.Popen([sys.executable, "-u", "-m", ray_nodes.__name__, *watch])
    os.execvp(argv[0], argv)


def _prepare() -> bool:
    """Import Ray's command line; return whether `ray start` can run in this process."""
    if not is_own_script(shutil.which("ray"), ray_private.COMMAND_LINE):
        return False
    try:
        ray_private.import_command_line()
    except Exception as error:  # the command itself says what is wrong
        _say(f"{ray_private.COMMAND_LINE} cannot be imported without Ray's other commands ({error})")
        return False
    if missing := ray_private.missing_names():
        _say(f"this Ray has no {', '.join(missing)}")
    return not missing


def _say(reason: str) -> None:
    print(f"hpc-serve: {reason}: the command `ray start` runs, which takes some seconds longer", flush=True)


if __name__ == "__main__":
    main()
