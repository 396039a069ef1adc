"""Programs that ask a service all the time, and what `status` says of it meanwhile."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.cluster import wait_for
from tests.e2e.jobs import User

ASKING = Path(__file__).with_name("keep_asking.py")
STUB_WORDS = "--stub-slots 2 --stub-words 10 --stub-word-s 0.2"  # two requests at once, two seconds for an answer
MOST_S = 300.0


class WantedSeen:
    """What `status` tells of a service, look by look."""

    def __init__(self, alice: User, service: str) -> None:
        self._alice = alice
        self._service = service
        self.decided: list[str] = []
        self.causes: set[tuple[str, str]] = set()
        self.state = ""
        self.count = 0

    def look(self) -> dict[str, list[str]]:
        """The states of the replicas of each job that is not over."""
        told = json.loads(self._alice.hpc_serve_said("status", self._service, "--json"))
        wanted = told["wanted"][self._service]
        self.state, self.count = wanted["state"], wanted["count"]
        self.decided += [one["text"] for one in wanted["decided"] if one["text"] not in self.decided]
        self.causes |= {(one["action"], one["cause"]) for one in wanted["decided"]}
        live: dict[str, list[str]] = {}
        for one in told["services"]:
            if one["state"] not in ("stopped", "failed"):
                live.setdefault(one["job_id"], []).append(one["state"])
        return live

    def wait_until(self, is_so: Callable[[], bool], *, what: str, timeout_s: float = MOST_S) -> None:
        """Wait until it is so. The error has what was decided, the last status and the logs."""
        try:
            wait_for(is_so, timeout_s, what=what)
        except TimeoutError as error:
            said = self._alice.hpc_serve("status", self._service, "--all").stdout
            logs = self._alice.log(self._service, "")
            raise TimeoutError("\n".join([str(error), *self.decided, said, logs])) from None

    def ready(self) -> list[str]:
        """The jobs of which all replicas are ready."""
        return [job_id for job_id, states in self.look().items() if set(states) == {"ready"}]

    def has_decided(self, action: str, cause: str) -> bool:
        self.look()
        return (action, cause) in self.causes


class Asking:
    """Alice's programs that ask a service all the time (keep_asking.py)."""

    def __init__(self, alice: User) -> None:
        self._alice = alice
        self._programs: list[subprocess.Popen] = []

    def start(self, threads: int, service: str, *model: str) -> subprocess.Popen:
        argv = [sys.executable, str(ASKING), service, str(threads), *model]
        program = self._alice.cluster.popen(argv, user="alice", env=dict(self._alice.environ))
        self._programs.append(program)
        assert program.stdout.readline().strip() == "connected", program.stdout.read()
        return program

    def end(self) -> None:
        """Kill what a failed test left."""
        for program in self._programs:
            if program.poll() is None:
                program.kill()
                program.wait()


def told_at_the_end(program: subprocess.Popen) -> dict:
    """What the program says once it is told to end; it has had an answer by then."""
    program.send_signal(signal.SIGTERM)
    try:
        out, _ = program.communicate(timeout=MOST_S)
    except subprocess.TimeoutExpired:
        program.send_signal(signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):
            program.communicate(timeout=5)
        program.kill()
        out, _ = program.communicate()
        raise AssertionError(f"it does not end: {out}") from None
    return json.loads(out.splitlines()[-1])
