"""Streams of real vLLM whose engine is killed half-way go on at another replica, token for token.

Two replicas of one service on this machine, started by `hpc-serve submit`; one of them is killed under load.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.client import connect
from hpc_serve.demo_model import make_demo_model
from hpc_serve.errors import StreamBrokenError
from tests.cluster import processes, wait_for
from tests.cluster.environment import user_environment
from tests.support.patience import be_patient

pytestmark = [pytest.mark.engine]

NAME = "resumed"
START_S = 600.0
TOKENS = 400  # some seconds on two cores
BEGUN = 12
KILLS = 3  # as often as an engine is started again in place
# Two chats, two completions, and so on, one after the other: each replica has one of two, as it has fewer under way.
STARTED = (0, 2, 1, 3, 4, 6, 5, 7, 8, 9, 10, 11)

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

    @property
    def substance(self) -> tuple[Any, ...]:
        return self.text, self.ids, self.finish, self.usage

    def add(self, chunk: Any) -> None:
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

    def start(self) -> None:
        where = (
            "--model",
            str(self.model),
            "--name",
            NAME,
            "--cluster",
            "local",
            "--gpu",
            "cpu",
            "--gpu-memory",
            "2GiB",
        )
        said = self.hpc_serve("submit", *where, "--", "--max-model-len", "2048", "--enforce-eager")
        self.jobs.append(re.search(r"submitted as job (\S+)", said)[1])

    def processes_of(self, job: str) -> list[int]:
        mark = f"HPC_SERVE_JOB_ID={job}".encode()
        return [pid for pid in processes.pids() if processes.is_alive(pid) and mark in environ_of(pid)]

    def kill_engine(self, job: str) -> None:
        """End the engine's server as the kernel does when memory is short."""
        servers = [pid for pid in self.processes_of(job) if "serve" in processes.argv_of(pid)]
        assert servers, [processes.argv_of(pid) for pid in self.processes_of(job)]
        for pid in servers:
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        subprocess.run(["hpc-serve", "stop", "--now", NAME], env=self.environ, capture_output=True, check=False)
        for job in self.jobs:
            for pid in self.processes_of(job):
                os.kill(pid, signal.SIGKILL)


def environ_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    made = Replicas(tmp_path_factory.mktemp("resume"))
    try:
        made.start()
        made.start()
        yield made
    finally:
        made.close()


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


def kill_under_load(replicas: Replicas, client: Any, asked: list[dict[str, Any]]) -> list[Answer]:
    """The answers to these requests, streams at the same time, while the engine of one replica is killed."""
    pool = client._watch.pool
    wait_for(lambda: len(client._watch.refresh().ready) == 2, START_S, what="both replicas", step_s=1.0)
    begun = [threading.Event() for _ in asked]
    answers = [Answer() for _ in asked]
    with ThreadPoolExecutor(len(asked)) as threads:
        streams = []
        for number in STARTED:
            streams.append(threads.submit(stream, client, asked[number], answers[number], begun[number]))
            wait_for(lambda: taken_by(pool) == len(streams), 300, what="a replica was chosen", step_s=0.005)
        assert all(each.wait(300) for each in begun)
        replicas.kill_engine(replicas.jobs[0])
        for under_way in streams:
            under_way.result(600)
    return answers


def taken_by(pool: Any) -> int:
    """How many requests have a replica."""
    return sum(pool._under_way.values())


def were_interrupted(answers: list[Answer]) -> bool:
    """Whether the kill met four streams, chats and completions. On a slow machine all may have ended before."""
    met = [answer for answer in answers if answer.marks or answer.error is not None]
    return len(met) >= 4 and any(each.marks for each in answers[0:8:2]) and any(each.marks for each in answers[1:8:2])


def test_streams_go_on_token_for_token_when_an_engine_is_killed(replicas, show_table, monkeypatch):
    be_patient(monkeypatch)  # an engine is lost when it is killed, and each replica gets its half
    client = connect(NAME, home=replicas.home, wait=START_S)
    wait_for(lambda: len(client._watch.refresh().ready) == 2, START_S, what="both replicas", step_s=1.0)
    others: list[dict[str, Any]] = [
        {**ask(0), "n": 2, "temperature": 1.0},
        {**ask(1), "n": 2, "temperature": 1.0},
        {**ask(0), "temperature": 1.0},
        {**ask(1), "temperature": 1.0},
    ]
    asked = [*map(ask, range(8)), *others]
    with ThreadPoolExecutor(len(asked)) as threads:
        unbroken = list(threads.map(lambda wanted: stream(client, wanted, Answer()), asked[:8]))
    for _ in range(KILLS):  # the engine is started again in place
        answers = kill_under_load(replicas, client, asked)
        for number, (answer, whole) in enumerate(zip(answers, unbroken, strict=False)):
            assert len(whole.ids) == TOKENS
            assert answer.substance == whole.substance, number
            assert len(answer.heads) == 1
            assert all(mark["exact"] and mark["at_token"] >= BEGUN - 1 for mark in answer.marks)
        for answer in answers[8:10]:
            if answer.error is not None:
                assert isinstance(answer.error, StreamBrokenError)
                assert answer.error.text
        for answer in answers[10:]:
            assert len(answer.ids) == TOKENS
            assert not any(mark["exact"] for mark in answer.marks)
        if were_interrupted(answers):
            break
    assert were_interrupted(answers)
    resumed = [answer for answer in answers if answer.marks]
    broken = [answer for answer in answers if answer.error is not None]
    places = ", ".join(str(answer.marks[0]["at_token"]) for answer in resumed)
    show_table(f"{len(resumed)} of {len(answers)} streams went on, after {places} tokens; {len(broken)} could not")
