"""A running service to break, on the test cluster: jobs of a real Slurm that a user submits, one node for each.

The load is a program of the same user on the login host. Its output and the engines' work logs are in a folder that is
not in the user's home, so that they can be written while the home is away.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.cluster import SlurmCluster, wait_for
from tests.cluster.config import CHECKOUT
from tests.cluster.environment import user_environment
from tests.faults.service import Service

USER = "alice"
STRANGER = "mallory"
GONE_S = 90.0  # KillWait is 30 s


class SlurmService(Service):
    """Replica k runs on node k + 1; `first` are further options of the first one."""

    def __init__(
        self, cluster: SlurmCluster, model: Path, *, name: str, hold_s: float, bound_s: float, first: Sequence[str]
    ) -> None:
        self.cluster, self.first = cluster, first
        folder = cluster.shared / "faults" / name
        super().__init__(folder, model, name=name, hold_s=hold_s, bound_s=bound_s)
        folder.chmod(0o777)
        self.work.chmod(0o777)

    def run(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        environ = {**self.environ, **(env or {})}
        return self.cluster.run(argv, user=USER, env=environ, cwd="/tmp", timeout=180)

    def popen(self, argv: Sequence[str]) -> subprocess.Popen[str]:
        return self.cluster.popen(argv, user=USER, env=self.environ, cwd=CHECKOUT)

    def popen_stranger(self, argv: Sequence[str]) -> tuple[subprocess.Popen[str], str]:
        node = self.cluster.nodes[-1]
        program = self.cluster.popen(argv, user=STRANGER, node=node, env=user_environment(), cwd=CHECKOUT)
        return program, self.cluster.address(node)

    @property
    def mount(self) -> Path:
        return self.cluster.home(USER)

    @property
    def home(self) -> Path:
        return self.mount / ".hpc-serve"

    @property
    def environ(self) -> dict[str, str]:
        return {**user_environment(), "HPC_SERVE_ENV": str(self.folder / "env")}

    def submit_options(self, place: int) -> tuple[str, ...]:
        small = ("--gpu", "h100-80gb", "--no-exclusive", "--cpus-per-task", "4", "--mem", "4G", "--time", "30")
        first = self.first if place == 0 else ()
        where = () if "--nodelist" in first else ("--nodelist", self.node(place))
        return (*small, *where, *first)

    def pids(self) -> Iterator[int]:
        return (process.pid for process in self.cluster.processes(USER))

    def node(self, place: int) -> str:
        """The node that the replica at this place runs on, if it runs on one."""
        return self.cluster.nodes[place]

    def pids_on(self, node: str) -> list[int]:
        """The user's processes on a node."""
        return [process.pid for process in self.cluster.processes(USER) if process.host == node]

    def slurm(self, *argv: str, user: str = USER) -> str:
        """Run a command of Slurm's; raises RuntimeError with its words if it fails."""
        done = self.cluster.run(argv, user=user)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout.strip()

    def end(self) -> None:
        super().end()
        self.cluster.run(["scancel", "--user", USER], user=USER)
        wait_for(
            lambda: not any(process.host in self.cluster.nodes for process in self.cluster.processes(USER)),
            GONE_S,
            what=f"the end of all that {USER} runs",
        )
