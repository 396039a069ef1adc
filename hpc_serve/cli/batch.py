"""`batch`: a file of requests in OpenAI's Batch format, answered by a service.

A service of its own is started and stopped by the commands `submit` and `stop`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_serve.cli.complete import live_service_names
from hpc_serve.cli.values import Duration, Written
from hpc_serve.durations import duration

if TYPE_CHECKING:
    from hpc_serve.batch import Progress

_FILE = click.Path(dir_okay=False, path_type=Path)


class _Shard(Written):
    name = "K/N"

    def read(self, word: str) -> tuple[int, int]:
        number, _, count = word.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise ValueError(f"{word!r} is no shard: write 3/16 for the third of sixteen.")
        return int(number), int(count)


@click.command("batch")
@click.argument("requests", type=_FILE)
@click.argument("output", type=_FILE)
@click.option("--service", metavar="NAME", shell_complete=live_service_names, help="Service [default: the ready one].")
@click.option("--model", help="Start this model if the service is not there, and stop it afterwards.")
@click.option("--replicas", metavar="N|MIN:MAX", help="With --model: replicas of the service that is started.")
@click.option(
    "--wait", type=Duration(), default=600.0, help="Wait for a service that is gone that long [default: 10m]."
)
@click.option("--in-order", is_flag=True, help="At the end, put the output in the order of the requests.")
@click.option("--any-model", is_flag=True, help="Ask the service's model, whatever a line names.")
@click.option("--retries", type=click.IntRange(min=0), default=5, help="Repeats of a 429 or 5xx answer [default: 5].")
@click.option("--retry-errors", is_flag=True, help="Ask the lines of the errors file again; the file is kept aside.")
@click.option("--shard", type=_Shard(), help="Only shard K of N [default in a job array: this task's].")
@click.option("--merge", "merges", is_flag=True, help="Join the files of all shards to the output.")
def batch_command(
    requests: Path,
    output: Path,
    service: str | None,
    model: str | None,
    replicas: str | None,
    shard: tuple[int, int] | None,
    merges: bool,
    **options: Any,
) -> None:
    """Answer the lines of REQUESTS, in OpenAI's Batch format, into OUTPUT.

    hpc-serve batch in.jsonl out.jsonl --service 70b

    Answers are appended as they come. However a run ended, the same command goes on with it. Lines without an answer go
    to out.errors.jsonl. In a job array each task takes a shard; --merge joins them afterwards. --model 70b starts a
    service for this batch; other options of a start are those of `hpc-serve submit`, before it.
    """
    import asyncio

    from hpc_serve import batch
    from hpc_serve.batch.answer_files import errors_path, shard_path
    from hpc_serve.cli.submit.request import default_service

    if merges:
        answered, failed = batch.merge(requests, output)
        click.echo(f"{output}: {answered} answers" + (f"; {failed} errors in {errors_path(output)}" if failed else ""))
        return
    shard = shard or _shard_of_array()
    if replicas and not model:
        raise click.UsageError("--replicas is of a service that --model starts: hpc-serve scale NAME changes another.")
    if model and shard:
        raise click.UsageError("Shards share one service: start it with hpc-serve submit, and give --service NAME.")
    service = service or (default_service(model) if model else None)
    own = _OwnService(service or "", model, replicas)

    async def run() -> Progress | None:
        last = None
        asked = {"service": service, "shard": shard, **options}
        async for answer in batch.run(requests, output, **asked, on_need=own.start, on_tick=_show):
            last = answer.progress
        return last

    try:
        done = asyncio.run(run())
    finally:
        own.stop()
    if done is None:
        click.echo("Nothing was left to ask.")
        return
    click.echo(f"{done.answered} answered, {done.before} were there. {_figures(done)}")
    if done.failed:
        errors = errors_path(shard_path(output, shard) if shard else output)
        click.echo(f"{done.failed} failed: {errors} says why; --retry-errors asks them again.", err=True)
        raise click.exceptions.Exit(1)


class _OwnService:
    """A service that the batch starts if it is not there, and then stops."""

    def __init__(self, name: str, model: str | None, replicas: str | None) -> None:
        self._name, self._model, self._replicas = name, model, replicas
        self._is_started = False

    def start(self) -> None:
        from hpc_serve.cli.submit.submit import submit_command
        from hpc_serve.client import services
        from hpc_serve.rendezvous.store import ServiceStore, default_home
        from hpc_serve.rendezvous.wanted_file import read_wanted

        if self._model is None:
            return
        wanted = read_wanted(ServiceStore(default_home(os.environ)), self._name)
        is_there = any(one.service == self._name and (one.ready or one.is_coming) for one in services())
        if is_there or (wanted is not None and wanted.state == "asleep"):
            click.echo(f"{self._name} is there already, and stays after the batch.", err=True)
            return
        options = ["--replicas", self._replicas] if self._replicas else []
        submit_command.main(
            [self._model, "--name", self._name, *options], prog_name="hpc-serve submit", standalone_mode=False
        )
        self._is_started = True

    def stop(self) -> None:
        from hpc_serve.cli.services.change import stop_command

        if self._is_started:
            stop_command.main([self._name], prog_name="hpc-serve stop", standalone_mode=False)


def _shard_of_array() -> tuple[int, int] | None:
    """Return this task's shard in a job array, whatever numbers its tasks have."""
    count = int(os.environ.get("SLURM_ARRAY_TASK_COUNT") or 0)
    if count < 2:
        return None
    first, last = (int(os.environ[f"SLURM_ARRAY_TASK_{name}"]) for name in ("MIN", "MAX"))
    step = (last - first) // (count - 1)
    number, rest = divmod(int(os.environ["SLURM_ARRAY_TASK_ID"]) - first, step or 1)
    if rest or first + step * (count - 1) != last:
        raise click.UsageError("The tasks of this array have no even numbers: give each its --shard K/N.")
    return number + 1, count


def _show(progress: Progress) -> None:
    click.echo(f"{progress.stage}: {_figures(progress)}", err=True)


def _figures(progress: Progress) -> str:
    done = progress.before + progress.answered + progress.failed
    words = [f"{done}/{progress.total} lines"]
    if progress.left and progress.left_s is not None:
        words.append(f"{duration(progress.left_s)} left")
    if progress.tokens_per_s is not None:
        words.append(f"{progress.tokens_per_s:,.0f} tokens/s")
    words += [f"{progress.gpu_hours:.2f} GPU-hours", f"{progress.failed} failed"]
    if progress.left:
        words.append(f"{progress.in_flight} of at most {progress.window} under way at {progress.replicas} replicas")
    return ", ".join(words)
