"""What tests of whole jobs share: submit as a user would, read the records, say what is left on the nodes.

Tests run as root outside the cluster's hosts; everything that a user does is done on a host as that user.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.hub.hub import find_model
from hpc_serve.plan import ClusterSpec, accelerator, model_from_config, plan
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.submit.request.options import SlurmOptions
from hpc_serve.submit.request.request import Backend, ServeRequest
from hpc_serve.submit.script.render import render_script
from hpc_serve.vllm.arguments import names_in, without
from tests.cluster import SlurmCluster, wait_for

CHECKOUT = Path(__file__).resolve().parents[2]
STUB = CHECKOUT / "tests" / "support" / "stub_engine.py"
STREAMS_PROGRAM = Path(__file__).with_name("streams.py")
ENDS_WITHIN_S = 180.0  # KillWait is 30 s; measured: 3 to 8 s on an idle machine
SMALL = ("--mem", "2G", "--cpus-per-task", "2", "--no-exclusive")
BUSY = {"HPC_SERVE_CANARY_S": "30"}
"""For ranks that share two cores: they make a token in seconds."""
REAL_REPLICAS = [
    pytest.mark.slurm,
    pytest.mark.engine,
    pytest.mark.skipif(
        os.environ.get("HPC_SERVE_REAL_REPLICAS") != "1",
        reason="minutes of two cores, and 7 GB of memory (HPC_SERVE_REAL_REPLICAS is not 1): `make real-replicas`",
    ),
]

Record = dict[str, Any]


@dataclass(frozen=True)
class User:
    """Alice on the login host of the cluster, with her environment."""

    cluster: SlurmCluster
    environ: Mapping[str, str] = field(default_factory=dict)
    name: str = "alice"

    @property
    def home(self) -> Path:
        return self.cluster.home(self.name)

    def run(
        self, *argv: str, env: Mapping[str, str] | None = None, node: str | None = None, timeout: float = 300, **options
    ):
        """Run a command as this user; raises nothing for an exit code."""
        environ = {**self.environ, **(env or {})}
        return self.cluster.run(argv, user=self.name, env=environ, node=node, timeout=timeout, **options)

    def hpc_serve(self, *words: str, **options):
        return self.run("hpc-serve", *words, **options)

    def hpc_serve_said(self, *words: str, timeout: float = 300.0) -> str:
        """What a command of ours says; it must end well."""
        done = self.hpc_serve(*words, timeout=timeout)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def sbatch(self, script: Path | str, *options: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a script by hand; returns the job's id."""
        done = self.run("sbatch", *options, str(script), env=env)
        assert done.returncode == 0, done.stderr
        return re.search(r"\d+", done.stdout).group()

    def write(self, name: str, text: str) -> Path:
        """A file of this user's, in the home that all hosts see."""
        path = self.home / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)
        return path

    def record(self, service: str, job_id: str) -> Record | None:
        try:
            return json.loads((self.home / ".hpc-serve" / "services" / service / f"{job_id}-r0-0.json").read_text())
        except FileNotFoundError:
            return None

    def records(self, service: str, job_id: str = "*") -> list[Record]:
        """Those of all replicas of a job's first run; without a job, of all jobs."""
        folder = self.home / ".hpc-serve" / "services" / service
        return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{job_id}-r0-*.json"))]

    def wait_for_record(self, service: str, job_id: str, is_it: Callable[[Record], bool], timeout_s: float) -> Record:
        """The record once `is_it`; a job that fails on the way ends the wait at once, with its log."""

        def look() -> Record | None:
            is_queued = self.is_queued(job_id)  # before its record: it may write one and end between two looks
            record = self.record(service, job_id)
            if record and is_it(record):
                return record
            if record and record["state"] == "failed":
                raise AssertionError(
                    f"{record['failed_part']}: {record['reason']}\n" + "\n".join(record["last_log_lines"])
                )
            if not record and not is_queued:
                raise AssertionError(f"job {job_id} ended without a record: {self.log(service, job_id)}")
            return None

        return wait_for(look, timeout_s, what=f"{service} of job {job_id}")

    def wait_until_ready(self, service: str, job_id: str, timeout_s: float = 300) -> Record:
        return self.wait_for_record(service, job_id, lambda record: record["state"] == "ready", timeout_s)

    def is_queued(self, job_id: str) -> bool:
        """Whether Slurm still holds the job: pending, running or completing."""
        argv = ("squeue", "--noheader", "--jobs", job_id, "--states", "all", "--format=%T")

        def answer() -> Any:
            done = self.run(*argv)
            is_forgotten = "Invalid job id" in done.stderr
            return done if done.returncode == 0 or is_forgotten else None

        seen = wait_for(answer, 180, what="an answer of squeue").stdout.split()
        return bool(set(seen) & {"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING"})

    def wait_until_gone(self, job_id: str, timeout_s: float = ENDS_WITHIN_S) -> None:
        """Until Slurm has ended the job and no process of the user is left on any node."""
        self.wait_until_over(job_id, timeout_s)
        wait_for(lambda: not self.processes(), timeout_s, what=f"no process left of {self.name}")

    def wait_until_over(self, job_id: str, timeout_s: float = ENDS_WITHIN_S) -> None:
        """Until Slurm has ended the job."""
        wait_for(lambda: not self.is_queued(job_id), timeout_s, what=f"the end of job {job_id}")

    def processes(self) -> list[Any]:
        """This user's processes on the compute nodes."""
        return [process for process in self.cluster.processes(self.name) if process.host in self.cluster.nodes]

    def kill_at_once(self) -> None:
        """Kill all that the user runs on the nodes before any of it sees that another has ended.

        The newest first: at the end of the script, which is the oldest, Slurm lets what is stopped go on, and ends it
        by SIGTERM, of which a launcher would make a stop in order.
        """
        stopped: set[int] = set()
        while fresh := {process.pid for process in self.processes()} - stopped:
            send(fresh, signal.SIGSTOP)
            stopped |= fresh
        send(sorted(stopped, reverse=True), signal.SIGKILL)

    def begin_streams(self, service: str, number: int, *held: Path):
        """A program of this user's on the login host, with streams under way."""
        argv = [sys.executable, str(STREAMS_PROGRAM), service, str(number), *map(str, held)]
        program = self.cluster.popen(argv, user=self.name, env=dict(self.environ))
        said = program.stdout.readline()
        assert said.strip() == "begun", said + program.stdout.read()
        return program

    def cancel(self, job_id: str) -> None:
        done = self.run("scancel", job_id)
        assert done.returncode == 0, done.stderr

    def log(self, service: str, job_id: str) -> str:
        logs = sorted((self.home / ".hpc-serve" / "services" / service / "logs").glob(f"{job_id}*"))
        return "\n".join(f"== {path.name}\n{path.read_text()[-4000:]}" for path in logs)


def result_of(program) -> dict[str, Any]:
    """What a program says in its last line."""
    return json.loads(program.communicate(timeout=300)[0].splitlines()[-1])


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal processes that were listed; one may have ended since."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def layout_script(
    service: str,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    num_nodes: int = 1,
    model: str = "405b",
    backend: Backend = "auto",
    engine_args: Sequence[str] = (),
    engine_restarts: int | None = None,
    slurm: SlurmOptions | None = None,
) -> str:
    """A script for any layout of a scaled-down model; the planner is not asked whether the real one would fit."""
    found = find_model(model)
    real = plan(model_from_config(found.config, name=found.name), ClusterSpec(accelerator=accelerator("h100-80gb")))
    sizes = [
        "--tensor-parallel-size",
        str(tensor_parallel_size),
        "--pipeline-parallel-size",
        str(pipeline_parallel_size),
    ]
    small = replace(
        real,
        layout=Layout(
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            num_nodes=num_nodes,
        ),
        vllm_args=(*without(sizes, names_in(engine_args)), *engine_args),
        served_model_names=found.served_model_names,
    )
    request = ServeRequest(
        model=model,
        service=service,
        num_nodes=num_nodes,
        backend=backend,
        engine_args=tuple(engine_args),
        engine_restarts=engine_restarts,
        allow_unknown_vllm_options=True,  # the stand-in engine has options of its own
        slurm=slurm or SlurmOptions(exclusive=False, cpus_per_task=4, mem="4G"),
    )
    return render_script(request, small)


def stub_script(service: str, *stub_args: str, **layout: Any) -> str:
    """The same with the stub engine in vLLM's place, as a person would by editing the line."""
    text = layout_script(service, engine_args=stub_args, **layout)
    return text.replace("vllm serve", f"{sys.executable} {STUB} serve")


def with_another_ray(alice: User, folder: str, node: int, instead: str) -> Callable[[str], str]:
    """Edits a script: on one of its nodes, `ray` is another program, in a folder of that name."""
    ray = alice.write(
        f"{folder}/ray", f'#!/bin/bash\n[[ $SLURM_NODEID != {node} ]] || {instead}\nexec "$REAL_RAY" "$@"\n'
    )
    ray.chmod(0o755)

    def edit(script: str) -> str:
        before, attempts, after = script.partition("\nfor attempt in")
        assert attempts
        return f"{before}\nREAL_RAY=$(command -v ray)\nexport REAL_RAY PATH={ray.parent}:$PATH{attempts}{after}"

    return edit
