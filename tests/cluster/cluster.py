"""The cluster as tests use it: bring it up and down, run commands on it as a user, see its processes, break it.

`SlurmCluster` starts Slurm's daemons on the hosts that `hosts` makes, and waits for facts (the controller answers, the
nodes are idle), never for time. What a job does is left to Slurm.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tests.cluster import hosts, processes
from tests.cluster.config import (
    LOGIN,
    ClusterConfig,
    accounts_text,
    cgroup_conf_text,
    gres_conf_text,
    plugstack_conf_text,
    slurm_conf_text,
)
from tests.cluster.hosts import ClusterError
from tests.cluster.processes import Process

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
SLURM = ("slurmctld", "slurmd", "munged")
NEEDED = ("ip", "unshare", "nsenter", "mount")
START_TIMEOUT_S = 180.0
GRACE_S = 15.0
QUESTION = "are-the-nodes-there"  # the name of the job that asks
T = TypeVar("T")


def wait_for(look: Callable[[], T], timeout_s: float, *, what: str = "", step_s: float = 0.1) -> T:
    """Calls `look` until it returns something true, and returns that; TimeoutError with what it last saw."""
    deadline = time.monotonic() + timeout_s
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for {what or look}; last seen: {seen!r}")
        time.sleep(step_s)


class SlurmCluster:
    """A Slurm cluster on this machine, found by its name: one object may bring it up and another take it down."""

    def __init__(self, config: ClusterConfig | None = None) -> None:
        self.config = config or ClusterConfig()
        self.job_env: dict[str, str] = {}

    @classmethod
    def named(cls, name: str) -> SlurmCluster:
        """The cluster of that name, with the settings it was brought up with; the defaults if it is not there."""
        config = ClusterConfig(name=name)
        path = config.state / "cluster.json"
        return cls(ClusterConfig.from_json(path.read_text()) if path.exists() else config)

    # Places and people

    @property
    def nodes(self) -> tuple[str, ...]:
        """The compute nodes' names."""
        return self.config.nodes

    @property
    def shared(self) -> Path:
        """A folder on every host that root writes and everybody reads."""
        return self.config.shared

    def address(self, host: str) -> str:
        """A host's address on the cluster's network."""
        return self.config.address(host)

    def home(self, user: str) -> Path:
        """A user's home, at the same path on every host and on the machine."""
        return self.config.home(user)

    def user_id(self, user: str) -> int:
        """A user's number: root, or the owner of that home."""
        if user == "root":
            return 0
        if user not in self.config.users:
            raise ClusterError(f"no user {user!r} on this cluster; there are: {', '.join(self.config.users)}")
        return self.home(user).stat().st_uid

    # Up and down

    def up(self) -> None:
        """Brings the cluster up; quick if it is up already. What an earlier, broken start left is cleared first."""
        missing = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
        missing += [name for name in SLURM if not self._has(name)]
        if os.geteuid() != 0 or missing:
            need = f"these commands: {', '.join(missing)}" if missing else "root"
            raise ClusterError(f"a test cluster needs {need} (Debian: apt-get install slurm-wlm munge iproute2)")
        with self._only_one():
            runs = hosts.init_pid(self.config, LOGIN) is not None and self._config_path.exists()
            if runs and self._config_path.read_text() != self.config.to_json():
                raise ClusterError(
                    f"cluster {self.config.name} is up with other settings ({self._config_path}); take it down first"
                )
            if self.is_up():
                return
            self._take_down()
            try:
                self._bring_up()
            except BaseException:
                self._end_processes()
                raise

    def _has(self, command: str) -> bool:
        """Whether the hosts will have a command. Links of another system lead elsewhere on this machine."""
        return any(os.path.lexists(f"{self.config.os_root or ''}{folder}/{command}") for folder in PATH.split(":"))

    def down(self) -> None:
        """Ends every process of the cluster and removes its folder; does no harm if it is not up."""
        with self._only_one():
            self._take_down()

    def is_up(self) -> bool:
        """Whether every host runs and the controller answers."""
        if not all(hosts.init_pid(self.config, host) for host in self.config.hosts):
            return False
        return self.run(["scontrol", "ping"], user="root").returncode == 0

    def __enter__(self) -> SlurmCluster:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    @property
    def _config_path(self) -> Path:
        return self.config.state / "cluster.json"

    @contextmanager
    def _only_one(self) -> Iterator[None]:
        """Holds the lock of all clusters of this root: the folder itself, which goes with the last of them."""
        root = self.config.root
        while True:
            root.mkdir(parents=True, exist_ok=True)
            lock = os.open(root, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if root.exists() and os.path.samestat(root.stat(), os.fstat(lock)):
                    yield
                    with suppress(OSError):
                        root.rmdir()
                    return
            finally:
                os.close(lock)

    def _bring_up(self) -> None:
        self._write_files()
        for host in self.config.hosts:
            hosts.start_host(self.config, host)
        munge = self.config.state / "munge"
        self._daemon(
            LOGIN,
            ["munged", f"--socket={munge}/socket", f"--key-file={self.config.munge_key}"]
            + [f"--{kind}-file={munge}/private/{kind}" for kind in ("pid", "log", "seed")],
        )
        self.start_controller(nodes_are_up=False)
        for node in self.nodes:
            self.start_slurmd(node)
        wait_for(self._all_idle, START_TIMEOUT_S, what=f"all of {', '.join(self.nodes)} to be idle")

    def _write_files(self) -> None:
        config = self.config
        old_umask = os.umask(0o022)
        try:
            for folder in ("etc", "dev", "home", "hosts", "log", "run", "shared", "slurmctld", "slurmd", "munge"):
                (config.state / folder).mkdir(parents=True)
            for node in config.nodes:
                (config.state / "slurmd" / node).mkdir()
            for folder in ("log", "slurmctld"):
                (config.state / folder).chmod(0o700)
            for number in range(config.gpus_per_node):
                hosts.run_as_root(["mknod", "-m", "666", f"{config.state}/dev/gpu{number}", "c", "1", "3"])
            first_id = self._free_ids()
            for text, name in (
                (slurm_conf_text(config), "slurm.conf"),
                (gres_conf_text(config), "gres.conf"),
                (cgroup_conf_text(), "cgroup.conf"),
                (plugstack_conf_text(), "plugstack.conf"),
                (accounts_text(config, Path("/etc/passwd").read_text(), first_id, group=False), "passwd"),
                (accounts_text(config, Path("/etc/group").read_text(), first_id, group=True), "group"),
            ):
                (config.state / "etc" / name).write_text(text)
            for number, user in enumerate(config.users, start=first_id):
                self.home(user).mkdir(mode=0o700)
                os.chown(self.home(user), number, number)
            config.munge_key.parent.mkdir(mode=0o700)
            config.munge_key.touch(mode=0o600)
            config.munge_key.write_bytes(secrets.token_bytes(128))
            self._config_path.write_text(config.to_json())
        finally:
            os.umask(old_umask)

    def _free_ids(self) -> int:
        """The first of a run of numbers, for users and their group, that neither machine nor another cluster uses."""
        lines = (Path("/etc/passwd").read_text() + Path("/etc/group").read_text()).splitlines()
        taken = {int(line.split(":")[2]) for line in lines if line.count(":") >= 3}
        taken |= {home.stat().st_uid for home in self.config.root.glob("*/home/*")}
        wanted = len(self.config.users) + 1
        return next(n for n in range(61000, 65000) if not taken & set(range(n, n + wanted)))

    def _all_idle(self) -> bool:
        states = self.run(["sinfo", "--noheader", "--Node", "--format=%N %t"], user="root").stdout.split("\n")
        return set(states) >= {f"{node} idle" for node in self.nodes}

    def _take_down(self) -> None:
        self._end_processes()
        # Nothing is mounted below: the hosts' mounts went with their namespaces.
        if self.config.state.exists():
            shutil.rmtree(self.config.state)

    def _end_processes(self) -> None:
        names = {path.name for path in (self.config.state / "hosts").glob("*")} | set(self.config.hosts)
        doomed = [pid for host in sorted(names) for pid in hosts.kill_host(self.config, host)]
        self._wait_until_gone(doomed)

    def _wait_until_gone(self, pids: list[int]) -> None:
        wait_for(
            lambda: not any(processes.is_alive(pid) for pid in pids),
            START_TIMEOUT_S,
            what=f"processes {pids} of cluster {self.config.name} to end",
        )

    # Commands

    def run(
        self, argv: Sequence[str | Path], *, input: str = "", timeout: float = 180.0, **where: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end, and returns its exit code and output; `where` is as `_entering` takes it."""
        full, env = self._entering(argv, **where)
        return subprocess.run(full, env=env, input=input, capture_output=True, text=True, timeout=timeout, check=False)

    def popen(self, argv: Sequence[str | Path], **where: Any) -> subprocess.Popen[str]:
        """Starts a command likewise, output and errors in one pipe; a signal sent to it reaches the command."""
        full, env = self._entering(argv, **where)
        no_input, output = subprocess.DEVNULL, subprocess.PIPE
        return subprocess.Popen(full, env=env, stdin=no_input, stdout=output, stderr=subprocess.STDOUT, text=True)

    def shell(self, argv: Sequence[str | Path], *, user: str, node: str | None, cwd: str | None) -> None:
        """Becomes a command on the cluster, with this terminal."""
        full, env = self._entering(argv, user=user, node=node, cwd=cwd, foreground=True)
        if "TERM" in os.environ:
            env["TERM"] = os.environ["TERM"]
        os.execve(full[0], full, env)

    def _entering(
        self,
        argv: Sequence[str | Path],
        *,
        user: str = "alice",
        node: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        foreground: bool = False,
    ) -> tuple[list[str], dict[str, str]]:
        """The words and the environment of a command as `user` on the login node, or on `node`, in `cwd` or at home."""
        init = hosts.init_pid(self.config, node or LOGIN)
        if init is None:
            raise ClusterError(f"host {node or LOGIN} of cluster {self.config.name} is not up")
        user_id = self.user_id(user)
        home = Path("/root") if user == "root" else self.home(user)
        full_env = {"HOME": str(home), "USER": user, "LOGNAME": user, "SHELL": "/bin/bash"}
        full_env |= {"PATH": PATH, "LANG": "C.UTF-8", **self.job_env, **(env or {})}
        folder = cwd or ("/" if user == "root" else home)
        command = [str(part) for part in argv]
        return hosts.enter_argv(init, user_id, folder, command, foreground=foreground), full_env

    def processes(self, user: str | None = None) -> list[Process]:
        """The live processes of a user, or of all users, on every host and on the machine itself."""
        users = self.config.users if user is None else (user,)
        inits = {host: hosts.init_pid(self.config, host) for host in self.config.hosts}
        names = {processes.namespace_of(pid): host for host, pid in inits.items() if pid is not None}
        return processes.of_users({self.user_id(name) for name in users}, names)

    # The daemons, and how they fail

    def _daemon(self, host: str, argv: list[str]) -> None:
        done = self.run(argv, user="root", node=host)
        if done.returncode != 0:
            raise ClusterError(f"{argv[0]} on {host} ended with {done.returncode}: {done.stderr.strip()}")

    def _end_daemon(self, host: str, pid_file: Path, number: signal.Signals) -> None:
        pid = pid_file.read_text().strip()

        def is_gone() -> bool:
            return self.run(["test", "!", "-d", f"/proc/{pid}"], user="root", node=host).returncode == 0

        self.run(["kill", f"-{int(number)}", pid], user="root", node=host)
        try:
            wait_for(is_gone, GRACE_S, what=f"process {pid} of {host} to end")
        except TimeoutError:
            if number == signal.SIGKILL:
                raise
            self._end_daemon(host, pid_file, signal.SIGKILL)

    def start_controller(self, *, nodes_are_up: bool = True) -> None:
        """Starts slurmctld and waits until it answers and, if they are up, has heard of the nodes' GPUs again."""
        self._daemon(LOGIN, ["slurmctld", "-f", str(self.config.slurm_conf)])
        wait_for(
            lambda: self.run(["scontrol", "ping"], user="root").returncode == 0,
            START_TIMEOUT_S,
            what="slurmctld to answer",
        )
        if nodes_are_up:
            wait_for(self._knows_the_gpus, START_TIMEOUT_S, what="the nodes to register", step_s=0.5)
            wait_for(self._has_asked, START_TIMEOUT_S, what="the end of the job that asked them")

    def _knows_the_gpus(self) -> bool:
        """Until a node has registered anew, steps there are refused: Invalid generic resource specification."""
        step = ["srun", "--immediate=5", f"--job-name={QUESTION}", f"--nodes={len(self.nodes)}"]
        done = self.run([*step, "--gres=gpu:1", "--mem=1M", "true"], user=self.config.users[0])
        return "Invalid generic resource" not in done.stderr

    def _has_asked(self) -> bool:
        """Slurm lists a job, as its user's, until it has cleared it away: for a moment after its srun has ended."""
        done = self.run(["squeue", "--noheader", f"--name={QUESTION}"], user="root")
        return done.returncode == 0 and not done.stdout.strip()

    def stop_controller(self) -> None:
        """Stops slurmctld, in good order unless that takes long (it waits for its own messages); jobs go on."""
        self._end_daemon(LOGIN, self.config.state / "run" / "slurmctld.pid", signal.SIGTERM)

    def start_slurmd(self, node: str) -> None:
        """Starts a node's slurmd."""
        self._daemon(node, ["slurmd", "-f", str(self.config.slurm_conf), "-N", node])

    def kill_slurmd(self, node: str) -> None:
        """Kills a node's slurmd; what runs there goes on."""
        self._end_daemon(node, self.config.state / "run" / f"slurmd-{node}.pid", signal.SIGKILL)

    def disconnect(self, node: str) -> None:
        """Pulls a node's network cable: it runs on, unseen and unseeing."""
        hosts.set_link(self.config, node, up=False)

    def reconnect(self, node: str) -> None:
        """Plugs the cable in again."""
        hosts.set_link(self.config, node, up=True)

    def slow_down(self, node: str, kilobits: int | None) -> None:
        """Makes a node's cable carry only so many kbit/s; None makes it fast again."""
        hosts.set_rate(self.config, node, kilobits)

    def part(self, host: str, other: str) -> None:
        """Lets nothing through between two hosts; both go on seeing all others."""
        hosts.set_parted(self.config, host, other, parted=True)

    def join(self, host: str, other: str) -> None:
        """Lets two hosts that were parted see one another again."""
        hosts.set_parted(self.config, host, other, parted=False)

    def pids_on(self, host: str) -> list[int]:
        """Everything that runs on a host, daemons included, but for the process that the host hangs on."""
        init = hosts.init_pid(self.config, host)
        if init is None:
            return []
        namespace = processes.namespace_of(init)
        return [pid for pid in processes.pids() if pid != init and processes.namespace_of(pid) == namespace]

    def what_is_unwell(self, *, grace_s: float = GRACE_S) -> str:
        """What of the cluster is not as `up` makes it, after a while in which it may mend itself; "" if all is well."""
        seen = [""]

        def is_well() -> bool:
            seen[0] = self._unwell()
            return not seen[0]

        with suppress(TimeoutError):
            wait_for(is_well, grace_s, step_s=0.5)
        return seen[0]

    def _unwell(self) -> str:
        if away := [host for host in self.config.hosts if hosts.init_pid(self.config, host) is None]:
            return f"hosts are down: {', '.join(away)}"
        if left := [str(process) for process in self.processes()]:
            return f"processes are left: {'; '.join(left)[:500]}"
        said = self.run(["sinfo", "--noheader", "--Node", "--format=%N %t"], user="root")
        states = sorted(set((said.stdout or said.stderr).splitlines()))
        return "" if states == sorted(f"{node} idle" for node in self.nodes) else f"Slurm says: {', '.join(states)}"

    def power_off(self, node: str) -> None:
        """Cuts a node's power: everything on it is gone at once."""
        self._wait_until_gone(hosts.kill_host(self.config, node))

    def power_on(self, node: str) -> None:
        """Starts a node after `power_off`, its slurmd included, and waits until it is idle or at work."""
        hosts.start_host(self.config, node)
        self.start_slurmd(node)
        ready = ("idle", "mix", "alloc")
        wait_for(lambda: self.node_state(node) in ready, START_TIMEOUT_S, what=f"{node} to be ready")

    def drain(self, node: str, reason: str = "test") -> None:
        """Lets the node's jobs finish and gives it no new ones."""
        self._update(node, "state=drain", f"reason={reason}")

    def resume(self, node: str) -> None:
        """Gives a drained or down node work again."""
        self._update(node, "state=resume")

    def node_state(self, node: str) -> str:
        """Slurm's short word for the node's state, such as idle, alloc, drain or down*."""
        return self.run(["sinfo", "--noheader", f"--nodes={node}", "--format=%t"], user="root").stdout.split("\n")[0]

    def _update(self, node: str, *changes: str) -> None:
        done = self.run(["scontrol", "update", f"nodename={node}", *changes], user="root")
        if done.returncode != 0:
            raise ClusterError(f"scontrol update {node}: {done.stderr.strip()}")
