"""The row of `batch`: 20,000 lines by a batch in a job of its own, while its client, its jobs and its nodes are killed.

Each is killed three times, in turn, and replicas hand over at their time limits meanwhile. Where the batch's job is
over, the same command is given again. An id that is not answered right, and once, is lost. The engines are stubs.
"""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from tests.cluster import processes, wait_for
from tests.faults.fault import fault
from tests.faults.outcomes import Outcome
from tests.faults.service import TOKENS, hold
from tests.faults.slurm_service import USER, SlurmService
from tests.support.stub_engine import chat_context, greedy_answer

LINES = 20_000
WORDS = 4
BETWEEN = 900  # lines between two kills: more than half is left for the handovers
AGAIN_S = 900.0
END_S = 1500.0
SETTLED = 300
MIB = 1024
_CLIENT = ("-m", "hpc_serve.cli", "batch")


@fault(
    needs_slurm=True,
    is_batch=True,
    hold_s=20.0,
    bounds="2:3",
    each=("--time", "3", "--signal", "B:USR1@30", "--keep-up"),
    slots=16,
    token_s=0.5,
)
def batch(service: SlurmService) -> Outcome:
    """20,000 lines of `batch --detach`: client, jobs and nodes are killed in turn, each three times; two handovers."""
    run = _BatchRun(service)
    run.submit()
    for number, kill in enumerate(3 * (run.kill_client, run.kill_jobs, run.kill_node), 1):
        run.wait_for_lines(number * BETWEEN)
        kill()
    run.wait_for_end()
    assert run.handovers >= 2, f"only {run.handovers} handovers"
    return run.outcome()


class _BatchRun:
    """The batch's files and jobs, and what was seen of its memory: (lines of the output, MiB), by process."""

    def __init__(self, service: SlurmService) -> None:
        self.service = service
        self.requests, self.output = (service.out.with_name(name) for name in ("in.jsonl", "answers.jsonl"))
        bodies = ({"messages": _messages(n), "max_tokens": WORDS, "temperature": 0} for n in range(LINES))
        lines = (
            json.dumps({"custom_id": f"q{n}", "url": "/v1/chat/completions", "body": body})
            for n, body in enumerate(bodies)
        )
        self.requests.write_text("".join(f"{line}\n" for line in lines))
        self.submissions = 0
        self.memory: dict[int, list[tuple[int, float]]] = {}
        self.seen: set[str] = set()
        self.killed: set[str] = set()
        self.batches: set[str] = set()
        self.job = ""

    def submit(self) -> None:
        where = ("--cpus-per-task", "1", "--mem", "1G", "--time", "30", "--no-exclusive")
        words = ("batch", str(self.requests), str(self.output), "--service", self.service.name, "--detach", *where)
        said = self.service.hpc_serve(*words)
        found = re.search(r"submitted as job (\d+)", said)
        assert found, said
        self.job = found[1]
        self.batches.add(self.job)
        self.submissions += 1

    # -- what is seen

    def lines(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def clients(self) -> list[int]:
        found = self.service.cluster.processes(USER)
        return [one.pid for one in found if processes.argv_of(one.pid)[1:4] == _CLIENT]

    def look(self) -> int:
        """Note memory and jobs, give the command again if its job is over, and return the number of answers."""
        lines = self.lines()
        for pid in self.clients():
            if match := re.search(r"VmRSS:\s+(\d+)", _read(Path(f"/proc/{pid}/status"))):
                self.memory.setdefault(pid, []).append((lines, int(match[1]) / MIB))
        self.seen |= set(self.replicas())
        if not self.is_done() and self.state(self.job) in ("", "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"):
            self.submit()
        return lines

    def state(self, job: str) -> str:
        done = self.service.run(["squeue", "--noheader", "--states=all", "--jobs", job, "--format=%T"])
        return done.stdout.strip() if done.returncode == 0 or "Invalid job id" in done.stderr else "UNKNOWN"

    def replicas(self) -> list[str]:
        words = ["squeue", "--noheader", "--states=RUNNING", "--user", USER, "--format=%i", "--array"]
        return [job for job in self.service.run(words).stdout.split() if job not in self.batches]

    def is_done(self) -> bool:
        return self.lines() >= LINES

    def wait_for_lines(self, lines: int) -> None:
        wait_for(lambda: self.look() >= lines, AGAIN_S, what=f"{lines} answers", step_s=1.0)
        assert not self.is_done(), "the batch was over before all was killed"

    def wait_for_end(self) -> None:
        def is_over() -> bool:
            self.look()
            return self.is_done() and self.state(self.job) in ("", "COMPLETED")

        wait_for(is_over, END_S, what="the end of the batch", step_s=1.0)

    @property
    def handovers(self) -> int:
        """Return how many jobs of replicas ended by themselves: at their time limit."""
        return len(self.seen - self.killed - set(self.replicas()))

    # -- what is killed

    def kill_client(self) -> None:
        self.service.signal(self.clients(), signal.SIGKILL)

    def kill_jobs(self) -> None:
        jobs = [self.job, *self.replicas()[:1]]
        self.killed |= set(jobs)
        for job in jobs:
            self.service.on_cluster("scancel", job)

    def kill_node(self) -> None:
        """Cut the power of the node that the client runs on."""
        cluster = self.service.cluster
        nodes = {one.host for one in cluster.processes(USER) if one.pid in self.clients()}
        node = next(iter(nodes & set(cluster.nodes)), self.service.node(0))
        words = ["squeue", "--noheader", f"--nodelist={node}", "--user", USER, "--format=%i", "--array"]
        self.killed |= set(self.service.run(words).stdout.split())
        cluster.disconnect(node)
        cluster.power_off(node)
        try:
            hold(self.service.hold_s)
        finally:
            cluster.power_on(node)

    # -- what became of the lines

    def outcome(self) -> Outcome:
        answers: Counter[str] = Counter()
        wrong = 0
        for line in self.output.read_text().splitlines():
            found = json.loads(line)
            answers[found["custom_id"]] += 1
            wrong += _text(found["response"]["body"]) != _right(found["custom_id"])
        errors = self.output.with_name("answers.errors.jsonl")
        failed = errors.read_text().splitlines() if errors.exists() else []
        double = sum(count > 1 for count in answers.values())
        ids = {f"q{n}" for n in range(LINES)}
        missing = len(ids - set(answers))
        reasons = {"double": double, "missing": missing, "wrong": wrong}
        return Outcome(
            fault=self.service.name,
            sent=LINES,
            answered=sum(count == 1 for count in answers.values()),
            needless=len(failed),
            reported=len(failed),
            lost=double + missing + wrong,
            reasons={reason: count for reason, count in reasons.items() if count},
            note=f"{self.submissions} submissions, {self.handovers} handovers; memory of the client: {self.growth()}",
        )

    def growth(self) -> str:
        """Return how the memory of the process that answered most grew, in words."""
        looks = max(self.memory.values(), key=lambda looks: looks[-1][0] - looks[0][0])
        began, *_ = (look for look in looks if look[0] >= looks[0][0] + SETTLED)
        return f"{began[1]:.0f} MiB at line {began[0]:,}, {looks[-1][1]:.0f} MiB at line {looks[-1][0]:,}"


def _messages(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"Line {number}: say something."}]


def _right(custom_id: str) -> str:
    whole = greedy_answer(chat_context(_messages(int(custom_id[1:]))), TOKENS)
    return " ".join(whole.split(" ")[:WORDS])


def _text(body: Any) -> str:
    return str(body["choices"][0]["message"]["content"])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
