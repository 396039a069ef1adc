"""The stages of a start, while a person waits: on a terminal one line that changes, elsewhere plain lines."""

from __future__ import annotations

import time

import click
from rich.progress import TimeElapsedColumn
from rich.text import Text

from hpc_serve.cli.console import ChangingLine
from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.rendezvous.store import ServiceStore, own_store
from hpc_serve.submit.plans.planned_speed import ENCODER_POSITIONS
from hpc_serve.submit.status.job_status import CoarseChanges, detail_words, stages_words
from hpc_serve.vllm.arguments import read_arguments, value_of

_TRANSCRIBES = 'audio.transcriptions.create(model=client.model, file=open("….wav", "rb"))'
"""What a client is asked for a transcription."""


def follow_until_ready(
    service: str, *, job_id: str | None = None, replicas: int = 1, timeout_s: float | None = None
) -> ReplicaStatus:
    """Show the stages of a service until `replicas` of them are ready. Ctrl-C does not end the service.

    Raises what `wait` raises.
    """
    from hpc_serve.submit.services.wait import wait

    store = own_store()
    try:
        with Stages(service) as stages:
            status = wait(store, service, job_id=job_id, replicas=replicas, timeout_s=timeout_s, on_change=stages.show)
    except KeyboardInterrupt:
        click.echo(
            f"\nNo longer watching; {service} goes on. Come back: hpc-serve wait {service}. "
            f"End it: hpc-serve stop {service}.",
            err=True,
        )
        raise click.exceptions.Exit(130) from None
    where = f"with {replicas} replicas" if replicas > 1 else f"at {status.address}"
    click.echo(f"{service} is ready {where}. {_first_use(store, status)}", err=True)
    return status


def _first_use(store: ServiceStore, status: ReplicaStatus) -> str:
    """A sentence on how to ask a service that is ready."""
    submitted = store.read_submitted(status.service)
    job = next((job for job in submitted if job.job_id == status.job_id), None)
    if job is not None and value_of(read_arguments(job.engine_args), "--runner") == "pooling":
        return f"It generates no text. {calls_without_chat(status.service)}"
    if job is not None and job.predicted.get(ENCODER_POSITIONS):
        return f'It transcribes audio: `client.{_TRANSCRIBES}` after `client = hpc_serve.connect("{status.service}")`.'
    return f"Try: hpc-serve chat {status.service}"


def calls_without_chat(service: str) -> str:
    """The words of Python that ask a service for embeddings, for the scores of a reranker, or for a transcription."""
    return (
        f'In Python, after `client = hpc_serve.connect("{service}")`: '
        '`client.embeddings.create(model=client.model, input="…")` asks an embedder, '
        '`client.post("/rerank", body={"model": client.model, "query": "…", "documents": ["…"]}, cast_to=object)` '
        f"a reranker, and `client.{_TRANSCRIBES}` a speech model."
    )


class Stages(ChangingLine):
    """The stages of a start, on stderr: on a terminal one line that changes, elsewhere a line for each coarse change.

    Once the replica is ready, the stages are told with their times.
    """

    def __init__(self, service: str) -> None:
        super().__init__(TimeElapsedColumn())
        self._service = service
        self.change(service)
        self._began_s = self._stage_began_s = time.monotonic()
        self._stage = ""
        self._changes = CoarseChanges()

    def show(self, status: ReplicaStatus) -> None:
        """Show a status."""
        words = stage_line(status)
        self.change(f"{self._service} {words}")
        now_s = time.monotonic()
        if not self.is_shown:
            if self._changes.is_one(status):
                self.console.print(Text(f"{_clock(now_s - self._began_s)} {self._service} {words}"))
        elif (stage := status.stage or words) != self._stage:
            if self._stage:
                self.console.print(Text(f"  {_clock(now_s - self._stage_began_s)} {self._stage}", style="dim"))
            self._stage, self._stage_began_s = stage, now_s
        if status.state == "ready" and (stages := stages_words(status)):
            self.console.print(Text(f"{self._service} took: {stages}"))


def stage_line(status: ReplicaStatus) -> str:
    """How a replica is, as one line; for one that starts without the word itself."""
    return (detail_words(status) if status.state == "starting" else "") or status.sentence


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds))
