"""`fetch`: brings a model from the hub into the cache that jobs read. Progress is on stderr, the folder on stdout.

On a terminal progress is one line that changes, elsewhere lines that stay. rich measures the speed over the last ten
seconds. `hub/fetch.py` decides which files are fetched.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.progress import Task

from hpc_serve.cli.commands import print_json
from hpc_serve.cli.complete import model_names
from hpc_serve.cli.console import ChangingLine
from hpc_serve.cli.main import INTERRUPTED
from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan import catalog
from hpc_serve.units import about, duration, readable_size

if TYPE_CHECKING:
    from hpc_serve.hub.fetch import ModelFiles
    from hpc_serve.hub.local_weights import HubSettings


_RATE_OVER_S = 10.0
_LINE_EVERY_S = 60.0


class FetchProgress(ChangingLine):
    """`done` of `total` bytes are here at the beginning."""

    def __init__(self, done: int, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.progress.get_time, self.progress.speed_estimate_period = clock, _RATE_OVER_S
        self.progress.reset(self.task, total=total, completed=done)
        self._clock, self._tenth, self._line_at_s = clock, 0, clock()

    def show(self, done: int) -> None:
        """Show that `done` bytes are here. Without a terminal, print a line at each tenth and once a minute."""
        self.progress.update(self.task, completed=done)
        task = self.progress.tasks[self.task]
        self.change(_words(task))
        tenth, now_s = int(task.percentage // 10), self._clock()
        if not self.is_shown and (tenth > self._tenth or now_s - self._line_at_s >= _LINE_EVERY_S):
            self._tenth, self._line_at_s = max(tenth, self._tenth), now_s
            click.echo(_words(task), err=True)


def _words(task: Task) -> str:
    """Return how far a fetch is: `3.0 GiB of 15.0 GiB (20 %), 200 MiB/s, about 60 s left`."""
    done, total = int(task.completed), int(task.total or 0)
    text = f"{readable_size(done)} of {readable_size(total)} ({100 * done // total if total else 100} %)"
    if not task.speed or task.time_remaining is None or done >= total:
        return text
    return f"{text}, {readable_size(round(task.speed))}/s, {about(task.time_remaining)} left"


@click.command("fetch")
@click.argument("model", shell_complete=model_names)
@click.option("--revision", metavar="NAME", default="main", help="Branch, tag or commit [default: main].")
@click.option(
    "--include", multiple=True, metavar="PATTERN", help="Files to fetch besides, as '*Q4_K_M.gguf'; may be repeated."
)
@click.option("--site", metavar="FILE", help="Your site file [default: ~/.config/hpc-serve/site.yaml].")
@click.option("--json", "as_json", is_flag=True, help="Print the folder as JSON.")
def fetch_command(model: str, revision: str, include: tuple[str, ...], site: str | None, as_json: bool) -> None:
    """Fetch MODEL, of the catalogue, the site or the hub, into the Hugging Face cache that jobs read (HF_HOME).

    hpc-serve fetch 8b

    Only what the engine reads is fetched. After a fetch that broke off, the same command fetches the files that are not
    whole.
    """
    from hpc_serve.hub.fetch import HubConnectionError, cached_alone, look_for_model

    repository, settings = _repository(model, site)
    try:
        found = look_for_model(repository, settings, revision=revision, include=include)
    except HubConnectionError as error:
        why = str(error).rstrip(".")
        folder = cached_alone(repository, settings, revision, why)
        click.echo(f"{repository}: all of its weights are here, perhaps not the newest ones: {why}.", err=True)
        _print_folder(repository, folder, fetched_bytes=0, as_json=as_json)
        return
    click.echo(found.words, err=True)
    if found.missing:
        found.check_space()
        found.repository.note_revision(is_whole=False)
        _run(found)
    found.repository.note_revision(is_whole=True)
    fetched_bytes = found.done_bytes - found.kept_bytes
    _print_folder(repository, found.repository.snapshot, fetched_bytes=fetched_bytes, as_json=as_json)


def _print_folder(repository: str, folder: Path, *, fetched_bytes: int, as_json: bool) -> None:
    if as_json:
        print_json({"model": repository, "folder": str(folder), "fetched_bytes": fetched_bytes})
    else:
        click.echo(folder)


def _repository(model: str, site_file: str | None) -> tuple[str, HubSettings]:
    """The repository that a name stands for, and where jobs look for it. Raises InvalidRequestError."""
    from hpc_serve.cli.submit.request import site_model
    from hpc_serve.hub.local_weights import read_hub_settings
    from hpc_serve.submit.plans.preflight import is_repository
    from hpc_serve.submit.request.options import expanded
    from hpc_serve.submit.site.site_files import read_site

    site = read_site(os.environ, site_file)
    own = site_model(model, site)
    name = own.model if own else model
    entry = catalog.find(name)
    repository = entry.name if entry else name
    if os.path.isdir(os.path.expanduser(repository)) or not is_repository(repository):
        what = "is a folder, and nothing of it is fetched" if os.path.isdir(repository) else "is no model of the hub"
        raise InvalidRequestError(f"{repository!r} {what}: name one as owner/name.{catalog.did_you_mean(model)}")
    env = expanded({**site.env, **(own.env if own else {})}, os.environ)
    settings = read_hub_settings({**os.environ, **env})
    # Whether the hub may be asked from here is this shell's to say: `env` is of jobs.
    return repository, replace(settings, is_offline=read_hub_settings(os.environ).is_offline)


def _run(found: ModelFiles) -> None:
    """Fetch, and show the progress."""
    began_s = time.monotonic()
    try:
        with FetchProgress(found.kept_bytes, found.total_bytes) as progress:
            found.fetch(progress.show)
    except KeyboardInterrupt:
        here, total = found.abandon(), readable_size(found.total_bytes)
        click.echo(
            f"\nInterrupted; {readable_size(here)} of {total} are here. The same command goes on from there.", err=True
        )
        os._exit(INTERRUPTED)  # without waiting for the threads, each of which fetches a file to its end
    took_s, fetched = time.monotonic() - began_s, found.done_bytes - found.kept_bytes
    rate = f", {readable_size(round(fetched / took_s))}/s" if took_s >= 1 else ""
    click.echo(f"Fetched {readable_size(fetched)} in {duration(took_s)}{rate}.", err=True)
