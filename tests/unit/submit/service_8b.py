"""The service 8b: its requests, scripts, submissions and states, as the tests of this folder ask for them."""

from __future__ import annotations

from typing import Any

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.rendezvous.record import SubmittedJob
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.plans.planning import plan_service
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.script.render import render_script
from hpc_serve.submit.services import services
from hpc_serve.submit.services.services import Submission
from hpc_serve.submit.status.status_reader import read_status
from tests.support.fake_slurm import FakeSlurm
from tests.support.stubs import make_record, make_submitted

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def request(**fields: Any) -> ServeRequest:
    return ServeRequest(**{"model": "8b", "service": "8b", **fields})


def script(**fields: Any) -> str:
    asked = request(**fields)
    return render_script(asked, plan_service(asked))


def submit(**fields: Any) -> Submission:
    return services.submit(request(**fields))


def states(store: ServiceStore) -> dict[str, str]:
    """The state of each replica, by its name."""
    return {status.name: status.state for status in read_status(store, "8b").replicas}


def before_sbatch(slurm: FakeSlurm, words: str) -> None:
    """Have sbatch run these words first."""
    path = slurm.bin / "sbatch"
    path.write_text(path.read_text().replace("#!/bin/bash\n", f"#!/bin/bash\n{words}\n", 1))


def submitted_job(store: ServiceStore, job_id: str = "7", **fields) -> SubmittedJob:
    job = make_submitted(**{"service": "8b", "model": MODEL, "job_id": job_id, **fields})
    store.write_submitted(job)
    return job


def queued(store: ServiceStore, slurm: FakeSlurm, state: str, reason: str = "None", partition: str = "gpu") -> None:
    """Job 7 was submitted, and squeue lists it."""
    submitted_job(store)
    slurm.queue(("7", state, reason), partition=partition)


def record(store: ServiceStore, job_id: str = "7", **fields):
    usual = {"service": "8b", "model": MODEL, "job_id": job_id, "state": "starting", "stage": "loading weights"}
    made = make_record(**{**usual, **fields})
    store.write(made)
    return made


def the_one(store: ServiceStore) -> ReplicaStatus:
    (status,) = read_status(store).everywhere
    return status
