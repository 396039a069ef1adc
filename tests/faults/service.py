"""A running service to break, on this machine: real launchers, each with a stub engine, started by `hpc-serve submit`.

`vllm` is the stub (tests/support/stub_engine.py) in the environment that the jobs use. How the parts of a replica are
found, and how the load is started and read, is here too; `slurm_service` does the same on the test cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster import processes, wait_for
from tests.cluster.config import CHECKOUT
from tests.faults.fault import Fault
from tests.faults.gateways import MODULE as GATEWAY
from tests.support.stub_engine import WORKER

STUB = CHECKOUT / "tests" / "support" / "stub_engine.py"
TOKENS = 40
IN_FLIGHT = 16
START_S = 400.0
READY_AGAIN_S = 180.0


def hold(seconds: float, meanwhile: Callable[[], object] = lambda: None, *, step_s: float = 0.2) -> None:
    """Let a fault last, and do something at each step."""
    until = time.monotonic() + seconds

    def is_over() -> bool:
        meanwhile()
        return time.monotonic() >= until

    wait_for(is_over, seconds + 60, what="the end of a fault", step_s=step_s)


class Service:
    """A service of stub replicas in a folder of its own, and the load on it.

    `hold_s` is how long a fault lasts. A request that takes `bound_s` longer than its tokens do twice, as an answer may
    begin anew, is taken for hung.
    """

    def __init__(self, folder: Path, model: Path, fault: Fault, *, hold_s: float, bound_s: float) -> None:
        self.folder, self.model, self.fault, self.name = folder, model, fault, fault.name
        self.hold_s = hold_s
        self.bound_s = bound_s + (hold_s if fault.hides_records else 0) + 2 * TOKENS * fault.token_s
        self.jobs: list[str] = []
        self.broken_at: float | None = None  # when the fault itself happened (monotonic), if it had to be waited for
        self.work = folder / "work"
        self.python = sys.executable
        self._load: subprocess.Popen[str] | None = None
        for path in (self.work, self.out.parent, self.mount):
            path.mkdir(parents=True, exist_ok=True)
        self.environment = self.make_environment("env")

    # -- what differs between this machine and a cluster

    def run(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a user's command to its end."""
        environ = {**self.whole_environ, **(env or {})}
        return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=300, check=False)

    def popen(self, argv: Sequence[str]) -> subprocess.Popen[str]:
        """Start a user's program."""
        return subprocess.Popen(
            argv,
            env=self.whole_environ,
            cwd=CHECKOUT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def popen_stranger(self, argv: Sequence[str]) -> tuple[subprocess.Popen[str], str]:
        """Start a program of another user where the load can reach it; it and its address."""
        return self.popen(argv), "127.0.0.1"

    @property
    def mount(self) -> Path:
        """The folder that is a shared filesystem, with the home in it."""
        return self.folder / "mount"

    @property
    def home(self) -> Path:
        return self.mount / "home"

    def submit_options(self, place: int) -> tuple[str, ...]:
        """Where the replica at this place is to run."""
        return ("--cluster", "local", "--gpu", "cpu", "--gpu-memory", "2GiB")

    def submit_environ(self, place: int) -> Mapping[str, str]:
        """Further variables for the submission of the replica at this place."""
        return {}

    def pids(self) -> Iterator[int]:
        """The processes that may be of the service."""
        return processes.pids()

    # -- the service

    @property
    def environ(self) -> dict[str, str]:
        return {
            "HPC_SERVE_HOME": str(self.home),
            "HPC_SERVE_ENV": str(self.environment),
            "HPC_SERVE_CANARY_S": "5",  # as on accelerators
            "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        }

    @property
    def whole_environ(self) -> dict[str, str]:
        """The environment of a user's program."""
        return {**os.environ, **self.environ}

    def make_environment(self, name: str, activate: str = "") -> Path:
        """A Python environment for jobs whose `vllm` is the stub; `activate` are further lines of its script."""
        folder = self.folder / name / "bin"
        folder.mkdir(parents=True)
        _write(folder / "activate", f"export PATH={folder}:{sys.prefix}/bin:$PATH\n{activate}")
        _write(folder / "vllm", f'#!/bin/sh\nexec {self.python} {STUB} "$@"\n', mode=0o755)
        return folder.parent

    def hpc_serve(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        done = self.run(["hpc-serve", *words], env=env)
        if done.returncode != 0:
            raise RuntimeError(f"hpc-serve {' '.join(words)} ended with {done.returncode}: {done.stderr}{done.stdout}")
        return done.stdout

    def start(self, replicas: int = 2) -> None:
        """Start replicas and wait until all are ready."""
        for place in range(len(self.jobs), len(self.jobs) + replicas):
            self.jobs.append(self.submit(place))
        self._await(self._all_ready, f"{replicas} replicas")

    def _await(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for a start; one that does not come is told with what there is of it, as it is gone afterwards."""
        try:
            wait_for(is_so, START_S, what=what, step_s=1.0)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.told()}") from None

    def told(self) -> str:
        """What the service and its logs say of it."""
        logs = sorted((self.service_folder / "logs").rglob("*"))
        ends = (f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.is_file())
        return "\n".join([self.run(["hpc-serve", "status", self.name]).stdout, *ends])

    def submit(self, place: int) -> str:
        """Submit the replica at this place; returns its job's id."""
        args = ["--stub-greedy", "--stub-words", str(TOKENS), "--stub-word-s", str(self.fault.token_s)]
        args += ["--stub-work-log", str(self.work), *(["--stub-worker"] if self.fault.has_worker else [])]
        args += ["--stub-hang-file", str(self.hang_file(place)), "--stub-slots", str(self.fault.slots)]
        args += ["--stub-step-file", str(self.step_file(place))]
        model = ("--model", str(self.model), "--name", self.name)
        sequences = ("--max-num-seqs", str(self.fault.slots)) if self.fault.is_batch else ()
        options = (*model, *self.submit_options(place), "--", "--max-model-len", "2048", *sequences)
        said = self.hpc_serve(
            "submit", *options, env={"STUB_ENGINE_ARGS": " ".join(args), **self.submit_environ(place)}
        )
        found = re.search(r"submitted as job (\S+)", said)
        assert found, said
        return found[1]

    def states(self) -> dict[str, str]:
        """How each replica is, by job."""
        replicas = json.loads(self.hpc_serve("status", self.name, "--json"))["services"]
        return {replica["job_id"]: replica["state"] for replica in replicas}

    def _all_ready(self) -> bool:
        states = self.states()
        if failed := [job for job in self.jobs if states.get(job) in ("failed", "stopped")]:
            raise RuntimeError(f"a replica ended: {self.hpc_serve('status', failed[0])}")
        return all(states.get(job) == "ready" for job in self.jobs)

    def count_ready(self, due: int) -> int:
        """How many replicas are ready; waits a while until so many are."""

        seen = [0]

        def are_there() -> bool:
            seen[0] = list(self.states().values()).count("ready")
            return seen[0] >= due

        with contextlib.suppress(TimeoutError):
            wait_for(are_there, READY_AGAIN_S, what=f"{due} replicas", step_s=1.0)
        return seen[0]

    def close(self) -> None:
        """End the load and every replica."""
        if self._load is not None:
            with self._load:
                self._load.kill()
        self.signal(self.gateways(), signal.SIGKILL)
        for job in self.jobs:
            self.signal(self.processes_of(job), signal.SIGCONT)
        self.run(["hpc-serve", "stop", self.name, "--timeout", "60"])
        for job in self.jobs:
            self.signal(self.processes_of(job), signal.SIGKILL)

    # -- its parts

    def hang_file(self, place: int) -> Path:
        """While this file exists the engine at this place makes no token."""
        return self.folder / f"hang-{place}"

    def step_file(self, place: int) -> Path:
        """While this file exists the engine at this place is in one long step: alive, and without a token."""
        return self.folder / f"step-{place}"

    @property
    def service_folder(self) -> Path:
        return self.home / "services" / self.name

    def records(self) -> list[Path]:
        """The files of the replicas' records."""
        others = ("service.json", "wanted.json")
        return [path for path in self.service_folder.glob("*.json") if path.name not in others]

    def processes_of(self, job: str) -> list[int]:
        """The live processes that run in a replica's job."""
        return processes.of_job(job, self.pids())

    def engine(self, place: int) -> list[int]:
        return self._parts(place, lambda argv: str(STUB) in argv and "serve" in argv)

    def worker(self, place: int) -> list[int]:
        return self._parts(place, lambda argv: argv[-1:] == (WORKER,))

    def launcher(self, place: int) -> list[int]:
        return self._parts(place, lambda argv: argv[1:3] == ("-m", "hpc_serve.job"))

    def _parts(self, place: int, is_part: Callable[[tuple[str, ...]], bool]) -> list[int]:
        found = [pid for pid in self.processes_of(self.jobs[place]) if is_part(processes.argv_of(pid))]
        assert found, f"replica {place} has no such process"
        return found

    def signal(self, pids: Sequence[int], number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # -- the load

    @property
    def out(self) -> Path:
        """The load's lines."""
        return self.folder / "load" / "lines.jsonl"

    def load_argv(self, *options: str) -> list[str]:
        bound = ["--bound", str(self.bound_s), "--tokens", str(TOKENS), "--gateways", str(self.fault.gateways)]
        if self.fault.replicas == 1:  # there is nothing to wait for once it has ended
            bound += ["--wait", "0"]
        return [self.python, "-m", "tests.faults.load", self.name, "--out", str(self.out), *bound, *options]

    def start_load(self, in_flight: int = IN_FLIGHT) -> None:
        """Start the load and wait until it has had answers."""
        self._load = self.popen(self.load_argv("--in-flight", str(in_flight)))
        wait_for(lambda: self._is_loaded(in_flight), START_S, what="the load's first answers")

    def load_pids(self) -> list[int]:
        """The load's own processes."""
        argv = tuple(self.load_argv()[1:5])
        return [pid for pid in self.pids() if processes.argv_of(pid)[1:5] == argv and self._is_mine(pid)]

    def gateways(self) -> list[int]:
        """The gateways that the load's user has started."""
        mine = f"HPC_SERVE_HOME={self.home}".encode()
        return [
            pid for pid in self.pids() if processes.argv_of(pid)[1:4] == GATEWAY and mine in processes.environ_of(pid)
        ]

    def _is_mine(self, pid: int) -> bool:
        return str(self.out) in processes.argv_of(pid)

    def _is_loaded(self, answers: int) -> bool:
        assert self._load is not None
        if self._load.poll() is not None:
            assert self._load.stdout is not None
            raise RuntimeError(f"the load ended: {self._load.stdout.read()}")
        return len(read_lines(self.out)) >= answers

    def finish_load(self) -> None:
        """End the load in order: every request gets its outcome."""
        assert self._load is not None
        self._load.terminate()
        self._load.wait(timeout=self.bound_s + 300)

    def lines(self) -> list[dict[str, Any]]:
        return read_lines(self.out)

    def work_lines(self) -> list[dict[str, Any]]:
        """What the engines wrote down."""
        return [line for path in self.work.glob("*.jsonl") for line in read_lines(path)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file that may be written to; a line that is not whole yet is left out."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _write(path: Path, text: str, *, mode: int = 0o644) -> None:
    path.write_text(text)
    path.chmod(mode)
