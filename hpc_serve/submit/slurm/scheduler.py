"""Asks Slurm about jobs, and this machine about its local jobs.

One function runs all of Slurm's commands, and says what Slurm answered, or that it did not answer. A controller that
does not answer makes a job's state UNKNOWN. It never means that the job has ended.

Any process can find out whether a job on this machine runs, and stop it. `submit` writes down the pid and the start
time of the job's process. A pid alone may belong to another process by now; pid and start time together identify the
process.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hpc_serve.errors import SchedulerError, SchedulerUnavailableError
from hpc_serve.rendezvous.fields import array_of
from hpc_serve.rendezvous.ownership import user_name
from hpc_serve.rendezvous.record import SubmittedJob
from hpc_serve.rendezvous.store import is_alive
from hpc_serve.submit.slurm.slurm import (
    GONE,
    SINFO_ARGV,
    SQUEUE_ARGV,
    UNKNOWN,
    JobState,
    Partition,
    parse_sacct,
    parse_scontrol_job,
    parse_sinfo,
    parse_squeue,
    sacct_argv,
    says_no_such_job,
    says_unreachable,
    scancel_argv,
    scontrol_show_job_argv,
)

# -- jobs on this machine

_POLL_S = 0.1


def local_job_state(job: SubmittedJob) -> JobState:
    """RUNNING or GONE; UNKNOWN on another machine than the job's, because its processes cannot be seen there."""
    if job.host != socket.gethostname():
        detail = f"it runs on {job.host}, and this is {socket.gethostname()}: ask there"
        return JobState(job_id=job.job_id, state=UNKNOWN, source="process", detail=detail)
    return JobState(job_id=job.job_id, state="RUNNING" if is_alive(job) else GONE, source="process")


def stop_local_job(job: SubmittedJob, *, grace_s: float) -> None:
    """Send SIGTERM to the script and its launcher, which shut down in order; SIGKILL after `grace_s` seconds.

    A job that is over already is no error. Raises SchedulerError on another machine, or if the job cannot be ended.
    """
    state = local_job_state(job)
    if state.state == UNKNOWN:
        raise SchedulerError(f"{job.job_id} cannot be stopped from here: {state.detail}.")
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        if job.pid is not None and is_alive(job):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, number)  # the script is the leader of its session, so its pid is the group's
                os.killpg(job.pid, signal.SIGCONT)  # one that was stopped gets the signal only then
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if not is_alive(job):
                return
            time.sleep(_POLL_S)
    raise SchedulerError(f"process {job.pid} of {job.job_id} is still there after SIGKILL; look at it with `ps`.")


# -- Slurm

_TIMEOUT_S = 60.0  # Slurm's own is MessageTimeout (10 s by default, up to 100), tried more than once
_A_WEEK_S = 7 * 24 * 3600.0
_MOST_IDS = 5_000  # Linux takes 128 KiB in one word of a command
# A person's own formats and filters would change what the commands print.
_OUTPUT_SETTINGS = ("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_")


def _run_slurm(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands. Raises SchedulerUnavailableError if there is none, or nobody answers it."""
    try:
        environ = plain_environ(os.environ)
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", env=environ, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise command_missing(argv[0]) from None
    except subprocess.TimeoutExpired:
        raise SchedulerUnavailableError(
            f"`{argv[0]}` has not answered for {_TIMEOUT_S:.0f} s. Slurm's state is not known; try again later."
        ) from None
    if done.returncode and says_unreachable(done.stderr):
        raise controller_not_answering(argv[0], done.stderr)
    return done


def plain_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which commands print what is read here, whatever a person has set."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_OUTPUT_SETTINGS)}
    return kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}


def command_missing(name: str) -> SchedulerUnavailableError:
    """Return the error for a machine without Slurm."""
    return SchedulerUnavailableError(
        f"There is no `{name}` here: Slurm is on a cluster's login nodes (on some after `module load slurm`). "
        "--cluster local runs on this machine, without Slurm."
    )


def controller_not_answering(name: str, stderr: str) -> SchedulerUnavailableError:
    """Return the error for a controller of Slurm that does not answer."""
    return SchedulerUnavailableError(
        f"Slurm's controller does not answer: {said(stderr)} (`{name}`). Jobs that run go on; try again later."
    )


def said(stderr: str) -> str:
    """Return a command's own error on one line, without the prefix of each of its lines."""
    lines = (re.sub(r"^(\w+: )?(error: )?", "", line.strip()) for line in stderr.splitlines())
    return "; ".join(line for line in lines if line) or "it gave no reason"


def partitions_if_known() -> list[Partition]:
    """Return the site's partitions; none if Slurm does not tell."""
    with contextlib.suppress(SchedulerError):
        return parse_sinfo(_answer(SINFO_ARGV))
    return []


def cancel(job_id: str) -> None:
    """End a job; one that is over already is no error. Raises SchedulerError."""
    done = _run_slurm(scancel_argv(job_id))
    if done.returncode and not says_no_such_job(done.stderr):
        raise SchedulerError(f"scancel {job_id} failed: {said(done.stderr)}.")


def job_state(job_id: str, *, submitted_at: float | None = None) -> JobState:
    """Ask Slurm for one of our jobs: the controller first, then accounting, if the site has it.

    `submitted_at` (seconds since the epoch) bounds the search, since ids are used again. When Slurm does not answer,
    the state is UNKNOWN, with the reason as `detail`.
    """
    user = user_name()
    try:
        shown = _run_slurm(scontrol_show_job_argv(job_id))
    except SchedulerUnavailableError as error:
        return JobState(job_id=job_id, state=UNKNOWN, detail=str(error))
    job = parse_scontrol_job(shown.stdout, job_id) if shown.returncode == 0 else None
    if job is not None and job.user != user:
        job = None
    if job is None and shown.returncode and not says_no_such_job(f"{shown.stderr}\n{shown.stdout}"):
        return JobState(job_id=job_id, state=UNKNOWN, detail=f"scontrol: {said(shown.stderr)}")
    if job is None or job.state == "CANCELLED":
        with contextlib.suppress(SchedulerError):  # no accounting, or it is down: the controller has answered
            found = _from_accounting([job_id], user, submitted_at).get(job_id)
            job = replace(job, cancelled_by=found.cancelled_by) if job and found else job or found
    return job or JobState(job_id=job_id, state=GONE)


class SchedulerView:
    """Slurm's answers, none older than `max_age_s`. `problem` says that the controller did not answer.

    One squeue tells of all jobs that wait, run or ended a while ago. Slurm is asked for a single job only if squeue
    does not list it, and never again once that job is over.
    """

    def __init__(self, *, max_age_s: float = math.inf) -> None:
        self.problem: str | None = None
        self._max_age_s = max_age_s
        self._jobs: list[JobState] | None = None
        self._asked_at_s = 0.0
        self._asked_again: set[str] = set()
        self._ends: dict[str, JobState | None] = {}
        self._has_accounting = True
        self.batch_log = functools.cache(lambda job_id: job_state(job_id).batch_log)
        """The path of the output of a job's script. Slurm is asked once, because the path does not change."""

    @property
    def age_s(self) -> float:
        """Return how old the list of jobs is."""
        return time.monotonic() - self._asked_at_s

    def jobs(self, *, max_age_s: float = math.inf) -> list[JobState]:
        """This user's jobs, those of the last minutes included; none, and `problem` set, if Slurm does not answer."""
        if self._jobs is None or self.age_s > min(max_age_s, self._max_age_s):
            try:
                self._jobs, self.problem = parse_squeue(_answer(SQUEUE_ARGV)), None
            except SchedulerError as error:
                self._jobs, self.problem = [], str(error)
            self._asked_at_s = time.monotonic()
        return self._jobs

    def queued(self, job_id: str, *, max_age_s: float = math.inf) -> JobState | None:
        """Return the job if it waits or runs. The id of an array finds one of its tasks, a running one first."""
        tasks = [job for job in self._listed(job_id, max_age_s) if not job.is_over]
        return max(tasks, key=lambda job: job.is_running, default=None)

    def ask_again_for(self, job_ids: Iterable[str]) -> None:
        """Ask Slurm again now, because these jobs may be ending; at most once for each job."""
        if new := set(job_ids) - self._asked_again:
            self._asked_again |= new
            self.jobs(max_age_s=0.0)

    def state(self, job_id: str, *, submitted_at: float | None = None) -> JobState:
        """Return Slurm's state of one of our jobs; UNKNOWN if Slurm does not answer."""
        if found := self.queued(job_id) or self._ends.get(job_id):
            return found
        if self.problem:
            return JobState(job_id=job_id, state=UNKNOWN, detail=self.problem.partition(":")[0])
        found = job_state(job_id, submitted_at=submitted_at)
        if found.is_over:
            self._ends[job_id] = found
        return found

    def note_old_ends(self, begun_at: Mapping[str, float]) -> None:
        """Note how those of these jobs ended that squeue does not list: accounting is asked for all of them at once.

        `begun_at` tells when each job began or was submitted, in seconds since the epoch. A job that accounting does
        not know is GONE.
        """
        listed = {name for job in self.jobs() for name in (job.job_id, array_of(job.job_id))}
        if self.problem:
            return
        old = [job_id for job_id in begun_at if job_id not in listed and job_id not in self._ends]
        known: dict[str, JobState] = {}
        for first in range(0, len(old), _MOST_IDS):
            ids = old[first : first + _MOST_IDS]
            known |= self._accounted(ids, min(begun_at[job_id] for job_id in ids))
        for job_id in old:
            found = known.get(job_id)
            self._ends[job_id] = found if found and found.is_over else JobState(job_id=job_id, state=GONE)

    def end(self, job_id: str, *, since: float | None) -> JobState | None:
        """Return a job's end in Slurm's words; None if Slurm has forgotten the job.

        Accounting is asked only if the controller has forgotten the job and `since` is given: when the job began, in
        seconds since the epoch.
        """
        if job_id in self._ends:
            return self._ends[job_id]
        found = None
        if any(job.is_over for job in self._listed(job_id)):
            found = job_state(job_id, submitted_at=since)
        elif since is not None and not self.problem:
            found = self._accounted([job_id], since).get(job_id)
        if not self.problem:
            self._ends[job_id] = found if found is not None and found.is_over else None
        return self._ends.get(job_id)

    def _accounted(self, job_ids: Sequence[str], since: float) -> dict[str, JobState]:
        """Return the jobs that accounting knows; it is not asked again once it did not answer."""
        if self._has_accounting:
            try:
                return _from_accounting(job_ids, user_name(), since)
            except SchedulerError:
                self._has_accounting = False
        return {}

    def _listed(self, job_id: str, max_age_s: float = math.inf) -> list[JobState]:
        seen = self.jobs(max_age_s=max_age_s)
        return [job for job in seen if job_id in (job.job_id, array_of(job.job_id))]


def _from_accounting(job_ids: Sequence[str], user: str, submitted_at: float | None) -> dict[str, JobState]:
    """Return the jobs that accounting has, by their ids. Raises SchedulerError."""
    # Clocks of the login node and the controller may differ by some minutes.
    since_s = submitted_at - 600 if submitted_at else time.time() - _A_WEEK_S
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since_s))
    return parse_sacct(_answer(sacct_argv(job_ids, user=user, since=since)))


def _answer(argv: Sequence[str]) -> str:
    done = _run_slurm(argv)
    if done.returncode:
        raise SchedulerUnavailableError(f"`{argv[0]}` failed with exit code {done.returncode}: {said(done.stderr)}.")
    return done.stdout
