"""submitit's executor with our script in place of submitit's; a script that runs on this machine without Slurm.

The executor submits by submitit's own way: its file, sbatch, the job's id. Private names of submitit are used in this
file alone. tests/unit/submit/test_executor.py fails if submitit changes what is overridden here.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError

from hpc_serve.errors import SchedulerError, SchedulerUnavailableError, StoreError, SubmissionRefusedError
from hpc_serve.submit.slurm import scheduler
from hpc_serve.submit.slurm.slurm import parse_sbatch, says_unreachable, sbatch_argv
from hpc_serve.submit.slurm.slurm_messages import refusal, refusal_hint

_FIRST_LOOK_S, _ASKED_EVERY_S = 5.0, 0.5


class ScriptSlurmExecutor(submitit.SlurmExecutor):  # type: ignore[misc]  # submitit is not typed strictly
    """Submits one script as it is. `folder` holds it, under submitit's name for it."""

    def __init__(self, folder: Path, script_text: str, options: Sequence[str] = ()) -> None:
        super().__init__(folder)
        self._script_text = script_text
        self._options = options
        self.submission_uid = ""

    @classmethod
    def affinity(cls) -> int:
        return 2  # calling sbatch finds out whether Slurm is here, and its error says more

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        self.submission_uid = uid
        return self._script_text

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return sbatch_argv(submission_file_path, self._options)

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return parse_sbatch(string.decode() if isinstance(string, bytes) else string)


def submit_to_slurm(script_text: str, folder: Path, options: Sequence[str] = ()) -> tuple[str, Path]:
    """Give the script to sbatch and keep it in `folder`, which is private; returns the job's id, and the file.

    A refused script is not kept.

    `options` of sbatch win over those in the script.

    Raises SchedulerUnavailableError, SubmissionRefusedError with sbatch's own words, StoreError.
    """
    executor = ScriptSlurmExecutor(folder, script_text, options)
    try:
        # submitit prints sbatch's words and raises them too: hide the print, so that they appear once.
        with contextlib.redirect_stderr(io.StringIO()), _as_the_script_says(script_text), _private_files():
            job = executor._submit_command("")
    except FileNotFoundError:
        raise scheduler.command_missing("sbatch") from None
    except FailedJobError as error:
        raise _refusal(str(error)) from None
    finally:  # a refused script, or the link that submitit leaves beside an accepted one
        (folder / f".submission_file_{executor.submission_uid}.sh").unlink(missing_ok=True)
    return job.job_id, job.paths.submission_file


@contextlib.contextmanager
def until_answered() -> Iterator[None]:
    """Let signals wait until the id of the job that sbatch makes is known, so that the job can be ended.

    sbatch inherits this: Ctrl-C does not end it either.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_locally(script_text: str, folder: Path, log_dir: Path) -> tuple[int, Path]:
    """Run the script on this machine, in the background, and keep it in `folder`, which is private; returns its pid,
    and the file.

    It runs in a new session, so that Ctrl-C here does not reach it. Its output goes to `log_dir/local-<pid>.log`.
    Raises StoreError.
    """
    uid = uuid.uuid4().hex
    # The log's first name cannot hold the pid: bash may open it later than we know the pid.
    script, log = folder / f"local_{uid}_submission.sh", log_dir / f".starting-{uid}.log"
    try:
        with _private_files():
            script.write_text(script_text)
            with log.open("ab") as output:
                process = subprocess.Popen(
                    ["bash", str(script)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        log.rename(log_dir / f"local-{process.pid}.log")
    except OSError as error:
        raise StoreError(f"the local job cannot be started: {error}") from error
    return process.pid, script


def why_it_never_starts(job_id: str) -> str:
    """Return Slurm's own reason why an accepted job can never start, with a cure; "" if there is none.

    Slurm also knows plugins, QOS and reservations, unlike a comparison before sbatch. Slurm knows the reason at once,
    26.05 once it has looked at the job.
    """
    deadline = time.monotonic() + _FIRST_LOOK_S
    while (job := scheduler.job_state(job_id)).is_pending and not job.reason and time.monotonic() < deadline:
        time.sleep(_ASKED_EVERY_S)
    return refusal(job, scheduler.partitions_if_known()) if refusal(job, ()) else ""


def _refusal(stderr: str) -> SchedulerError:
    if says_unreachable(stderr):
        maybe = "It may have taken the job all the same: `hpc-serve status` shows it if so."
        outcome = maybe if "timed out" in stderr.lower() else "Nothing was submitted."
        return SchedulerUnavailableError(f"{scheduler.controller_not_answering('sbatch', stderr)} {outcome}")
    hint = refusal_hint(stderr, scheduler.partitions_if_known())
    return SubmissionRefusedError(f"sbatch refused the job: {scheduler.said(stderr)}." + (f" {hint}" if hint else ""))


@contextlib.contextmanager
def _as_the_script_says(script_text: str) -> Iterator[None]:
    """Hide the variables of the job that this runs in, if any: sbatch would apply its sizes to the new job.

    Hide sbatch's own variables as well (SBATCH_TIMELIMIT) where they would win over a #SBATCH line, and SBATCH_EXPORT:
    jobs get the environment of who submits.
    """
    own = ("SLURM_", "SLURMD_", "SRUN_") if "SLURM_JOB_ID" in os.environ else ()
    said = re.findall(r"^#SBATCH --([\w-]+)", script_text, re.MULTILINE)
    hides = (*own, "SBATCH_EXPORT", *(f"SBATCH_{name.upper().replace('-', '_')}" for name in said))
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    ours = [name for name in os.environ if name.startswith(hides) and name not in kept]
    hidden = {name: os.environ.pop(name) for name in ours}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """Make new files 0600. sbatch passes the umask on, so the job's output is 0600 too."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
