"""The first process of a host: makes its private /tmp, /dev/shm, /sys and /etc files, then reaps orphans for ever.

Runs as root inside fresh mount, network, PID, IPC and hostname namespaces, by any Python and without this package.
Prints "ready" once its part is done; killing it takes every process, mount and interface of the host with it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path


def mount(*args: str | Path) -> None:
    subprocess.run(["mount", *map(str, args)], check=True)


def first_closed_folder(path: Path) -> Path | None:
    """The topmost part of `path` that ordinary users cannot enter, or that is not there; None if they reach it."""
    for folder in [*reversed(path.parents), path]:
        if not folder.exists() or not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None


def show_at_its_own_path(path: Path, held: Path) -> None:
    """Makes `path` reachable, by its mount kept at `held`: an empty folder takes the place of a closed one above."""
    blocked_at = first_closed_folder(path)
    if blocked_at is None:
        return
    if blocked_at == path and path.exists():
        sys.exit(f"{path} itself is closed to ordinary users; open it with: chmod go+rx {path}")
    if blocked_at.exists():
        mount("-t", "tmpfs", "-o", "mode=0755,size=1m", "hidden", blocked_at)
    path.mkdir(parents=True)
    mount("--bind", held, path)


def change_root(os_root: str, overlay: Path, shown: list[Path], holding: Path) -> None:
    """Puts another system in the place of the machine's, which stays in sight at `shown` alone, and in /dev and /sys.

    What the host writes to it goes into `overlay`, as onto a disk of its own.
    """
    new, upper, work = overlay / "root", overlay / "upper", overlay / "work"
    for folder in (new, upper, work):
        folder.mkdir(parents=True, exist_ok=True)
    mount("-t", "overlay", "-o", f"lowerdir={os_root},upperdir={upper},workdir={work}", "overlay", new)
    for path in shown:
        target = new / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch() if path.is_file() else target.mkdir(exist_ok=True)
        mount("--bind", path, target)
    mount("--rbind", holding, new / holding.relative_to("/"))
    mount("-t", "proc", "proc", new / "proc")
    for name in ("dev", "sys"):
        mount("--rbind", f"/{name}", new / name)
    # The machine keeps /dev/fuse for root. A host's is for all, as Apptainer needs it to mount an image file.
    fuse = new / holding.relative_to("/") / "fuse"
    os.mknod(fuse, stat.S_IFCHR, os.makedev(10, 229))
    fuse.chmod(0o666)
    if (new / "dev" / "fuse").exists():
        mount("--bind", fuse, new / "dev" / "fuse")
    queues = new / "dev" / "mqueue"
    queues.mkdir(exist_ok=True)
    mount("-t", "mqueue", "mqueue", queues)
    subprocess.run(["pivot_root", new, new / "mnt"], check=True)
    os.chdir("/")
    subprocess.run(["umount", "--lazy", "/mnt"], check=True)


def main(settings_path: str) -> None:
    os.umask(0o022)
    settings = json.loads(Path(settings_path).read_text())
    holding = Path(settings["holding"])
    mount("-t", "tmpfs", "-o", "mode=0700,size=1m", "holding", holding)
    held = {}
    for number, path in enumerate(settings["visible"]):
        held[path] = holding / str(number)
        held[path].mkdir()
        mount("--rbind", path, held[path])

    if "os_root" in settings:
        change_root(settings["os_root"], Path(settings["overlay"]), [Path(path) for path in settings["shown"]], holding)

    # A new sysfs shows this network namespace's interfaces; the machine's cgroups stay what they are.
    # Another system sees those of version 2: its container runtimes refuse a machine that has both versions.
    cgroups = holding / "cgroup"
    cgroups.mkdir()
    if "os_root" in settings:
        mount("-t", "cgroup2", "cgroup2", cgroups)
    else:
        mount("--rbind", "/sys/fs/cgroup", cgroups)
    mount("-t", "sysfs", "sysfs", "/sys")
    mount("--rbind", cgroups, "/sys/fs/cgroup")

    mount("-t", "tmpfs", "-o", "mode=1777,nosuid,nodev", "shm", "/dev/shm")
    for source, target in settings["binds"]:
        if Path(target).exists():
            mount("--bind", source, Path(target).resolve())
    for path, copy in held.items():
        show_at_its_own_path(Path(path), copy)

    socket.sethostname(settings["hostname"])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.chdir("/")
    print("ready", flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
