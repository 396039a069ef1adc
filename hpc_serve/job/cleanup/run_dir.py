"""The run's private folder in the shared home. It holds what all nodes read: Ray's token, and the port where the head's
launcher listens.

The head removes it at the end of the run. If the head was killed, its sweep process removes it (`sweep`), or a later
run does. A later run decides by the records, because the code inside a job calls no Slurm command.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from pathlib import Path

from hpc_serve.errors import HpcServeError, StoreError
from hpc_serve.job.machine.allocation import Allocation
from hpc_serve.rendezvous.files import create_private, make_private_folder, read_private
from hpc_serve.rendezvous.names import run_name
from hpc_serve.rendezvous.ownership import fault
from hpc_serve.rendezvous.store import ABANDONED_AFTER_S, WEEK_S, ServiceStore

_CONTROL_PORT = "control_port"
_NAME = re.compile(r"(?P<run>.+-r\d+(?:-\d+)?)-[0-9a-f]{8}")


def make_run_dir(home: Path, allocation: Allocation) -> Path:
    """Make the run's private folder (0700) with Ray's token (0600) in it.

    Raises StoreError if it cannot be made, or if another user can change what is in a folder above it.
    """
    make_private_folder(home, tighten=False)
    jobs = make_private_folder(home / "jobs")
    run_dir = jobs / f"{allocation.run_name}-{secrets.token_hex(4)}"
    run_dir.mkdir(mode=0o700)
    create_private(run_dir / "ray_token", secrets.token_hex(32))
    # Empty, and written in place: a file that was missing, or is replaced, may stay so for half a minute over NFS.
    create_private(run_dir / _CONTROL_PORT, "")
    return run_dir


def write_control_port(run_dir: Path, port: int) -> None:
    """Tell the other nodes where the head's launcher listens. Raises StoreError."""
    path = run_dir / _CONTROL_PORT
    try:
        with path.open("r+") as file:
            file.write(f"{port}\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}.") from error


def read_control_port(run_dir: Path) -> int | None:
    """Return the port where the head's launcher listens; None until it is written. Raises StoreError, RecordError."""
    try:
        text = read_private(run_dir / _CONTROL_PORT)
    except FileNotFoundError:
        return None
    return int(text) if text.endswith("\n") else None


def remove_run_dir(path: Path) -> None:
    """Remove a folder that `make_run_dir` has made. A path that it cannot have made stays."""
    if path.parent.name == "jobs" and _NAME.fullmatch(path.name) and is_private_folder(path):
        shutil.rmtree(path, ignore_errors=True)


def remove_old_run_dirs(store: ServiceStore) -> None:
    """Remove the folders of runs that are over.

    A run is over if its record has been final for ABANDONED_AFTER_S, or has not changed for a week. A folder without a
    record is removed after a week.
    """
    with contextlib.suppress(HpcServeError, OSError):
        now = time.time()
        old = [path for path in (store.home / "jobs").iterdir() if now - path.stat().st_mtime > ABANDONED_AFTER_S]
        records = [record for name in store.services() for record in store.read(name).records] if old else []
        by_run = {run_name(record.job_id, record.restart, record.replica): record for record in records}
        for path in old:
            match = _NAME.fullmatch(path.name)
            record = by_run.get(match["run"]) if match else None
            changed_at = record.updated_at if record else path.stat().st_mtime
            if now - changed_at > (ABANDONED_AFTER_S if record and record.is_final else WEEK_S):
                remove_run_dir(path)


def is_private_folder(path: Path) -> bool:
    """Return whether `path` is a folder that only this user can enter, and not a link to one."""
    return path.is_dir() and not path.is_symlink() and fault(path, "private") is None
