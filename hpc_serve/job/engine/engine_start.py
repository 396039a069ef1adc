"""A child of the head's launcher: it imports vLLM's command line, waits for a line on its standard input, and is the
engine from then on.

    python -m hpc_serve.job.engine.engine_start SCRIPT serve MODEL …

SCRIPT is the command `vllm` of this Python's environment (`is_own_script`). The line is JSON: the variables that the
environment still lacks. If no line comes, the launcher has ended, and the child ends too. No part of the command runs
before the line. The imported modules read no word of the command but "--help".
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import sys
from pathlib import Path

VLLM_MODULE = "vllm.entrypoints.cli.main"
_MODULES = (VLLM_MODULE, "vllm.entrypoints.cli.serve")


def main() -> None:
    orders = os.dup(0)  # and nothing that an import starts has it
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    script, environ = sys.argv[1], dict(os.environ)
    sys.argv = sys.argv[1:]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))  # as for the script; it was the working folder
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(os.path.basename(script))  # the name in `top`, as a script has it
    is_imported = _import()
    with open(orders, "rb") as pipe:
        line = pipe.readline()
    if not line:
        return
    told: dict[str, str] = json.loads(line)
    if not is_imported:
        os.execve(script, sys.argv, {**environ, **told})  # the command itself says what is wrong
    os.environ.update(told)  # the rest stays: vLLM sets variables while it is imported
    runpy.run_path(script, run_name="__main__")


def _import() -> bool:
    try:
        for module in _MODULES:
            importlib.import_module(module)
    except (Exception, SystemExit):
        return False
    return True


if __name__ == "__main__":
    main()
