"""A running service to break, on the test cluster: jobs of a real Slurm that a user submits, one node for each.

The load is a program of the same user on the login host. Its output and the engines' work logs are in a folder that is
not in the user's home, so that they can be written while the home is away.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.cluster import SlurmCluster, processes, wait_for
from tests.cluster.config import CHECKOUT
from tests.cluster.environment import user_environment
from tests.cluster.hosts import run_as_root
from tests.faults.fault import Fault
from tests.faults.filesystems import LaggingFilesystem, OwnFilesystem
from tests.faults.service import Service

SHIFTED_CLOCK = Path(__file__).with_name("shifted_clock.c")
USER = "alice"
STRANGER = "mallory"
GONE_S = 90.0  # KillWait is 30 s


class SlurmService(Service):
    """Replica k runs on node k + 1. What a fault needs of the home and of the first replica is there from the start."""

    def __init__(self, cluster: SlurmCluster, model: Path, fault: Fault, *, bound_s: float) -> None:
        self.cluster = cluster
        folder = cluster.shared / "faults" / fault.name
        super().__init__(folder, model, fault, hold_s=fault.hold_s, bound_s=bound_s)
        for path in (self.work, self.out.parent):
            path.chmod(0o777)
        self.first_environment = self.make_environment("first-env", self._shift_clock() if fault.clock_s else "")
        self.filesystem: OwnFilesystem | LaggingFilesystem | None = None
        if fault.filesystem:
            kind = OwnFilesystem if fault.filesystem == "own" else LaggingFilesystem
            self.filesystem = kind(cluster, self.mount)
            self.home.mkdir(mode=0o700)
            os.chown(self.home, *[cluster.user_id(USER)] * 2)

    def run(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        environ = {**self.environ, **(env or {})}
        return self.cluster.run(argv, user=USER, env=environ, cwd="/tmp", timeout=180)

    def popen(self, argv: Sequence[str]) -> subprocess.Popen[str]:
        return self.cluster.popen(argv, user=USER, node=self.fault.load_node, env=self.environ, cwd=CHECKOUT)

    def popen_stranger(self, argv: Sequence[str]) -> tuple[subprocess.Popen[str], str]:
        node = self.cluster.nodes[-1]
        program = self.cluster.popen(argv, user=STRANGER, node=node, env=user_environment(), cwd=CHECKOUT)
        return program, self.cluster.address(node)

    @property
    def mount(self) -> Path:
        return self.folder / "mount" if self.fault.filesystem else self.cluster.home(USER)

    @property
    def home(self) -> Path:
        return self.mount / ".hpc-serve"

    @property
    def environ(self) -> dict[str, str]:
        ours = {"HPC_SERVE_ENV": str(self.environment), "HPC_SERVE_HOME": str(self.home)}
        return {**user_environment(), **ours}

    def _shift_clock(self) -> str:
        library = self.folder / "shifted_clock.so"
        run_as_root(["gcc", "-shared", "-fPIC", "-o", str(library), str(SHIFTED_CLOCK), "-ldl"])
        return f"export LD_PRELOAD={library} SHIFTED_CLOCK_S={self.fault.clock_s}\n"

    def start(self, replicas: int = 2) -> None:
        if not self.fault.bounds:
            super().start(replicas)
            return
        self.submit(0)
        self._await(lambda: self.count_ready(replicas) == replicas, f"{replicas} replicas")
        self.jobs = sorted(self.states())

    def told(self) -> str:
        """The same, with what Slurm says of its jobs and nodes, and what runs on them."""
        said = [self.cluster.run(argv, user=USER).stdout for argv in (["scontrol", "show", "job"], ["sinfo", "--long"])]
        running = [
            f"{one.host} {one.pid} {' '.join(processes.argv_of(one.pid))}" for one in self.cluster.processes(USER)
        ]
        return "\n".join([super().told(), *said, *running])

    def submit_environ(self, place: int) -> Mapping[str, str]:
        elastic = {"HPC_SERVE_ADD_AFTER_S": "2"} if self.fault.bounds else {}
        return elastic | ({"HPC_SERVE_ENV": str(self.first_environment)} if place == 0 else {})

    def submit_options(self, place: int) -> tuple[str, ...]:
        small = ("--gpu", "h100-80gb", "--no-exclusive", "--cpus-per-task", "4", "--mem", "4G", "--time", "30")
        first = self.fault.first if place == 0 else ()
        if self.fault.bounds:
            return (*small, "--replicas", self.fault.bounds, *self.fault.each)
        where = () if "--nodelist" in first else ("--nodelist", self.node(place))
        return (*small, *where, *first, *self.fault.each)

    def pids(self) -> Iterator[int]:
        return (process.pid for process in self.cluster.processes(USER))

    def node(self, place: int) -> str:
        """The node that the replica at this place runs on, if it runs on one."""
        return self.cluster.nodes[place]

    def pids_on(self, node: str) -> list[int]:
        """The user's processes on a node."""
        return [process.pid for process in self.cluster.processes(USER) if process.host == node]

    def on_cluster(self, *argv: str, user: str = USER, node: str | None = None) -> str:
        """Run a command of the cluster's; raises RuntimeError with its words if it fails."""
        done = self.cluster.run(argv, user=user, node=node)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout.strip()

    def close(self) -> None:
        try:
            super().close()
            self.cluster.run(["scancel", "--user", USER], user=USER)
            wait_for(
                lambda: not any(process.host in self.cluster.nodes for process in self.cluster.processes(USER)),
                GONE_S,
                what=f"the end of all that {USER} runs",
            )
        finally:
            if self.filesystem is not None:
                self.filesystem.remove()
