"""Two replicas of a real tiny engine on this machine, and greedy streams of them to compare token for token.

Tests of real vLLM under faults share them: who breaks what, and when, is decided there.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_serve.demo_model import make_demo_model
from hpc_serve.errors import StreamBrokenError
from tests.cluster import processes
from tests.cluster.environment import user_environment

NAME = "resumed"
START_S = 600.0
TOKENS = 400  # some seconds on two cores
BEGUN = 12
_ENGINE = ("--max-model-len", "2048", "--enforce-eager", "--dtype", "float32")
"""In 16 bit a CPU with AMX rounds a text that is read at once otherwise than the same text word by word, and a greedy
stream that goes on at another replica could take another word."""
LOCAL = ("--cluster", "local", "--gpu", "cpu", "--gpu-memory", "2GiB")

GREEDY: dict[str, Any] = {"temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


def ask(number: int) -> dict[str, Any]:
    """One of eight streams: chats and completions in turn, with and without usage, bound and stop string."""
    text = f"Question {number}: what are the people of the place like?"
    asked = {**GREEDY, "max_tokens": TOKENS, **({"prompt": text} if number % 2 else {"messages": [user(text)]})}
    if number in (2, 3):
        asked |= USAGE
    if number in (4, 5):
        asked["stop"] = ["a string that never comes", "zzz"]
    if number in (6, 7):
        asked["extra_body"] = {"ignore_eos": True, "min_tokens": TOKENS - 5, "repetition_penalty": 1.1}
    return asked


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@dataclass
class Answer:
    """What a user has of one stream."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    usage: tuple[int, int, int] | None = None
    marks: list[dict[str, Any]] = field(default_factory=list)
    heads: set[tuple[str, str, int]] = field(default_factory=set)
    error: BaseException | None = None
    last_at_s: float | None = None
    gap_s: float = 0.0

    @property
    def substance(self) -> tuple[Any, ...]:
        return self.text, self.ids, self.finish, self.usage

    def add(self, chunk: Any) -> None:
        now_s = time.monotonic()
        self.gap_s = max(self.gap_s, now_s - (self.last_at_s or now_s))
        self.last_at_s = now_s
        self.heads.add((chunk.id, chunk.object, chunk.created))
        if chunk.usage:
            self.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens, chunk.usage.total_tokens)
        if hasattr(chunk, "resumed"):
            self.marks.append(chunk.resumed)
        for choice in chunk.choices:
            self.text += (choice.delta.content or "") if hasattr(choice, "delta") else choice.text
            self.ids += getattr(choice, "token_ids", None) or ()
            self.finish = choice.finish_reason or self.finish


class Replicas:
    """The service, and the processes of its jobs."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.environ = {**os.environ, **user_environment(), "HPC_SERVE_HOME": str(self.home)}
        self.environ["PATH"] = f"{self.environ['PATH']}:{os.environ['PATH']}"
        self.jobs: list[str] = []
        make_demo_model(folder / "model", like="8b")
        self.model = folder / "model"

    def hpc_serve(self, *words: str) -> str:
        argv = ["hpc-serve", *words]
        done = subprocess.run(argv, env=self.environ, capture_output=True, text=True, timeout=START_S, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def start(self, *options: str, engine: tuple[str, ...] = ()) -> None:
        where = ("--model", str(self.model), "--name", NAME, *LOCAL)
        said = self.hpc_serve("submit", *where, *options, "--", *_ENGINE, *engine)
        self.jobs.append(re.search(r"submitted as job (\S+)", said)[1])

    def processes_of(self, job: str) -> list[int]:
        return processes.of_job(job, processes.pids())

    def kill_engine(self, job: str) -> None:
        """End the engine's server as the kernel does when memory is short."""
        self.signal(job, is_server, signal.SIGKILL)

    def signal(self, job: str, is_meant: Callable[[tuple[str, ...]], bool], number: signal.Signals) -> None:
        """Send a signal to the processes of a job whose command line is meant."""
        meant = [pid for pid in self.processes_of(job) if is_meant(processes.argv_of(pid))]
        assert meant, [processes.argv_of(pid) for pid in self.processes_of(job)]
        for pid in meant:
            os.kill(pid, number)

    def close(self) -> None:
        subprocess.run(["hpc-serve", "stop", "--now", NAME], env=self.environ, capture_output=True, check=False)
        for job in self.jobs:
            for pid in self.processes_of(job):
                os.kill(pid, signal.SIGKILL)


def is_server(argv: tuple[str, ...]) -> bool:
    return "serve" in argv and "hpc_serve.job" not in argv  # the launcher's words hold the engine's


def stream(client: Any, asked: dict[str, Any], answer: Answer, begun: threading.Event | None = None) -> Answer:
    """Read a whole stream; `begun` is set once some of its tokens are here."""
    api = client.completions if "prompt" in asked else client.chat.completions
    try:
        for count, chunk in enumerate(api.create(model=client.model, **asked)):
            answer.add(chunk)
            if begun is not None and count == BEGUN:
                begun.set()
    except StreamBrokenError as error:
        answer.error = error
    return answer
