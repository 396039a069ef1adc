"""Makes and ends the hosts of a cluster: namespaces, files private to a host, and the network between them.

Every host hangs on one process (`host_init`), found again by its command line: no list of process ids to lose. The
login node's interface is a bridge that the other hosts' interfaces are plugged into, so that nothing of the network
exists outside the cluster's own namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.cluster import processes
from tests.cluster.config import INTERFACE, LOGIN, ClusterConfig, hosts_text

HERE = Path(__file__).resolve().parent
PREFIX_LENGTH = 24
NOBODY = "02:00:00:00:00:00"
# A bridge without an address of its own takes one of its ports', and another one when a port comes or goes: all hosts
# would send to the old one for seconds.
LOGIN_MAC = "02:00:00:00:00:01"
# Bare: what runs inside a host has loaded all it needs before the host's own view of files replaces the machine's.
PYTHON = (sys.executable, "-I", "-S")


def python_paths(visible: list[Path]) -> list[Path]:
    """What this Python is made of beside what is visible anyway: the interpreter, and the folders it imports from."""
    parts = [Path(sys.executable), *(Path(path) for path in sys.path if path and Path(path).is_dir())]
    parts = [part.resolve() for part in parts]
    return list(dict.fromkeys(part for part in parts if not any(map(part.is_relative_to, visible))))


class ClusterError(Exception):
    """The test cluster could not do what was asked; the text holds what the system said."""


def run_as_root(argv: list[str], *, env: dict[str, str] | None = None) -> str:
    """Runs a command on the machine and returns its output; a ClusterError tells what it said if it fails."""
    done = subprocess.run(argv, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise ClusterError(f"`{' '.join(argv)}` ended with {done.returncode}: {said}")
    return done.stdout


def settings_path(config: ClusterConfig, host: str) -> Path:
    return config.state / "hosts" / host / "settings.json"


def _host_processes(config: ClusterConfig, host: str) -> list[int]:
    wanted = str(settings_path(config, host))
    return [pid for pid in processes.pids() if processes.argv_of(pid)[-1:] == (wanted,)]


def init_pid(config: ClusterConfig, host: str) -> int | None:
    """The machine's number of the host's first process; None while the host is down."""
    return next((pid for pid in _host_processes(config, host) if processes.is_namespace_init(pid)), None)


def enter_argv(init: int, user_id: int, folder: str | Path, argv: list[str], *, foreground: bool = False) -> list[str]:
    """The command that runs `argv` inside a host as a user."""
    flags = ["--foreground"] if foreground else []
    where = [str(init), str(user_id), str(folder)]
    return [*PYTHON, str(HERE / "enter.py"), *where, *flags, "--", *argv]


def start_host(config: ClusterConfig, host: str) -> int:
    """Starts a host with its private files and its interface up; returns the number of its first process."""
    folder = settings_path(config, host).parent
    tmp, var_tmp, holding = folder / "tmp", folder / "var_tmp", folder / "holding"
    for made, mode in ((folder, 0o755), (tmp, 0o1777), (var_tmp, 0o1777), (holding, 0o700)):
        made.mkdir(exist_ok=True)
        made.chmod(mode)
    files = config.state / "etc"
    (files / "hosts").write_text(hosts_text(config))
    (files / "resolv.conf").write_text("# No name server: a compute node that looks for one is told at once.\n")
    binds = [
        (tmp, "/tmp"),
        (var_tmp, "/var/tmp"),
        (files, "/etc/slurm"),
        *((files / name, f"/etc/{name}") for name in ("hosts", "resolv.conf", "passwd", "group")),
    ]
    settings = {"hostname": host, "binds": binds, "visible": config.visible, "holding": holding}
    if config.os_root is not None:
        # What the other system has a folder for (/usr) is not bound over it.
        bound = [path for path in config.visible if not (config.os_root / path.relative_to("/")).exists()]
        settings |= {"os_root": config.os_root, "overlay": folder / "os", "shown": [config.state, *python_paths(bound)]}
    settings_path(config, host).write_text(json.dumps(settings, default=str))

    argv = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    argv += [*PYTHON, str(HERE / "host_init.py"), str(settings_path(config, host))]
    log_path = config.state / "log" / f"host-{host}.log"
    with log_path.open("w") as log:
        starter = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True, text=True
        )
    assert starter.stdout is not None
    with starter.stdout:
        ready = starter.stdout.readline() == "ready\n"
    pid = init_pid(config, host)
    if not ready or pid is None:
        raise ClusterError(f"host {host} did not start: {log_path.read_text().strip() or 'no word why'}")
    _connect(config, host, pid)
    return pid


def _connect(config: ClusterConfig, host: str, pid: int) -> None:
    address = f"{config.address(host)}/{PREFIX_LENGTH}"
    ip_here = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip"]
    if host == LOGIN:
        run_as_root([*ip_here, "link", "add", INTERFACE, "address", LOGIN_MAC, "type", "bridge"])
    else:
        ip_login = _ip_on_login(config)
        # Connections that nobody could close keep the namespace of a host that was unplugged and then ended.
        with contextlib.suppress(ClusterError):
            run_as_root([*ip_login, "link", "delete", host])
        run_as_root([*ip_login, "link", "add", host, "type", "veth", "peer", "name", INTERFACE, "netns", str(pid)])
        run_as_root([*ip_login, "link", "set", host, "master", INTERFACE, "up"])
    run_as_root([*ip_here, "address", "add", address, "dev", INTERFACE])
    run_as_root([*ip_here, "link", "set", INTERFACE, "up"])


def set_link(config: ClusterConfig, node: str, *, up: bool) -> None:
    """Plugs a node's network cable in or out, at the switch's end."""
    run_as_root([*_ip_on_login(config), "link", "set", node, "up" if up else "down"])


def set_rate(config: ClusterConfig, node: str, kilobits: int | None) -> None:
    """Makes a node's cable carry so many kbit/s in each direction; None makes it fast again."""
    for enter, device in ((_on(config, LOGIN), node), (_on(config, node), INTERFACE)):
        qdisc = [*enter, "tc", "qdisc"]
        if kilobits is None:
            run_as_root([*qdisc, "delete", "dev", device, "root"])
        else:
            shape = ["tbf", "rate", f"{kilobits}kbit", "burst", "8kb", "latency", "2s"]
            run_as_root([*qdisc, "replace", "dev", device, "root", *shape])


def set_parted(config: ClusterConfig, host: str, other: str, *, parted: bool) -> None:
    """Parts two hosts, which reach all others: what one sends to the other goes to a machine that is not there."""
    for here, there in ((host, other), (other, host)):
        neighbour = [*_on(config, here), "ip", "neighbour"]
        to = ["to", config.address(there), "dev", INTERFACE]
        if parted:
            run_as_root([*neighbour, "replace", *to, "lladdr", NOBODY, "nud", "permanent"])
        else:
            run_as_root([*neighbour, "delete", *to])


def _on(config: ClusterConfig, host: str) -> list[str]:
    """The beginning of a command that runs in a host's network."""
    pid = init_pid(config, host)
    if pid is None:
        raise ClusterError(f"host {host} of cluster {config.name} is not up")
    return ["nsenter", f"--net=/proc/{pid}/ns/net"]


def _ip_on_login(config: ClusterConfig) -> list[str]:
    pid = init_pid(config, LOGIN)
    if pid is None:
        raise ClusterError(f"cluster {config.name} is not up; start it with: python -m tests.cluster up")
    return ["nsenter", f"--net=/proc/{pid}/ns/net", "ip"]


def kill_host(config: ClusterConfig, host: str) -> list[int]:
    """Cuts a host's power; returns the processes to wait for. Safe on a host that is down or half up."""
    doomed = _host_processes(config, host)
    for pid in doomed:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return doomed
