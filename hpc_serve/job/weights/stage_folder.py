"""The folder of a node below which copies of models lie (HPC_SERVE_STAGE). Copies that no run uses are removed here."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from hpc_serve.errors import InvalidRequestError
from hpc_serve.job.machine.guarded_folders import remove_unused as remove_unused_folders
from hpc_serve.rendezvous.ownership import fault

VARIABLE = "HPC_SERVE_STAGE"
_OFF, _ON = ("", "0", "off", "no", "false"), ("1", "on", "yes", "true")
_NAME = re.compile(r"[0-9a-f]{16}")


def stage_base(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the node below which copies lie; None where none are wanted. Raises InvalidRequestError."""
    text = environ.get(VARIABLE, "")
    if text.lower() in _OFF:
        return None
    if text.lower() in _ON:
        text = environ.get("HPC_SERVE_TMPDIR") or "/tmp"
    if not text.startswith("/"):
        raise InvalidRequestError(f"{VARIABLE}={text}: it must be on, off, or a folder of the node, as /dev/shm.")
    return Path(text)


def remove_unused(environ: Mapping[str, str]) -> list[Path]:
    """Remove the copies that no run on this node uses; return them."""
    with contextlib.suppress(InvalidRequestError, OSError):
        base = stage_base(environ)
        roots = base.glob("hpc-serve-stage-*") if base is not None else ()
        private = [one for one in roots if fault(one, "private") is None]
        return [copy for root in private for copy in remove_unused_folders(root, _NAME)]
    return []
