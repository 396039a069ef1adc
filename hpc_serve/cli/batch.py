"""`batch`: a file of requests in OpenAI's Batch format, answered by a service.

A service of its own is started and stopped by the commands `submit` and `stop`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_serve.cli.commands import FILE, SECONDS, GroupedCommand, Written
from hpc_serve.cli.complete import live_service_names
from hpc_serve.cli.console import ChangingLine
from hpc_serve.cli.submit.request import SLURM_OPTIONS, default_service, slurm_options
from hpc_serve.printable import printable
from hpc_serve.submit.site.site_files import read_site
from hpc_serve.units import duration

if TYPE_CHECKING:
    from hpc_serve.batch import Progress

_LINE_EVERY_S = 60.0
_GROUPS = {
    "Most used": ("service", "model", "replicas", "stops", "detach", "in_order", "retry_errors"),
    "How it asks": ("any_model", "retries", "wait"),
    "Shards": ("shard", "merges"),
    "Slurm, with --detach": (*SLURM_OPTIONS, "extra"),
}


def _read_shard(word: str) -> tuple[int, int]:
    number, _, count = word.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"{word!r} is no shard: write 3/16 for the third of sixteen.")
    return int(number), int(count)


_SHARD = Written("K/N", _read_shard)


@click.command("batch", cls=GroupedCommand, groups=_GROUPS)
@click.argument("requests", type=FILE)
@click.argument("output", type=FILE)
@click.option("--service", metavar="NAME", shell_complete=live_service_names, help="Service [default: the ready one].")
@click.option("--model", help="Start this model if the service is not there, and stop it afterwards.")
@click.option("--replicas", metavar="N|MIN:MAX|NAME:N,…", help="With --model: replicas of the service that is started.")
@click.option("--stop", "stops", is_flag=True, help="Stop the service afterwards, whoever has started it.")
@click.option("--detach", is_flag=True, help="Run as a Slurm job of its own, without a GPU, and return.")
@click.option("--wait", type=SECONDS, default=600.0, help="Wait for a service that is gone that long [default: 10m].")
@click.option("--in-order", is_flag=True, help="At the end, put the output in the order of the requests.")
@click.option("--any-model", is_flag=True, help="Ask the service's model, whatever a line names.")
@click.option("--retries", type=click.IntRange(min=0), default=5, help="Repeats of a 429 or 5xx answer [default: 5].")
@click.option("--retry-errors", is_flag=True, help="Ask the lines of the errors file again; the file is kept aside.")
@click.option("--shard", type=_SHARD, help="Only shard K of N [default in a job array: this task's].")
@click.option("--merge", "merges", is_flag=True, help="Join the files of all shards to the output.")
@slurm_options
def batch_command(
    requests: Path,
    output: Path,
    service: str | None,
    model: str | None,
    replicas: str | None,
    stops: bool,
    detach: bool,
    merges: bool,
    shard: tuple[int, int] | None,
    extra: tuple[str, ...],
    **options: Any,
) -> None:
    """Answer the lines of REQUESTS, in OpenAI's Batch format, into OUTPUT.

    hpc-serve batch in.jsonl out.jsonl --service 70b

    Answers are appended as they come. However a run ended, the same command goes on with it. Lines without an answer go
    to out.errors.jsonl. In a job array each task takes a shard; --merge joins them afterwards. --model 70b starts a
    service for this batch; other options of a start are those of `hpc-serve submit`, before it. sbatch's options are
    for --detach.
    """
    from hpc_serve import batch
    from hpc_serve.batch.answer_files import errors_path, shard_path

    slurm = {name: options.pop(name) for name in SLURM_OPTIONS}
    if merges:
        answered, failed = batch.merge(requests, output)
        click.echo(f"{output}: {answered} answers" + (f"; {failed} errors in {errors_path(output)}" if failed else ""))
        return
    shard = shard or _shard_of_array()
    if replicas and not model:
        raise click.UsageError("--replicas is of a service that --model starts: hpc-serve scale NAME changes another.")
    if shard and (model or stops):
        raise click.UsageError("Shards share one service: start it with hpc-serve submit, and give --service NAME.")
    if service is None and model:
        service = default_service(model)
    if service is None and (stops or detach):
        raise click.UsageError("Name the service: --service NAME, or --model.")
    if not detach and (extra or any(value is not None for value in slurm.values())):
        raise click.UsageError("sbatch's options are for a job of the batch's own: add --detach.")
    own = _OwnService(service or "", model, replicas, stops=stops)
    if detach:
        _detach(requests, output, own, shard, {**slurm, "extra": extra}, options)
        return
    done = _run(requests, output, own, service=service, shard=shard, **options)
    asked = done.answered + done.failed
    click.echo(
        f"{done.answered} answered, {done.before} were there. {_figures(done)}" if asked else "Nothing was left to ask."
    )
    if failed := done.failed + done.failed_before:
        errors = errors_path(shard_path(output, shard) if shard else output)
        click.echo(f"{failed} failed: {errors} says why; --retry-errors asks them again.", err=True)
        raise click.exceptions.Exit(1)


def _run(requests: Path, output: Path, own: _OwnService, **options: Any) -> Progress:
    import asyncio

    from hpc_serve import batch

    shown = _Shown()

    async def run() -> None:
        async for _ in batch.run(requests, output, on_need=own.start, on_tick=shown.show, **options):
            pass

    try:
        asyncio.run(run())
        own.is_done()
    except KeyboardInterrupt:
        click.echo("\nInterrupted: answers are kept, and the same command goes on.", err=True)
        raise
    finally:
        shown.progress.stop()
        own.stop()
    assert shown.last is not None
    return shown.last


def _detach(
    requests: Path,
    output: Path,
    own: _OwnService,
    shard: tuple[int, int] | None,
    slurm: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Check what can be checked before the queue, start the service, and submit the batch."""
    from hpc_serve.batch import detach
    from hpc_serve.batch.answer_files import AnswerFile, shard_path
    from hpc_serve.batch.request_file import file_version, index_requests
    from hpc_serve.rendezvous.store import default_home

    file_version(requests)
    index_requests(requests)
    AnswerFile(shard_path(output, shard) if shard else output).close()
    site, home = read_site(os.environ), default_home(os.environ)
    size = {name: slurm[name] or usual for name, usual in detach.SIZE.items()}
    asked = site.slurm_options(**{**slurm, "exclusive": bool(slurm["exclusive"]), **size})

    def script(*, stops: bool) -> str:
        words = [os.path.abspath(requests), os.path.abspath(output), "--service", own.name]
        words += ["--wait", f"{options['wait']:g}", "--retries", str(options["retries"])]
        words += [f"--{name.replace('_', '-')}" for name in ("in_order", "any_model", "retry_errors") if options[name]]
        words += ["--stop"] if stops else []
        words += ["--shard", f"{shard[0]}/{shard[1]}"] if shard else []
        return detach.render_batch_script(words, slurm=asked, site=site, environ=os.environ, home=home)

    script(stops=False)  # what is refused is refused before a service is started
    own.start()
    try:
        job_id, log = detach.submit_batch(script(stops=own.is_stopped), home)
    except BaseException:
        own.stop()
        raise
    click.echo(f"{requests} to {output}: submitted as job {job_id}")
    click.echo(f"  progress  tail -f {log}\n  end it    scancel {job_id}; the same command goes on with it")


class _OwnService:
    """The service of the batch: started if it is not there and a model was named. What was started is stopped."""

    def __init__(self, name: str, model: str | None, replicas: str | None, *, stops: bool) -> None:
        self.name, self._model, self._replicas = name, model, replicas
        self._stops = stops
        self.is_stopped = False
        """Whether `stop` ends it. A batch that was refused, as another writes its output, stops nothing."""

    def start(self) -> None:
        from hpc_serve.cli.submit.submit import submit_command
        from hpc_serve.client import services
        from hpc_serve.rendezvous.claims import read_wanted_or_none
        from hpc_serve.rendezvous.store import ServiceStore, default_home

        self.is_done()
        if self._model is None:
            return
        wanted = read_wanted_or_none(ServiceStore(default_home(os.environ)), self.name)
        is_there = any(one.service == self.name and (one.ready or one.is_coming) for one in services())
        if is_there or (wanted is not None and wanted.state == "asleep"):
            stays = "" if self._stops else ", and stays after the batch; --stop ends it"
            click.echo(f"{self.name} is there already{stays}.", err=True)
            return
        options = ["--replicas", self._replicas] if self._replicas else []
        words = [self._model, "--name", self.name, "--once", *options]
        submissions = submit_command.main(words, prog_name="hpc-serve submit", standalone_mode=False)
        self.is_stopped |= not submissions[0].is_there  # another shard may have been quicker

    def is_done(self) -> None:
        self.is_stopped |= self._stops

    def stop(self) -> None:
        from hpc_serve.cli.services.change import stop_command

        if self.is_stopped:
            stop_command.main([self.name], prog_name="hpc-serve stop", standalone_mode=False)


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


class _Shown(ChangingLine):
    """How far the batch is, on stderr: on a terminal one line that changes, elsewhere a line a minute."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Progress | None = None
        self._stage, self._line_at_s = "", 0.0

    def show(self, progress: Progress) -> None:
        self.last = progress
        words, now_s = f"{progress.stage}: {_figures(progress)}", time.monotonic()
        self.progress.start()  # what is printed before stands above the line
        self.change(printable(words))
        if not self.is_shown and (progress.stage != self._stage or now_s - self._line_at_s >= _LINE_EVERY_S):
            self._stage, self._line_at_s = progress.stage, now_s
            click.echo(words, err=True)


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
