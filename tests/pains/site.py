"""The site on which pains are brought about: the test cluster, its users, jobs, and what the commands say of them."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpc_serve.demo_model import make_demo_model
from tests.cluster import SlurmCluster, wait_for
from tests.cluster.environment import user_environment
from tests.e2e.jobs import User, layout_script, stub_script
from tests.pains.pain import Seen

PAST_WEIGHTS = ("weights", "compile", "capture", "server")
WITHIN_S = 300.0
_MOST_LOGS = 4
_LAST_LINES = 15
Edit = Callable[[str], str]


@dataclass(frozen=True)
class Job:
    service: str
    job_id: str
    began_at: float


class Site:
    """Alice's jobs on the cluster. Those of the stub engine are for what stands around the engine."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.model = cluster.shared / "models" / "8b"
        self.make_model()
        self.alice = User(cluster, user_environment())
        self.mallory = User(cluster, user_environment(), name="mallory")
        self.serving: Job | None = None

    def make_model(self) -> None:
        """The tiny model, which every user reads."""
        if not self.model.exists():
            make_demo_model(self.model, like="8b")

    def submit(self, service: str, *stub_args: str, **given: Any) -> Job:
        """A job of the stub engine on two nodes, the first two unless `options` of sbatch say otherwise.

        `given`: sizes of its layout, and what `_sbatch` takes.
        """
        shape = {"num_nodes": 2, "pipeline_parallel_size": 2}
        return self._sbatch(service, partial(stub_script, service, *stub_args), **{**shape, **given})

    def submit_engine(self, service: str, *engine_args: str, env: Mapping[str, str] | None = None, **given: Any) -> Job:
        """A job of real vLLM with a tiny model."""
        small = ("--kv-cache-memory-bytes", "67108864", "--max-model-len", "512")
        make = partial(layout_script, service, model="8b", engine_args=engine_args or small)
        return self._sbatch(service, make, env={"HPC_SERVE_MODEL": str(self.model), **(env or {})}, **given)

    def _sbatch(
        self,
        service: str,
        make: Callable[..., str],
        *,
        edit: Edit = str,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        **layout: Any,
    ) -> Job:
        script = self.alice.write(f"{service}.sh", edit(make(**layout)))
        began_at = time.monotonic()
        return Job(service, self.alice.sbatch(script, *options, env=env), began_at)

    # -- what is told

    def failed(self, job: Job) -> Seen:
        """What `doctor` says of a job that has failed, once it has left its nodes: then all logs are there.

        The seconds are those until its record, or Slurm, said that it has failed.
        """
        wait_for(lambda: self._is_over(job), WITHIN_S, what=f"the end of {job.service}")
        seconds = time.monotonic() - job.began_at
        wait_for(lambda: not self.alice.is_queued(job.job_id), WITHIN_S, what=f"{job.service} to leave its nodes")
        return self.doctor(job, seconds)

    def doctor(self, job: Job, seconds: float | None = None) -> Seen:
        """What `doctor` says of a job now."""
        done = self.alice.hpc_serve("doctor", job.job_id, "--json")
        took_s = time.monotonic() - job.began_at if seconds is None else seconds
        try:
            report = json.loads(done.stdout)
        except ValueError:
            return Seen(said=done.stdout + done.stderr, by="?", is_before_weights=None, seconds=took_s)
        findings = report["findings"]
        if not findings:
            said, by = f"(nothing; it is {report['state']}: {report['reason']})", "status"
        else:
            said, by = findings[0]["cause"], findings[0]["name"]
            lines = [line["text"] for line in findings[0]["lines"]]
            if by == "preflight":
                by = next((line.partition("preflight check ")[2].partition(":")[0] for line in lines), by)
        return Seen(said=said, by=by, is_before_weights=self.is_before_weights(job), seconds=took_s)

    def ready(self, job: Job) -> dict[str, Any]:
        return self.alice.wait_until_ready(job.service, job.job_id, WITHIN_S)

    def status(self, job: Job) -> dict[str, Any]:
        done = self.alice.hpc_serve("status", job.job_id, "--json")
        return dict(json.loads(done.stdout)["services"][-1])

    def is_before_weights(self, job: Job) -> bool:
        start = (self.alice.record(job.service, job.job_id) or {}).get("start") or {}
        return start.get("stage") not in PAST_WEIGHTS and not set(PAST_WEIGHTS) & set(start.get("took_s", ()))

    def _is_over(self, job: Job) -> bool:
        record = self.alice.record(job.service, job.job_id)
        has_failed = record is not None and record["state"] in ("failed", "stopped")
        return has_failed or not self.alice.is_queued(job.job_id)

    def script_log(self, job: Job) -> str:
        path = self.alice.home / f"hpc-serve-{job.service}-{job.job_id}.log"
        return path.read_text() if path.exists() else ""

    def node_log(self, job: Job, rank: int = 0) -> str:
        """What the launcher of a node wrote."""
        logs = self.alice.home / ".hpc-serve" / "services" / job.service / "logs"
        return (logs / f"{job.job_id}-node{rank}.log").read_text()

    # -- what is changed for a while

    def root(self, node: str, *argv: str) -> str:
        done = self.cluster.run(argv, user="root", node=node)
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)} on {node}: {done.stderr.strip()}")
        return done.stdout

    @contextlib.contextmanager
    def changed(self, node: str, change: Sequence[str], back: Sequence[str]) -> Iterator[None]:
        """A change of a node by root, taken back once the jobs under it have ended."""
        self.root(node, *change)
        try:
            yield
            self.clear()
        finally:
            self.root(node, *back)

    @contextlib.contextmanager
    def small_disk(self, node: str, folder: str, options: str) -> Iterator[None]:
        with self.changed(node, ("mount", "-t", "tmpfs", "-o", options, "tmpfs", folder), ("umount", "-l", folder)):
            yield

    @contextlib.contextmanager
    def cgroup(self, node: str, controller: str, file: str, limit: int) -> Iterator[None]:
        """The node's slurmd, and all that it starts from now on, in a cgroup with a limit; ends its jobs at the end."""
        folder = Path("/sys/fs/cgroup", controller, f"{self.cluster.config.name}-{node}")
        folder.mkdir()
        slurmd = [pid for pid in self.cluster.pids_on(node) if b"slurmd\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        try:
            (folder / file).write_text(str(limit))
            for pid in slurmd:
                (folder / "cgroup.procs").write_text(str(pid))
            yield
            self.clear()
        finally:

            def is_empty() -> bool:
                for pid in (folder / "cgroup.procs").read_text().split():
                    with contextlib.suppress(OSError):
                        (folder.parent / "cgroup.procs").write_text(pid)
                return not (folder / "cgroup.procs").read_text()

            wait_for(is_empty, 60, what="an empty cgroup")
            folder.rmdir()

    def environment(self, name: str, *, path: str, programs: Mapping[str, str]) -> dict[str, str]:
        """An environment of alice's with these programs, each a script of bash, and what else is on `path`."""
        folder = self.alice.home / name / "bin"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "activate").write_text(f"export PATH={folder}:{path}\n")
        for program, text in {"python": f'exec {sys.executable} "$@"', **programs}.items():
            (folder / program).write_text(f"#!/bin/bash\n{text}\n")
            (folder / program).chmod(0o755)
        return {"HPC_SERVE_ENV": str(folder.parent)}

    def evidence(self) -> str:
        """What is there to see of the jobs that are in the queue: states, records, the ends of all their logs."""
        queue = self.alice.run("squeue", "--all", "--noheader", "--user", "alice", "--format=%i %j %T %M %R").stdout
        told = [f"squeue: {queue.strip() or '(nothing)'}"]
        for path in sorted((self.alice.home / ".hpc-serve" / "services").glob("*/*-r*.json"), key=_changed_at)[-2:]:
            record = json.loads(path.read_text())
            told.append(
                f"{path.name}: " + ", ".join(f"{key} {record.get(key)!r}" for key in ("state", "stage", "reason"))
            )
        logs = [*self.alice.home.glob("*.log"), *self.alice.home.glob(".hpc-serve/services/*/logs/*.log")]
        for path in sorted(logs, key=_changed_at)[-_MOST_LOGS:]:
            lines = path.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            told += [f"== {path.name}", *(line[:300] for line in lines)]
        return "\n".join(told)

    def clear(self) -> None:
        """End what is left of a pain."""
        self.serving = None
        self.alice.run("scancel", "--user", "alice")
        wait_for(lambda: not self.alice.processes(), 180, what="the end of what alice runs", step_s=0.5)


def _changed_at(path: Path) -> float:
    return path.stat().st_mtime


def before_attempts(text: str) -> Edit:
    """Have a script do something before it starts the launchers."""

    def edit(script: str) -> str:
        before, attempts, after = script.partition("\nfor attempt in")
        assert attempts
        return f"{before}\n{text}{attempts}{after}"

    return edit


def replaced(old: str, new: str) -> Edit:
    """Have a script say something else."""

    def edit(script: str) -> str:
        assert old in script, f"the script has no {old!r}"
        return script.replace(old, new)

    return edit
