"""The program beside the launcher that keeps a service as it was asked for.

    python -m hpc_serve.submit.services.service_keeper --service NAME --keep-up --replicas 1:4 --idle-stop-s 1800

A script of `submit` with --keep-up, --replicas MIN:MAX or --idle-stop starts it on the job's first node, outside of any
container, and ends it. It is of the submit side: the job's own programs call no Slurm command. What is to be done, and
when, is decided by its duties.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from hpc_serve.errors import HpcServeError, InvalidRequestError
from hpc_serve.rendezvous.store import ServiceStore, default_home
from hpc_serve.submit.request.bounds import parse_replicas
from hpc_serve.submit.services.keep_up import KeepUp
from hpc_serve.submit.services.script_environ import take_over_submission_environ

_log = logging.getLogger("hpc_serve.service_keeper")
_TROUBLE_S = 15.0


class Duty(Protocol):
    """One thing that the program looks after."""

    def step(self, now: float) -> float | None:
        """Do what is due at `now`; returns in how many seconds to look again, None when nothing is left to do.

        Raises HpcServeError or OSError where it shall be tried again, InvalidRequestError where that is no use.
        """

    def finish(self, *, was_cancelled: bool) -> None:
        """The run ends, while something was left to do. Raises HpcServeError."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_serve.submit.services.service_keeper", description=__doc__)
    parser.add_argument("--service", required=True)
    parser.add_argument("--keep-up", action="store_true")
    parser.add_argument("--notice-s", type=float, default=0.0)
    parser.add_argument("--replicas", metavar="MIN:MAX", type=parse_replicas)
    parser.add_argument("--idle-stop-s", type=float)
    options = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s service-keeper %(levelname)s %(message)s", force=True
    )
    ending = Ending()
    ending.listen()
    run_of_job = {
        "store": ServiceStore(default_home(os.environ)),
        "service": options.service,
        "job_id": os.environ["HPC_SERVE_JOB_ID"],
        "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    }
    duties: list[Duty] = []
    if options.keep_up:
        duties.append(KeepUp(**run_of_job, notice_s=options.notice_s))
    if options.replicas:
        from hpc_serve.submit.services.adjust import Adjuster
        from hpc_serve.submit.services.elastic import ReplicaBounds, windows_of

        least, most = options.replicas
        bounds = ReplicaBounds(least=least, most=most or least, idle_stop_s=options.idle_stop_s)
        duties.append(Adjuster(**run_of_job, bounds=bounds, windows=windows_of(os.environ)))
    take_over_submission_environ()
    return run(duties, ending)


class Ending:
    """Whether this program shall end: at SIGHUP the script has ended, at SIGTERM Slurm ends the job."""

    def __init__(self) -> None:
        # A lock would be waited for on: Python runs no handler for a signal that comes just before. A byte is there.
        self._due, self._note_due = os.pipe()
        os.set_blocking(self._note_due, False)
        self.by_slurm = False

    def listen(self) -> None:
        signal.set_wakeup_fd(self._note_due)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.note)

    def note(self, number: int, frame: object = None) -> None:
        self.by_slurm = self.by_slurm or number == signal.SIGTERM
        with contextlib.suppress(BlockingIOError):
            os.write(self._note_due, b"!")

    def wait(self, timeout_s: float | None) -> bool:
        return bool(select.select([self._due], [], [], timeout_s)[0])


class _Turn:
    """When a duty is due by the monotonic clock, None once nothing of it is left, and what it last complained of."""

    def __init__(self, duty: Duty) -> None:
        self.duty = duty
        self.due_s: float | None = time.monotonic()
        self._complaint = ""

    def take(self) -> None:
        try:
            pause, self._complaint = self.duty.step(time.time()), ""
        except InvalidRequestError as error:
            _log.error("%s", error)
            pause = None
        except (HpcServeError, OSError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.warning("%s", error)
            pause = _TROUBLE_S
        self.due_s = time.monotonic() + pause if pause is not None else None


def run(duties: Sequence[Duty], ending: Ending) -> int:
    """Do what is due until nothing is left, or until the program shall end."""
    turns = [_Turn(duty) for duty in duties]
    while due := [turn.due_s for turn in turns if turn.due_s is not None]:
        if ending.wait(max(0.0, min(due) - time.monotonic())):
            break
        for turn in turns:
            if turn.due_s is not None and turn.due_s <= time.monotonic():
                turn.take()
    else:  # the script ends this program by its pid, which must not be another's by then
        ending.wait(None)
        return 0
    for turn in turns:
        if turn.due_s is not None:
            _finish(turn.duty, was_cancelled=ending.by_slurm)
    return 0


def _finish(duty: Duty, *, was_cancelled: bool) -> None:
    try:
        duty.finish(was_cancelled=was_cancelled)
    except (HpcServeError, OSError) as error:
        _log.error("%s", error)


if __name__ == "__main__":
    sys.exit(main())
