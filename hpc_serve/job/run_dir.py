"""The run's private folder in the shared home: Ray's token, which all nodes read, and nothing that outlives the run.

The head removes it. One whose head was killed is removed with what that left on its node, or later by any other run,
which has only records to go by: this is no place to ask a scheduler.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import time
from pathlib import Path

from hpc_serve.errors import HpcServeError
from hpc_serve.job.allocation import Allocation
from hpc_serve.rendezvous.store import ABANDONED_AFTER_S, WEEK_S, ServiceStore

_NAME = re.compile(r"(?P<run>.+-r\d+)-[0-9a-f]{8}")


def make_job_dir(home: Path, allocation: Allocation) -> Path:
    """The run's private folder (0700) with Ray's token (0600) in it."""
    jobs = home / "jobs"
    jobs.mkdir(mode=0o700, parents=True, exist_ok=True)
    job_dir = jobs / f"{allocation.run_name}-{secrets.token_hex(4)}"
    job_dir.mkdir(mode=0o700)
    descriptor = os.open(job_dir / "ray_token", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "w") as token:
        token.write(secrets.token_hex(32))
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
    with contextlib.suppress(OSError):
        seen = os.lstat(path)
        return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid() and not seen.st_mode & 0o077
    return False
