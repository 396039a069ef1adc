"""A small world in which commands of the documents run: stand-ins for Slurm, stub engines, a home and a clone's folder.

A job that is submitted gets a stub engine, with a record as its launcher would write it, and ends when it is asked to.
It is for what stands around the engine; the same commands meet a real Slurm and vLLM in tests/e2e.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpc_serve.demo_model import make_demo_model
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ServiceStore, drain_file, read_drain_request
from tests.support.fake_slurm import FakeSlurm
from tests.support.page_blocks import CHECKOUT, Block
from tests.support.stubs import StubEngine, StubService

SITE = """\
partition: gpu
gpu: h100-80gb
gpus_per_node: 8
venv: {venv}
"""
STEP_S = 0.05
WITHIN_S = 180.0
READY_AT_START = {"70b": "meta-llama/Llama-3.3-70B-Instruct", "405b": "meta-llama/Llama-3.1-405B-Instruct"}


class PageWorld:
    """The world of one page; its blocks run one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home" / "me"
        self.project = folder / "project"
        self.clone = folder / "clone"
        for made in (self.home / ".config" / "hpc-serve", self.project / "models", self.clone):
            made.mkdir(parents=True, mode=0o700)
        for name in ("envs", "sbatch", "benchmarks", "tests", "hpc_serve", "templates", "examples"):
            (self.clone / name).symlink_to(CHECKOUT / name)
        (self.project / "images").mkdir()
        (self.project / "images" / "hpc-serve.sif").touch()
        make_demo_model(self.project / "models" / "my-model")
        self.prompts()
        self.slurm = FakeSlurm(folder / "slurm")
        venv = folder / "venv"
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "activate").touch()
        (folder / "site.yaml").write_text(SITE.format(venv=venv))
        self.store_home = self.home / ".hpc-serve"
        self.services: dict[str, StubService] = {}
        self.jobs: dict[str, tuple[EndpointRecord, StubEngine]] = {}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.live)

    def prompts(self) -> None:
        """Write the files that examples read."""
        lines = [json.dumps({"prompt": f"Say {number}."}) for number in range(8)]
        (self.clone / "mine.jsonl").write_text("\n".join(lines) + "\n")
        turns = [{"from": "human", "value": "Hello there"}, {"from": "gpt", "value": "Hello, and welcome to you"}]
        talks = [{"id": str(number), "conversations": turns} for number in range(40)]
        (self.clone / "ShareGPT_V3_unfiltered_cleaned_split.json").write_text(json.dumps(talks))

    def __enter__(self) -> PageWorld:
        try:
            for name, model in READY_AT_START.items():
                self.begin(name, f"{90 + len(self.services)}", model)
        except BaseException:
            self.close()
            raise
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        self.close()

    def close(self) -> None:
        """End the engines."""
        for service in self.services.values():
            service.close()

    def run(self, block: Block) -> subprocess.CompletedProcess[str]:
        """Run the lines of a block that run here, and return what they printed."""
        text = re.sub(r"(?<![\w.])/project\b", str(self.project), block.runs).replace("chgrp GROUP", "chgrp $(id -gn)")
        argv = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
        return subprocess.run(
            [*argv, text],
            cwd=self.clone,
            env=self.environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )

    def environ(self) -> Mapping[str, str]:
        return {
            "PATH": f"{self.slurm.bin}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(self.home),
            "USER": os.environ.get("USER", "root"),
            "LANG": "C.UTF-8",
            "HF_HUB_OFFLINE": "1",
            "HPC_SERVE_MODEL": str(self.project / "models" / "my-model"),
            "HPC_SERVE_SYSTEM_SITE": str(self.folder / "site.yaml"),
        }

    def live(self) -> None:
        """Begin the jobs that wait, and end those that are asked to."""
        while not self.over.wait(STEP_S):
            queue = (self.folder / "slurm" / "queue").read_text()
            for job_id in re.findall(r"^(\S+?)\|PENDING", queue, re.MULTILINE):
                if job_id not in self.jobs and (found := self.submitted(job_id)):
                    self.begin(*found)
            for job_id, (record, engine) in list(self.jobs.items()):
                cancelled = job_id in self.slurm.cancelled
                asked = read_drain_request(drain_file(self.services[record.service].store, record.service, record.name))
                if cancelled or asked is not None:
                    self.end(job_id, record, engine)

    def submitted(self, job_id: str) -> tuple[str, str, str] | None:
        """Return the service, the job and the model of what was submitted, once it is written down."""
        store = ServiceStore(self.store_home)
        for service in store.services():
            for job in store.read_submitted(service):
                if job.job_id == job_id:
                    return service, job_id, job.model
        return None

    def begin(self, name: str, job_id: str, model: str) -> None:
        """Have a replica be ready."""
        service = self.services.setdefault(name, StubService(self.store_home, name))
        names = (model, name)
        flags = ("--served-model-name", *names, "--stub-greedy")
        engine = service.start(*flags, job_id=job_id, model=model, served_model_names=names)
        record = service.publish(engine, job_id=job_id, model=model, served_model_names=names, counter=2)
        logs = service.store.log_dir(name)
        logs.mkdir(mode=0o700, exist_ok=True)
        (logs / f"{job_id}-node0.log").write_text(f"{name} is ready at port {record.port}\n")
        self.jobs[job_id] = (record, engine)
        self.in_queue(job_id, "RUNNING")

    def end(self, job_id: str, record: EndpointRecord, engine: StubEngine) -> None:
        del self.jobs[job_id]
        engine.kill()
        service = self.services[record.service]
        service.renew(replace(record, counter=record.counter + 1), state="stopped", stage="stopped", reason="stopped")
        self.in_queue(job_id, "")
        self.slurm.job(job_id, "COMPLETED")

    def in_queue(self, job_id: str, state: str) -> None:
        """Have squeue list a job in a state, or no more."""
        path = self.folder / "slurm" / "queue"
        lines = [line for line in path.read_text().splitlines() if line.partition("|")[0] != job_id]
        if state:
            times = "2026-11-21T05:04:02|2026-11-21T17:04:02|12:00:00|0:10|2026-11-21T05:04:00"
            lines.append(f"{job_id}|{state}|None|n1|{times}|me|gpu|hpc-serve-x")
            self.slurm.job(job_id, state)
        path.write_text("".join(f"{line}\n" for line in lines))
