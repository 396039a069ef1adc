"""How the programs inside a job log: each line has time, node and level. The engine's and Ray's lines stay as they are.

Every module logs to a logger of its own name, and decides what it logs and at which level.
"""

from __future__ import annotations

import logging
import os
from typing import TextIO

from hpc_serve.job.machine.allocation import node_name


def set_up_logging(stream: TextIO) -> None:
    """Write what hpc-serve logs in this process to `stream`, from level INFO on."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        logging.Formatter(
            "%(asctime)s %(node)s %(levelname)s hpc-serve: %(message)s",
            datefmt="%Y-%m-%d %H:%M:%S",
            defaults={"node": node_name(os.environ)},
        )
    )
    logger = logging.getLogger("hpc_serve")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)


def print_line(line: str) -> None:
    """Print a line of a child unchanged."""
    print(line, flush=True)
