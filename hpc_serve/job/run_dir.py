"""The run's private folder in the shared home: Ray's token, which all nodes read, and nothing that outlives the run.

The head removes it. One whose head was killed is removed with what that left on its node, or later by any other run,
which has only records to go by: this is no place to ask a scheduler.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import time
from pathlib import Path

from hpc_serve.errors import HpcServeError
from hpc_serve.job.allocation import Allocation
from hpc_serve.rendezvous.files import create_private, make_private_folder
from hpc_serve.rendezvous.ownership import fault
from hpc_serve.rendezvous.store import ABANDONED_AFTER_S, WEEK_S, ServiceStore

_NAME = re.compile(r"(?P<run>.+-r\d+)-[0-9a-f]{8}")


def make_job_dir(home: Path, allocation: Allocation) -> Path:
    """The run's private folder (0700) with Ray's token (0600) in it.

    Raises StoreError if it cannot be made, or if somebody else can change what is in a folder above it.
    """
    make_private_folder(home, tighten=False)
    jobs = make_private_folder(home / "jobs")
    job_dir = jobs / f"{allocation.run_name}-{secrets.token_hex(4)}"
    job_dir.mkdir(mode=0o700)
    create_private(job_dir / "ray_token", secrets.token_hex(32))
    return job_dir


def remove_job_dir(path: Path) -> None:
    """Remove a folder that `make_job_dir` made; anything else of that name stays."""
    if path.parent.name == "jobs" and _NAME.fullmatch(path.name) and is_private_folder(path):
        shutil.rmtree(path, ignore_errors=True)


def sweep_job_dirs(store: ServiceStore) -> None:
    """Remove the folders of runs that are over: their record says so since ABANDONED_AFTER_S, or is a week old."""
    with contextlib.suppress(HpcServeError, OSError):
        now = time.time()
        old = [path for path in (store.home / "jobs").iterdir() if now - path.stat().st_mtime > ABANDONED_AFTER_S]
        records = [record for name in store.services() for record in store.read(name).records] if old else []
        heard_of = {f"{record.job_id}-r{record.restart}": record for record in records}
        for path in old:
            match = _NAME.fullmatch(path.name)
            record = heard_of.get(match["run"]) if match else None
            changed_at = record.updated_at if record else path.stat().st_mtime
            if now - changed_at > (ABANDONED_AFTER_S if record and record.is_final else WEEK_S):
                remove_job_dir(path)


def is_private_folder(path: Path) -> bool:
    """Whether it is a folder, no link to one, of this user alone."""
    return path.is_dir() and not path.is_symlink() and fault(path, "private") is None
