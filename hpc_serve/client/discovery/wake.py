"""Wakes a service that is asleep: runs `hpc-serve wake NAME` as a child process, as a person would.

A client submits nothing itself, and knows services by their records alone. This is the one place where it starts a
process. Of several programs, and of several threads here, one wakes the service.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from hpc_serve.client.replicas.fork import renew_after_fork
from hpc_serve.errors import ServiceAsleepError
from hpc_serve.rendezvous.elastic import read_elastic_or_none
from hpc_serve.rendezvous.store import ServiceStore

# Python imports nothing from the folder it is started in: others may write to it. Python 3.10 has no option for that.
_PROGRAM = "import sys; sys.path[:] = filter(None, sys.path); from hpc_serve.cli.main import main; main()"
_TIMEOUT_S = 180.0  # sbatch is given a minute, and reading how the service is may wait for Slurm as well


class Waker:
    """What a client does about a service that is asleep: it wakes it if it `may_wake`, else it raises."""

    def __init__(self, store: ServiceStore, service: str, *, may_wake: bool) -> None:
        self._store = store
        self._service = service
        self._may_wake = may_wake
        self._lock = threading.Lock()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """In a forked process a thread that is not there may hold the lock."""
        self._lock = threading.Lock()

    def wake_if_asleep(self) -> None:
        """Have the service woken if its file says that it is asleep.

        Raises ServiceAsleepError if this client may not wake it, or if it could not be woken.
        """
        if (why := self._why_asleep()) is None:
            return
        name = self._service
        if not self._may_wake:
            raise ServiceAsleepError(
                f"{name} is asleep{why}. Wake it: connect({name!r}, wait=600, wake=True), or `hpc-serve wake {name}`."
            )
        if not self._lock.acquire(blocking=False):
            return  # another thread is at it
        try:
            if self._why_asleep() is not None:
                self._wake()
        finally:
            self._lock.release()

    def _why_asleep(self) -> str | None:
        found = read_elastic_or_none(self._store, self._service)
        if found is None:
            return None
        died = found.state == "awake" and found.submitting and not found.is_submitting(time.time())
        if died:
            return ": the program that woke it submitted nothing"
        if found.state != "asleep":
            return None
        return f": {found.decided[-1].text}" if found.decided else ""

    def _wake(self) -> None:
        argv = [sys.executable, "-c", _PROGRAM, "wake", self._service]
        environ = os.environ | {"HPC_SERVE_HOME": str(self._store.home)}
        try:
            done = subprocess.run(
                argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServiceAsleepError(f"{self._service} is asleep, and cannot be woken: {error}") from error
        if done.returncode != 0:
            said = done.stderr.strip().removeprefix("error: ")
            raise ServiceAsleepError(f"{self._service} is asleep, and was not woken: {said}")
