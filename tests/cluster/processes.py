"""What runs where, read from /proc: the init process of each host, and the processes of a user on all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process as the machine sees it; `host` is the cluster's host it runs on, "" for the machine itself."""

    pid: int
    user_id: int
    host: str
    argv: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.host or 'machine'}: {self.pid} {' '.join(self.argv)}"


def pids() -> Iterator[int]:
    """Every process of the machine, namespaces included."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def status_of(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status; empty once the process has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def argv_of(pid: int) -> tuple[str, ...]:
    """The command line; empty for a kernel thread, a zombie, or a process that has just gone."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ()
    return tuple(text.rstrip("\0").split("\0")) if text else ()


def is_alive(pid: int) -> bool:
    """Whether the process has not ended. The first of a namespace ends last, after all others in it."""
    status = status_of(pid)
    return bool(status) and not status["State"].startswith(("Z", "X"))


def namespace_of(pid: int) -> str:
    """Names the network that a process is in, which is its host's in a container too; "" if the process has gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def is_namespace_init(pid: int) -> bool:
    """Whether the process is number 1 of a PID namespace below the machine's own."""
    numbers = status_of(pid).get("NSpid", "").split()
    return len(numbers) > 1 and numbers[-1] == "1"


def of_users(user_ids: set[int], host_by_namespace: dict[str, str]) -> list[Process]:
    """All live processes of these users; zombies, which nobody can end, are left out."""
    found = []
    for pid in pids():
        status = status_of(pid)
        if not status or status["State"].startswith(("Z", "X")):
            continue
        user_id = int(status["Uid"].split()[0])
        if user_id in user_ids:
            host = host_by_namespace.get(namespace_of(pid), "")
            found.append(Process(pid=pid, user_id=user_id, host=host, argv=argv_of(pid) or (status["Name"],)))
    return found


def environ_of(pid: int) -> list[bytes]:
    """The environment of a process, as NAME=value; nothing of one that has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def variable_of(pid: int, name: str) -> str | None:
    """A variable of a process's environment."""
    begin = f"{name}=".encode()
    return next((word.removeprefix(begin).decode() for word in environ_of(pid) if word.startswith(begin)), None)


def of_job(job: str, among: Iterable[int]) -> list[int]:
    """The live processes that run in a replica's job."""
    mark = f"HPC_SERVE_JOB_ID={job}".encode()
    return [pid for pid in among if is_alive(pid) and mark in environ_of(pid)]
