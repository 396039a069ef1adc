"""Slurm's jobs and partitions as values, and its commands as argument lists. Pure: nothing is run here.

slurm_answers.py reads what the commands print. scheduler.py runs them and decides when. slurm_messages.py says what a
state or a reason means to a person.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

UNKNOWN = "UNKNOWN"  # the controller did not answer: the job may well be running
GONE = "GONE"  # the controller answered, and knows no such job (any more)

_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_ON_NODES = frozenset(
    {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
)

_SQUEUE_FIELDS = "%i|%T|%r|%N|%S|%e|%L|%M|%V|%u|%P|%j"  # the name last: it may hold any character
SQUEUE_ARGV = ("squeue", "--me", "--states=all", "--array", "--noheader", f"--format={_SQUEUE_FIELDS}")
"""The command that lists this user's jobs: waiting, running, and ended ones that the controller remembers."""
SINFO_ARGV = ("sinfo", "--noheader", "--format=%P|%a|%l|%D|%G")
"""The command that lists every partition, one line for each kind of node in it."""
_SACCT_FIELDS = "JobID,State,ExitCode,NodeList,User,JobName"


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The scheduler's answer about one job. `state` and `reason` are Slurm's own words, or UNKNOWN, or GONE.

    `exit_code` and `signal` are the batch script's, None until it has ended. `restart` counts how often the job was
    requeued; only scontrol tells. `batch_log` is where Slurm writes the script's output. `start_time` is Slurm's local
    time, and expected while the job waits; `started_at` is the same in seconds since the epoch. `time_left` is
    D-HH:MM:SS, `run_time_s` is 0 before the job runs. `submitted_at` and `ended_at` are seconds since the epoch;
    `ended_at` is a forecast until the job is over. `detail` says why the state is UNKNOWN. `partition` may be a list
    while the job waits. `asks` names its nodes and its time limit; only scontrol tells.
    """

    job_id: str
    state: str
    reason: str = ""
    name: str = ""
    user: str = ""
    partition: str = ""
    asks: str = ""
    node_list: str = ""
    start_time: str | None = None
    run_time_s: float = 0.0
    time_left: str | None = None
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    restart: int = 0
    cancelled_by: str | None = None
    batch_log: str | None = None
    source: str = ""
    detail: str = ""

    @property
    def is_pending(self) -> bool:
        return self.state in _WAITING

    @property
    def is_running(self) -> bool:
        """Return whether it may hold nodes. Its end counts too, while Slurm clears it away."""
        return self.state in _ON_NODES

    @property
    def has_begun(self) -> bool:
        """Return whether it was given nodes."""
        return bool(self.node_list)

    @property
    def waits_for_one_of_several_partitions(self) -> bool:
        """Return whether the reason is a limit of one of the job's partitions. The job may start in another."""
        return "," in self.partition and self.reason.startswith("Partition")

    @property
    def is_over(self) -> bool:
        """Return whether it holds nothing and will not start again by itself. UNKNOWN is not over."""
        return not (self.is_pending or self.is_running or self.state == UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One line of sinfo: `num_nodes` nodes of a partition that have the GPUs `gres` ("gpu:h100:8", "" for none)."""

    name: str
    is_default: bool
    time_limit: str
    num_nodes: int
    gres: str


def array_options(tasks: int) -> list[str]:
    """sbatch's words for an array of so many tasks: 0, 1 …"""
    return [f"--array=0-{tasks - 1}"]


def after_start_option(job_id: str, minutes: int) -> str:
    """sbatch's word for a job that may begin so many minutes after the start, or the cancellation, of another."""
    return f"--dependency=after:{job_id}+{minutes}"


def batch_log_option(log_dir: str | PurePath | None, *, is_array: bool) -> str:
    """sbatch's word for where a job's own output goes: to a file named after its id, below `log_dir`."""
    job = "%A_%a" if is_array else "%j"
    return f"--output={log_dir}/{job}.log" if log_dir else f"--output=%x-{job}.log"


def sbatch_argv(script: PurePath | str, options: Sequence[str] = ()) -> list[str]:
    """Return the command that submits a script. `options` adds to its #SBATCH lines, and wins over them."""
    return ["sbatch", *options, str(script)]


def scontrol_show_job_argv(job_id: str) -> list[str]:
    """Return the command that shows all facts of the controller about one job, on one line."""
    return ["scontrol", "--oneliner", "show", "job", job_id]


def scancel_argv(job_id: str) -> list[str]:
    """Return the command that ends a job: SIGTERM (and SIGCONT) to its steps, SIGKILL after the site's KillWait."""
    return ["scancel", job_id]


def sacct_argv(job_ids: Sequence[str], *, user: str, since: str) -> list[str]:
    """Return the command that lists accounting's records of jobs.

    Ids are recycled: `user` and `since` (YYYY-MM-DDTHH:MM:SS) bound the search.
    """
    bounds = [f"--jobs={','.join(job_ids)}", f"--user={user}", f"--starttime={since}"]
    return ["sacct", *bounds, "--allocations", "--noheader", "--parsable2", f"--format={_SACCT_FIELDS}"]
