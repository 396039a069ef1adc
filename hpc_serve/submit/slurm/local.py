"""A job on this machine: whether it runs, and how to stop it, from any process.

`submit` writes down the pid and the start time of the job's process. A pid alone may belong to another process by now;
pid and start time together identify the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

from hpc_serve.errors import SchedulerError
from hpc_serve.rendezvous.record import SubmittedJob
from hpc_serve.submit.slurm.slurm import GONE, UNKNOWN, JobState

_POLL_S = 0.1


def process_start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of process `pid`; None if there is none, or only its zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name, in parentheses, may itself hold blanks and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def local_job_state(job: SubmittedJob) -> JobState:
    """RUNNING or GONE; UNKNOWN on another machine than the job's, because its processes cannot be seen there."""
    if job.host != socket.gethostname():
        detail = f"it runs on {job.host}, and this is {socket.gethostname()}: ask there"
        return JobState(job_id=job.job_id, state=UNKNOWN, source="process", detail=detail)
    return JobState(job_id=job.job_id, state="RUNNING" if _is_alive(job) else GONE, source="process")


def stop_local_job(job: SubmittedJob, *, grace_s: float) -> None:
    """Send SIGTERM to the script and its launcher, which shut down in order; SIGKILL after `grace_s` seconds.

    A job that is over already is no error. Raises SchedulerError on another machine, or if the job cannot be ended.
    """
    state = local_job_state(job)
    if state.state == UNKNOWN:
        raise SchedulerError(f"{job.job_id} cannot be stopped from here: {state.detail}.")
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        if job.pid is not None and _is_alive(job):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, number)  # the script is the leader of its session, so its pid is the group's
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if not _is_alive(job):
                return
            time.sleep(_POLL_S)
    raise SchedulerError(f"process {job.pid} of {job.job_id} is still there after SIGKILL; look at it with `ps`.")


def _is_alive(job: SubmittedJob) -> bool:
    if job.pid is None or job.pid_start_time is None:
        return False
    return process_start_time(job.pid) == job.pid_start_time
