"""The samples that need a service: real commands of a user on the test cluster, with real Slurm and real vLLM on CPUs.

A tiny model that has learned one answer takes the place of the weights. One run gives the recording and every sample,
so they tell of one service.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster import ClusterConfig, SlurmCluster, wait_for
from tests.cluster.config import CHECKOUT
from tests.cluster.environment import user_environment, visible_folders
from tests.e2e.jobs import User
from tests.samples.recording import Screen
from tests.samples.taught_model import QUESTION, make_taught_model
from tests.samples.terminal import Style, Terminal

COLUMNS, ROWS = 92, 24
READY_S, FAILED_S = 900.0, 300.0
PROMPT = Style(colour="green", bold=True)
RECORDED = ("hpc-serve submit 8b --wait", f'hpc-serve chat 8b "{QUESTION}"')


@dataclass
class Seen:
    """What the commands printed, by the sample's name, and the screens of the recording."""

    samples: dict[str, dict[str, str]] = field(default_factory=dict)
    screens: list[Screen] = field(default_factory=list)
    seconds: float = 0.0


def run() -> Seen:
    """Bring the cluster up, run every command, and take the cluster down."""
    with SlurmCluster(ClusterConfig(name=f"samples-{os.getpid()}"[:15], visible=visible_folders())) as cluster:
        model = make_taught_model(cluster.shared / "models" / "8b")
        environ = {**user_environment(), "HPC_SERVE_MODEL": str(model), "COLUMNS": "100"}
        return _Run(User(cluster, environ), model).all()


class _Run:
    def __init__(self, alice: User, model: Path) -> None:
        self.alice = alice
        self.model = model
        self.seen = Seen()

    def all(self) -> Seen:
        self.sample("init", "hpc-serve init")
        self.record()
        with self.load():
            wait_for(lambda: re.search(r"[1-9]\d* running", self.said("hpc-serve status 8b")), 60, what="requests")
            self.sample("status-one", "hpc-serve status 8b")
            self.sample("status", "hpc-serve status")
            self.sample("top", "hpc-serve top --once")
        self.sample("bench", "hpc-serve bench 8b --lengths 64/64 --num-prompts 40 --max-concurrency 4")
        self.sample("stop", "hpc-serve stop 8b")
        self.said("hpc-serve submit 8b")
        self.sample("wait", "hpc-serve wait 8b")
        self.fail()
        self.said("hpc-serve stop 8b")
        wait_for(lambda: not self.alice.processes(), 180, what="the end of what alice runs", step_s=0.5)
        return self.seen

    def fail(self) -> None:
        """Start a service whose only file of weights has lost its last byte."""
        folder = self.alice.home / "cut"
        self.alice.run("cp", "-r", str(self.model), str(folder))
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(file.seek(0, os.SEEK_END) - 1)
        self.said("hpc-serve submit 8b --name cut", HPC_SERVE_MODEL=str(folder))
        self.alice.hpc_serve("wait", "cut", timeout=FAILED_S)
        self.sample("doctor", "hpc-serve doctor cut")

    def sample(self, name: str, command: str) -> None:
        """Keep a command and what it prints."""
        self.seen.samples[name] = {"command": command, "output": self.said(command)}
        print(f"$ {command}\n{self.seen.samples[name]['output']}", flush=True)

    def said(self, command: str, **env: str) -> str:
        """Return what a command prints, on both outputs, without the places of this machine."""
        done = self.alice.run("bash", "-c", f"{command} 2>&1", timeout=READY_S, env=env)
        return self.cleaned(done.stdout).rstrip()

    def cleaned(self, text: str) -> str:
        for path, name in ((self.alice.home, "/home/alice"), (self.model, "/project/models/8b"), (CHECKOUT, "/opt")):
            text = text.replace(str(path), name)
        return "\n".join(line.rstrip() for line in text.splitlines())

    @contextmanager
    def load(self) -> Iterator[None]:
        """Have four requests under way."""
        words = "--lengths 64/256 --num-prompts 4000 --max-concurrency 4"
        bench = self.alice.cluster.popen(
            ["bash", "-c", f"exec hpc-serve bench 8b {words} > /dev/null 2>&1"], user="alice", env=self.alice.environ
        )
        try:
            yield
        finally:
            bench.terminate()
            bench.communicate(timeout=60)

    def record(self) -> None:
        """Keep the screens of the recorded commands, as a terminal shows them."""
        terminal = Terminal(ROWS)
        began_s = time.monotonic()

        def keep() -> None:
            self.seen.screens.append(Screen(time.monotonic() - began_s, terminal.lines()))

        for command in RECORDED:
            terminal.rows[-1] += [(character, PROMPT) for character in "$ "]
            keep()
            terminal.rows[-1] += [(character, Style()) for character in command]
            keep()
            terminal.write("\r\n")
            self.in_terminal(command, lambda text: (terminal.write(self.cleaned_part(text)), keep()))
        self.seen.seconds = time.monotonic() - began_s
        for line in terminal.lines():
            print("".join(span.text for span in line), flush=True)

    def cleaned_part(self, text: str) -> str:
        return text.replace(str(self.alice.home), "/home/alice")

    def in_terminal(self, command: str, take: Callable[[str], object]) -> None:
        """Run a command in a terminal of its own and hand on what it writes, as it comes."""
        typed = f"stty cols {COLUMNS} rows {ROWS}; {command}"
        environ = {name: value for name, value in self.alice.environ.items() if name != "COLUMNS"}
        process = self.alice.cluster.popen(
            ["script", "--quiet", "--return", "--command", typed, "/dev/null"],
            user="alice",
            env={**environ, "TERM": "xterm-256color"},
        )
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        pending = b""
        while select.select([descriptor], [], [], READY_S)[0] and (read := os.read(descriptor, 65536)):
            pending += read
            whole = pending.decode(errors="ignore")
            pending = pending[len(whole.encode()) :]
            take(whole)
        if process.wait(timeout=60):
            raise RuntimeError(f"{command} ended with {process.returncode}")
