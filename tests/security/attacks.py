"""What the security tests on the cluster share: they run the stranger's programs, and look at ports of nodes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.e2e.jobs import User

STRANGER = Path(__file__).with_name("stranger.py")
ASK = Path(__file__).parents[1] / "e2e" / "ask.py"
START_S = 900.0


def tries(user: User, what: str, *arguments: object, node: str = "n3", timeout: float = 400) -> Any:
    done = user.run(sys.executable, str(STRANGER), what, *map(str, arguments), node=node, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def listening(user: User, node: str) -> list[tuple[str, int, str]]:
    """Address, port and program of every TCP socket that this user's processes listen on."""
    pids = {process.pid for process in user.processes() if process.host == node}
    seen = user.cluster.run(["ss", "-ltnpH"], user="root", node=node).stdout
    ours = {int(pid) for pid in user.run("ps", "-u", user.name, "-o", "pid=", node=node).stdout.split()}
    assert pids
    found = []
    for line in seen.splitlines():
        address, _, port = line.split()[3].rpartition(":")
        program = re.search(r'\(\("([^"]+)",pid=(\d+)', line)
        if program and int(program[2]) in ours and program[1] != "srun":  # srun's own are Slurm's business
            found.append((address.strip("[]").removeprefix("::ffff:"), int(port), program[1]))
    return found


def answers(alice: User, service: str) -> bool:
    done = alice.run(sys.executable, str(ASK), service)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["chunks"] >= 2


def endpoint(record: dict[str, Any]) -> tuple[str, int, str]:
    return record["hosts"][0], record["port"], "http" if record["certificate"] is None else "https"
