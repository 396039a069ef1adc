"""Finds the folder that takes the place of a model's weights (HPC_SERVE_MODEL), for `submit` and for the job alike.

It only reads. `hpc_serve.vllm` decides what the words of its file of arguments mean, and which may be used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous.ownership import check_args_file
from hpc_serve.vllm.arguments import ARGS_FILE, read_args_file
from hpc_serve.vllm.command import StandIn


def find_stand_in(environ: Mapping[str, str]) -> StandIn | None:
    """Return the folder that HPC_SERVE_MODEL names, with its arguments; None where the variable is not set.

    Raises InvalidRequestError where it is no folder, or its file of arguments cannot be used or is another user's to
    write.
    """
    named = environ.get("HPC_SERVE_MODEL")
    if not named:
        return None
    folder = Path(named)
    if not folder.is_dir():
        raise InvalidRequestError(f"HPC_SERVE_MODEL={folder} is not a folder that this node can see.")
    return StandIn(folder=named, args=read_args_file(_text(folder / ARGS_FILE)))


def _text(path: Path) -> str:
    try:
        # O_NONBLOCK: a pipe in the file's place must not hang its reader.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
            check_args_file(path, os.fstat(file.fileno()))
            return file.read()
    except FileNotFoundError:
        return ""
    except InvalidRequestError:  # another user can write it
        raise
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}.") from error
