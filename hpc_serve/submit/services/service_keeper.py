"""The program beside the launcher that keeps a service as it is wanted.

    python -m hpc_serve.submit.services.service_keeper --service NAME --keep-up --replicas 1:4 --idle-stop-s 1800

A script of `submit` with --keep-up, --replicas MIN:MAX or --idle-stop starts it on the job's first node, outside of any
container, and ends it. It is of the submit side: the job's own programs call no Slurm command. The programs of all jobs
run; one of them decides at a time. It looks every few seconds, asks reconcile.py, and carries out what that says.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_serve.errors import HpcServeError, RecordError
from hpc_serve.rendezvous.claims import change_wanted, read_wanted
from hpc_serve.rendezvous.fields import record_file_name
from hpc_serve.rendezvous.files import read_json
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ServiceStore, default_home, drain_file, read_drain_request
from hpc_serve.rendezvous.wanted import Wanted
from hpc_serve.submit.request.bounds import parse_replicas
from hpc_serve.submit.services.carry_out import step
from hpc_serve.submit.services.jobs import LoadHistory, Windows, windows_of
from hpc_serve.submit.services.what_is import Looker
from hpc_serve.submit.slurm import scheduler
from hpc_serve.submit.slurm.scheduler import SchedulerView

_log = logging.getLogger("hpc_serve.service_keeper")
_ENDS = (signal.SIGTERM, signal.SIGHUP)
_TROUBLE_S = 15.0
_ASK_SLURM_S = 15.0
_LOOK_S = 5.0
_CALM_LOOK_S = 10.0
_LEASE_S = 30.0
# What Slurm gives a job for its own GPUs: another job has others.
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")


@dataclass(kw_only=True)
class Keeper:
    """What one replica's program does for its service.

    `asked` is what holds where no file says it: what the file said last, and at first what the script asks for.
    """

    store: ServiceStore
    service: str
    job_id: str
    restart: int = 0
    replica: int = 0
    asked: Wanted
    windows: Windows = field(default_factory=Windows)
    clock: Callable[[], float] = time.monotonic
    looker: Looker = field(init=False)
    is_deciding: bool = field(default=False, init=False)
    _seen: tuple[str, int] | None = field(default=None, init=False)
    _seen_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        slurm = SchedulerView(max_age_s=_ASK_SLURM_S)
        self.looker = Looker(store=self.store, service=self.service, own_job=self.job_id, slurm=slurm, clock=self.clock)

    @property
    def own_name(self) -> str:
        """The name of its replica's record."""
        return record_file_name(self.job_id, self.restart, self.replica)

    def step(self) -> float | None:
        """Do what is due; returns in how many seconds to look again, None when nothing is left to do.

        Raises HpcServeError where something did not work; it can be tried again.
        """
        own = self._own_record()
        wanted = None
        with contextlib.suppress(RecordError):
            wanted = read_wanted(self.store, self.service)
        self.asked = wanted or self.asked  # what a damaged file said last is wanted still
        drains = own is not None and (own.state == "draining" or own.is_final or self._is_asked_to_drain())
        # A job at its time limit goes on until its successor is there, which may be late.
        is_left = drains and not (self.asked.keep_up and self.asked.state == "awake")
        if is_left or (own is not None and own.is_final):
            self.finish()
            return None
        look_s = min(_LOOK_S, max(0.5, self.windows.add_after_s / 4))
        if own is None or not (own.state == "ready" or drains) or self.asked.state == "stopped":
            return look_s
        if wanted is None or wanted.decider != self.own_name or not self.is_deciding:
            wanted = self._take_over(wanted)
        if wanted is None:
            return look_s
        changed, _ = step(self.looker, wanted, windows=self.windows, decider=self.own_name)
        if changed is None:
            return 0.5
        return _CALM_LOOK_S if self.looker.history is None and not changed.coming else look_s

    def finish(self) -> None:
        """Let another job decide from now on. Raises HpcServeError."""
        if not self.is_deciding:
            return
        self.is_deciding = False

        def leave(found: Wanted | None) -> Wanted | None:
            return replace(found, decider="") if found is not None and found.decider == self.own_name else None

        change_wanted(self.store, self.service, leave, if_damaged=self.asked)

    def _take_over(self, seen: Wanted | None) -> Wanted | None:
        """Become the one who decides, if nobody is: what is wanted then, else None."""
        known = seen or self.asked
        key = known.decider, known.counter
        if key != self._seen:
            self._seen, self._seen_s = key, self.clock()
        if self.is_deciding and key[0] != self.own_name:
            self.is_deciding = False
            _log.info("another job decides for %s", self.service)
        if key[0] not in ("", self.own_name) and self.clock() - self._seen_s < _LEASE_S:
            return None

        def take(found: Wanted | None) -> Wanted | None:
            found = found or self.asked
            if (found.decider, found.counter) != key:
                return None
            missing = "" if shutil.which("sbatch") else str(scheduler.command_missing("sbatch"))
            return replace(found, decider=self.own_name, problem=missing or found.problem)

        taken = change_wanted(self.store, self.service, take, if_damaged=self.asked)
        if taken is not None:
            _log.info("this job decides for %s: %d to %d replicas", self.service, taken.least, taken.most)
            self.is_deciding = True
            history = LoadHistory(self.windows, self.clock(), most_running=taken.most_running)
            self.looker.history = history if taken.is_elastic else None
        return taken

    def _own_record(self) -> EndpointRecord | None:
        path = self.store.service_dir(self.service) / self.own_name
        try:
            return read_json(EndpointRecord, path).without_secrets()
        except FileNotFoundError:
            return None

    def _is_asked_to_drain(self) -> bool:
        return read_drain_request(drain_file(self.store, self.service, self.own_name)) is not None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_serve.submit.services.service_keeper", description=__doc__)
    parser.add_argument("--service", required=True)
    parser.add_argument("--replica", type=int, default=0, metavar="K", help="which of the replicas of its job")
    parser.add_argument("--keep-up", action="store_true")
    parser.add_argument("--notice-s", type=float, default=0.0)
    parser.add_argument("--replicas", metavar="MIN:MAX", type=parse_replicas, default=(1, None))
    parser.add_argument("--idle-stop-s", type=float)
    options = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s service-keeper %(levelname)s %(message)s", force=True
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, (*_ENDS, signal.SIGALRM))
    least, most = options.replicas
    asked = Wanted(
        least=least,
        most=most or least,
        count=least,
        is_kept=True,
        keep_up=options.keep_up,
        notice_s=options.notice_s,
        idle_stop_s=options.idle_stop_s,
    )
    keeper = Keeper(
        store=ServiceStore(default_home(os.environ)),
        service=options.service,
        job_id=os.environ["HPC_SERVE_JOB_ID"],
        restart=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        replica=options.replica,
        asked=asked,
        windows=windows_of(os.environ),
    )
    _take_over_submission_environ()
    return run(keeper, _is_told_to_end)


def _take_over_submission_environ() -> None:
    """Go to the folder, and take on the environment, in which the script that started this program was submitted.

    sbatch hands on the environment of whoever calls it. The script has added its own to that, and Slurm its devices;
    handed on from job to job, both would pile up.
    """
    try:
        lines = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        lines = []
    pairs = (line.partition(b"=") for line in lines)
    of_script = {os.fsdecode(name): os.fsdecode(value) for name, equals, value in pairs if equals}
    environ = submission_environ(os.environ, of_script)
    os.environ.clear()
    os.environ.update(environ)
    try:
        os.chdir(environ.get("SLURM_SUBMIT_DIR", "."))
    except OSError as error:
        _log.warning("the next job is submitted from %s: %s", os.getcwd(), error)


def submission_environ(environ: Mapping[str, str], of_script: Mapping[str, str]) -> dict[str, str]:
    """The environment that the script was given. `environ` is that of a program which it has started.

    Where sbatch is found by the program's PATH alone, which modules may have made, that is kept.
    """
    base = dict(of_script) if "SLURM_JOB_ID" in of_script else dict(environ)
    for name in _DEVICES:
        base.pop(name, None)
    if shutil.which("sbatch", path=base.get("PATH", os.defpath)) is None:
        base["PATH"] = environ.get("PATH", os.defpath)
    return base


def _is_told_to_end(within_s: float | None) -> bool:
    """Wait for a signal that ends this program: at SIGHUP the script has ended, at SIGTERM Slurm ends the job."""
    # Not by sigtimedwait: after SIGSTOP and SIGCONT, CPython returns a signal that never came.
    if within_s is not None:
        signal.setitimer(signal.ITIMER_REAL, max(within_s, 0.001))
    return signal.sigwait((*_ENDS, signal.SIGALRM)) != signal.SIGALRM


def run(keeper: Keeper, is_told_to_end: Callable[[float | None], bool]) -> int:
    """Do what is due until nothing is left, then wait until the program shall end. `is_told_to_end` waits so long."""
    pause_s: float | None = 0.0
    complaint = ""
    while not is_told_to_end(pause_s):  # the script ends this program by its pid, which must not be another's by then
        try:
            pause_s, complaint = keeper.step(), ""
        except (HpcServeError, OSError) as error:
            if str(error) != complaint:
                complaint = str(error)
                _log.warning("%s", error)
            pause_s = _TROUBLE_S
    if pause_s is not None:
        try:
            keeper.finish()
        except (HpcServeError, OSError) as error:
            _log.error("%s", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
