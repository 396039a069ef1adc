"""Wakes a service that is asleep: runs `hpc-serve wake NAME` as a child process, as a person would type it.

A client submits nothing itself, and knows services by their records alone. Of several programs, and of several threads
here, one wakes the service.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hpc_serve.client.replicas.event_loops import renew_after_fork
from hpc_serve.errors import HpcServeError, ServiceAsleepError
from hpc_serve.rendezvous.claims import read_wanted_or_none
from hpc_serve.rendezvous.store import ServiceStore

# Python imports nothing from the folder it is started in: others may write to it. Python 3.10 has no option for that.
_PROGRAM = "import sys; sys.path[:] = filter(None, sys.path); from hpc_serve.cli.main import main; main()"
_TIMEOUT_S = 400.0  # sbatch is given a minute, and reading how the service is may wait for Slurm as well

_LOOK_AGAIN_S = 60.0


class CommandFailedError(HpcServeError):
    """The command did not do its work; the text is what it said."""


def run_command(words: Sequence[str], home: Path) -> str:
    """Run `hpc-serve WORDS` with this home; return what it printed. Raises CommandFailedError."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, *words],
            env=os.environ | {"HPC_SERVE_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandFailedError(str(error)) from error
    if done.returncode != 0:
        raise CommandFailedError(done.stderr.strip().removeprefix("error: "))
    return done.stdout


class Waker:
    """What a client does about a service that is asleep: it wakes it if it `may_wake`, else it raises."""

    def __init__(self, store: ServiceStore, service: str, *, may_wake: bool) -> None:
        self._store = store
        self._service = service
        self._may_wake = may_wake
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """In a forked process a thread that is not there may hold the lock."""
        self._lock = threading.Lock()

    def wake_if_asleep(self, *, is_pending: bool) -> bool:
        """Have the service woken if its file says that it is asleep; whether it is coming, as far as that tells.

        Where jobs wait that published nothing (`is_pending`), Slurm may know that they ended: the service is looked
        after then, once a minute. Raises ServiceAsleepError if it may not, or could not, be woken.
        """
        found, now = read_wanted_or_none(self._store, self._service), time.time()
        if found is None or found.state not in ("awake", "asleep"):
            return False
        was_given_up = found.state == "awake" and bool(found.submitting) and not found.is_submitting(now)
        if found.state == "awake" and not was_given_up:
            if is_pending and self._may_wake and abs(now - found.looked_at) > _LOOK_AGAIN_S:
                return self._wake_once()
            return found.is_submitting(now)
        if not self._may_wake:
            name, why = self._service, f": {found.decided[-1].why}" if found.decided else ""
            why = ": the program that woke it submitted nothing" if was_given_up else why
            raise ServiceAsleepError(
                f"{name} is asleep{why}. Wake it: connect({name!r}, wait=600, wake=True), or `hpc-serve wake {name}`."
            )
        return self._wake_once()

    def _wake_once(self) -> bool:
        if self._lock.acquire(blocking=False):  # else another thread is at it
            try:
                run_command(["wake", self._service], self._store.home)
            except CommandFailedError as error:
                raise ServiceAsleepError(f"{self._service} is asleep, and was not woken: {error}") from error
            finally:
                self._lock.release()
        return True
