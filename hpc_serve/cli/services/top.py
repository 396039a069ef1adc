"""`top`: all replicas with what their engines do, drawn again every two seconds.

The view has a separate screen of the terminal, and reads keys one by one. The screen before, its cursor and the
terminal's settings come back however the view ends, but by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
from rich.live import Live
from rich.text import Text

from hpc_serve.cli.commands import end_as_by_ctrl_c, print_json
from hpc_serve.cli.complete import live_service_names
from hpc_serve.cli.console import PlainConsole
from hpc_serve.errors import HpcServeError
from hpc_serve.printable import printable
from hpc_serve.rendezvous.fields import validate_service_name
from hpc_serve.rendezvous.store import ServiceStore, own_store
from hpc_serve.units import duration

if TYPE_CHECKING:
    from hpc_serve.client.engine_work import ReplicaWork
    from hpc_serve.client.replicas.status import ReplicaStatus


# -- the screen

_VSUSP_OFF = b"\0"


def _has_screen() -> bool:
    """Whether stdout and stdin are a terminal on which a cursor can be moved."""
    return sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Screen:
    """The screen while it is ours."""

    def __init__(self, live: Live, keys: int) -> None:
        self._live = live
        self._keys = keys

    def draw(self, lines: list[str]) -> None:
        """Replace what is shown. The lines must fit."""
        self._live.update(Text("\n".join(lines), no_wrap=True, overflow="crop"), refresh=True)

    def key(self, *, within_s: float) -> str:
        """Return the next key; "" after `within_s` seconds, and q if nobody can press keys. A key that sends several
        characters counts as the first."""
        if not select.select([self._keys], [], [], within_s)[0]:
            return ""
        return os.read(self._keys, 64).decode(errors="replace")[:1] or "q"


@contextlib.contextmanager
def _own_screen() -> Iterator[Screen]:
    """Enter a separate screen. Ctrl-C, SIGTERM and SIGHUP are a KeyboardInterrupt."""
    keys = sys.stdin.fileno()
    settings = termios.tcgetattr(keys)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us with Ctrl-C ignored
    end_as_by_ctrl_c()
    try:
        tty.setcbreak(keys, termios.TCSANOW)
        changed = termios.tcgetattr(keys)
        changed[6][termios.VSUSP] = _VSUSP_OFF  # Ctrl-Z would leave a shell on our screen
        termios.tcsetattr(keys, termios.TCSANOW, changed)
        with Live(console=PlainConsole(), screen=True, auto_refresh=False) as live:
            yield Screen(live, keys)
    finally:
        with contextlib.suppress(termios.error):  # the terminal itself may be gone
            termios.tcsetattr(keys, termios.TCSANOW, settings)


# -- the view

_EVERY_S = 2.0
_SLURM_S = 15.0  # a controller serves a whole site: it is asked less often than engines are
_DRAW_S = 0.25
_WIDTH_WITHOUT_TERMINAL = 160


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The findings of one look. `works` are of `replicas`, in their order."""

    replicas: tuple[ReplicaStatus, ...] = ()
    works: tuple[ReplicaWork, ...] = ()
    problems: tuple[str, ...] = ()
    at: float = 0.0


class Looks:
    """Looks at services, one after the other; what each engine did between two looks is in the second."""

    def __init__(self, store: ServiceStore, services: Sequence[str]) -> None:
        from hpc_serve.client.engine_work import WorkWatch
        from hpc_serve.submit.slurm.scheduler import SchedulerView

        self._store, self._services = store, frozenset(services)
        self._slurm = SchedulerView(max_age_s=_SLURM_S)
        self._works = WorkWatch(store.read_api_key)

    def look(self) -> Frame:
        """Return the state of all replicas now. A record that cannot be read is one of the problems."""
        from hpc_serve.submit.status.status_reader import read_status

        try:
            report = read_status(self._store, slurm=self._slurm)
        except HpcServeError as error:
            return Frame(problems=(str(error),), at=time.time())
        live = (one for one in report.everywhere if not one.is_over)
        replicas = tuple(one for one in live if not self._services or one.service in self._services)
        missing = [f"{name} has no replica" for name in self._services - {one.service for one in replicas}]
        works = tuple(self._works.look(replicas))
        return Frame(replicas=replicas, works=works, problems=(*report.problems, *sorted(missing)), at=time.time())


@click.command("top")
@click.argument("services", metavar="[SERVICE]...", nargs=-1, shell_complete=live_service_names)
@click.option("--once", is_flag=True, help="Print it once, after two looks a second apart.")
@click.option("--json", "as_json", is_flag=True, help="Print one look as JSON.")
def top_command(services: Sequence[str], once: bool, as_json: bool) -> None:
    """Show what all replicas do: requests, tokens a second, use of the cache. q or Ctrl-C ends it.

    hpc-serve top 405b

    It looks every two seconds; tokens/s are counted since the last look. If stdout is no terminal, it prints one look.
    """
    from hpc_serve.client.engine_work import LOOK_S

    looks = Looks(own_store(), [validate_service_name(name) for name in services])
    if once or as_json or not _has_screen():
        frame = looks.look()
        if any(work.now.requests for work in frame.works):
            time.sleep(LOOK_S)
            frame = looks.look()
        if as_json:
            from hpc_serve.cli.show import status_json

            found = [status_json(status, work) for status, work in zip(frame.replicas, frame.works)]
            print_json({"services": found, "problems": list(frame.problems), "at": frame.at})
            return
        width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns
        click.echo("\n".join(frame_lines(frame, width=width, height=None)))
        return
    try:
        _follow(looks)
    except KeyboardInterrupt:
        return


def _follow(looks: Looks) -> None:
    """Draw frames until q is pressed. A thread looks, so that a key counts also while an engine does not answer."""

    latest: list[Frame] = []

    def go_on_looking() -> None:
        while True:
            latest[:] = [looks.look()]
            time.sleep(_EVERY_S)

    with _own_screen() as screen:
        threading.Thread(target=go_on_looking, daemon=True, name="hpc-serve-top").start()
        while screen.key(within_s=_DRAW_S) not in ("q", "Q", "\x03"):
            size = shutil.get_terminal_size()
            lines = frame_lines(latest[0], width=size.columns, height=size.lines) if latest else ["Looking …"]
            screen.draw(lines)


def frame_lines(frame: Frame, *, width: int, height: int | None) -> list[str]:
    """The lines of a frame, none longer than `width`; at most `height` of them, with a word on what is left out."""
    lines = [_summary(frame), *_table(frame, width), *(f"warning: {problem}" for problem in frame.problems)]
    lines = [_cut(printable(" ".join(line.splitlines())), width) for line in lines]
    if height is not None and len(lines) > height:
        left_out = len(lines) - height + 1
        lines = [*lines[: height - 1], _cut(f"… {left_out} more lines; name services: hpc-serve top NAME", width)]
    return lines


def _summary(frame: Frame) -> str:
    ready = sum(one.state == "ready" for one in frame.replicas)
    running = sum(work.now.running or 0 for work in frame.works)
    waiting = sum(work.now.waiting or 0 for work in frame.works)
    rates = [work.generation_tokens_per_s for work in frame.works if work.generation_tokens_per_s is not None]
    speed = f", {sum(rates):,.0f} tokens/s" if rates else ""
    clock = time.strftime("%H:%M:%S", time.localtime(frame.at))
    return f"{clock}  {ready}/{len(frame.replicas)} ready, {running} running, {waiting} waiting{speed}"


_AT_THE_RIGHT = ("RUN", "WAIT", "TOKENS/S", "CACHE", "PROMPTS/S", "AGE", "LEFT")
_NEEDED = 3  # columns that stay where there is no room; the last ones go first


def _table(frame: Frame, width: int) -> list[str]:
    rows = [_row(one, work, frame.at) for one, work in zip(frame.replicas, frame.works, strict=True)]
    if not rows:
        return ["", "No replicas."]
    table = [{name: name for name in rows[0]}, *rows]
    widths = {name: max(len(row[name]) for row in table) for name in rows[0]}
    shown = list(widths)
    while len(shown) > _NEEDED and sum(widths[name] + 2 for name in shown) - 2 > width:
        shown.pop()
    lines = [""]
    for row in table:
        cells = (f"{row[name]:{'>' if name in _AT_THE_RIGHT else '<'}{widths[name]}}" for name in shown)
        lines.append("  ".join(cells).rstrip())
    for one, work in zip(frame.replicas, frame.works):
        if reason := one.detail or ("" if one.state != "ready" else work.problem):
            lines.append(f"{one.name}: {reason}")
    return lines


def _row(status: ReplicaStatus, work: ReplicaWork, now: float) -> dict[str, str]:
    """Return the cells of a replica by their headings."""
    doing, cache = work.now, work.now.cache_use
    cells = {
        "SERVICE": status.service,
        "JOB": status.name,
        "STATE": status.state,
        "RUN": _number(doing.running),
        "WAIT": _number(doing.waiting),
        "TOKENS/S": _number(work.generation_tokens_per_s),
        "CACHE": "" if cache is None else f"{100 * cache:.1f} %",
        "PROMPTS/S": _number(work.prompt_tokens_per_s),
        "AGE": duration(now - status.started_at) if status.started_at else "",
        "LEFT": status.time_left or "",
        "NODE": status.record.nodes[0].name if status.record and status.record.nodes else "",
    }
    return {name: printable(" ".join(cell.split())) for name, cell in cells.items()}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"
