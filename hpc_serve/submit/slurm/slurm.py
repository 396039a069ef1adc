"""Slurm's jobs and partitions as values, its commands as argument lists, and what the commands print. Pure.

Nothing is run here: scheduler.py runs the commands and decides when. slurm_messages.py says what a state or a reason
means to a person.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath

from hpc_serve.errors import SchedulerError

UNKNOWN = "UNKNOWN"  # the controller did not answer: the job may well be running
GONE = "GONE"  # the controller answered, and knows no such job (any more)

_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_OVER = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT", GONE),
    }
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
        """Return whether it may hold nodes, as in a state that a later Slurm has added.

        COMPLETING counts, too: Slurm still clears the job away.
        """
        return not (self.is_pending or self.is_over or self.state == UNKNOWN)

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
        return self.state in _OVER


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


# -- the answers

_UNREACHABLE = re.compile(
    r"Unable to contact slurm controller|Connection refused|Connection timed out|Socket timed out|"
    r"Zero Bytes were transmitted|Unable to establish (?:configuration source|control machine address)|"
    r"Could not establish a configuration source|Transport endpoint is not connected|"
    r"Slurm backup controller in standby|Protocol authentication error|Munge encode failed",
    re.IGNORECASE,
)
_TASKS = re.compile(r"(\d+)(?:-(\d+))?(?::(\d+))?")
_NO_SUCH_JOB = re.compile(
    r"Invalid job id specified|Invalid job array specification|^Job \d+_\d+ not found", re.IGNORECASE | re.MULTILINE
)


def parse_sbatch(stdout: str) -> str:
    """Read the job's id from sbatch's sentence ("Submitted batch job 12 on cluster x") or from `--parsable` ("12;x").

    Raises SchedulerError if there is none.
    """
    match = re.search(r"Submitted batch job (\d+)", stdout) or re.search(r"^(\d+)(?:;\S+)?$", stdout, re.MULTILINE)
    if match is None:
        raise SchedulerError(
            f"sbatch said {stdout.strip()!r}, without a job id. Look with `squeue --me` whether the job was submitted."
        )
    return match[1]


def parse_squeue(stdout: str) -> list[JobState]:
    """Return one state for each line of squeue."""
    return [_squeue_line(line) for line in _lines(stdout)]


def _squeue_line(line: str) -> JobState:
    job_id, state, reason, nodes, start, end, left, used, submitted, user, partition, name = _fields("squeue", line, 12)
    return JobState(
        job_id=job_id,
        state=state,
        reason=_value(reason) or "",
        name=name,
        user=user,
        partition=partition,
        node_list=_value(nodes) or "",
        start_time=_value(start),
        run_time_s=duration_s(used),
        time_left=_value(left),
        started_at=_seconds(start),
        submitted_at=_seconds(submitted),
        ended_at=_seconds(end),
    )


def parse_scontrol_job(stdout: str, job_id: str) -> JobState | None:
    """Return the job's state from `scontrol show job` (one line for each task of an array); None if it is not there."""
    for line in stdout.splitlines():
        values = scontrol_values(line)
        if "JobState" in values and _is_about(values, job_id):
            exit_code, signal = _exit_status(values.get("ExitCode", ""))
            return JobState(
                job_id=job_id,
                state=values["JobState"],
                reason=(_value(values.get("Reason", "")) or "").replace("_", " "),
                name=values.get("JobName", ""),
                user=values.get("UserId", "").partition("(")[0],
                partition=values.get("Partition", ""),
                asks=f"--nodes={values.get('NumNodes', '').partition('-')[0]} --time={values.get('TimeLimit', '')}",
                node_list=_value(values.get("NodeList", "")) or "",
                start_time=_value(values.get("StartTime", "")),
                submitted_at=_seconds(values.get("SubmitTime", "")),
                started_at=_seconds(values.get("StartTime", "")),
                ended_at=_seconds(values.get("EndTime", "")),
                exit_code=exit_code,
                signal=signal,
                restart=int(values.get("Restarts", 0)),
                batch_log=_value(values.get("StdOut", "")),
            )
    return None


def _is_about(values: Mapping[str, str], job_id: str) -> bool:
    """Return whether the line is of that job, or of that array or task. Tasks that wait share one line."""
    array, _, task = job_id.partition("_")
    if not task:
        return job_id in (values.get("JobId"), values.get("ArrayJobId"))
    return array == values.get("ArrayJobId") and _has_task(values.get("ArrayTaskId", ""), task)


def _has_task(tasks: str, task: str) -> bool:
    """Return whether Slurm's list of tasks names this one.

    >>> _has_task("1,4-9:2%3", "6"), _has_task("1,4-9:2%3", "7")
    (True, False)
    """
    for word in tasks.partition("%")[0].split(","):
        if (found := _TASKS.fullmatch(word)) and task.isdecimal():
            first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
            if first <= int(task) <= last and (int(task) - first) % step == 0:
                return True
    return False


def scontrol_values(line: str) -> dict[str, str]:
    """Return the `Name=value` words of one job, node or partition.

    A job's name may hold any text: it ends where the next field begins.
    """
    values: dict[str, str] = {}
    if job_name := re.search(r" JobName=(.*?)(?= UserId=)", line):
        values["JobName"] = job_name[1]
        line = line.replace(job_name[0], "", 1)
    for name, value in re.findall(r"(?<!\S)([A-Za-z_:/]+)=(\S*)", line):
        values.setdefault(name, value)  # the first counts: free text (a comment) comes after Slurm's own fields
    return values


def parse_sacct(stdout: str) -> dict[str, JobState]:
    """Return the jobs as accounting has them, by their ids. The last line of a job is its latest start."""
    found = {}
    for line in _lines(stdout):
        job_id, state, exit_status, node_list, user, name = _fields("sacct", line, 6)
        word, _, by = state.partition(" by ")
        exit_code, signal = _exit_status(exit_status)
        found[job_id] = JobState(
            job_id=job_id,
            state=word.strip(),
            name=name,
            user=user,
            node_list=_value(node_list) or "",
            exit_code=exit_code,
            signal=signal,
            cancelled_by=by.strip() or None,
        )
    return found


def parse_sinfo(stdout: str) -> list[Partition]:
    """Return the partitions, the default one first."""
    partitions = [
        Partition(
            name=name.rstrip("*"),
            is_default=name.endswith("*"),
            time_limit=time_limit,
            num_nodes=int(num_nodes),
            gres=_value(gres) or "",
        )
        for name, _, time_limit, num_nodes, gres in (_fields("sinfo", line, 5) for line in _lines(stdout))
    ]
    return sorted(partitions, key=lambda partition: not partition.is_default)


def says_unreachable(stderr: str) -> bool:
    """Return whether a Slurm command failed because the controller did not answer."""
    return _UNREACHABLE.search(stderr) is not None


def says_no_such_job(printed: str) -> bool:
    """Return whether the controller knows no such job. For a task of an array scontrol says so on stdout."""
    return _NO_SUCH_JOB.search(printed) is not None


def _lines(stdout: str) -> list[str]:
    # If SLURM_CLUSTERS is set, a separate line names each cluster.
    return [line for line in stdout.splitlines() if line.strip() and not line.startswith("CLUSTER: ")]


def _fields(command: str, line: str, count: int) -> list[str]:
    fields = line.strip().split("|", count - 1)
    if len(fields) != count:
        raise SchedulerError(f"{command} printed a line that is not understood: {line!r}.")
    return fields


def _value(value: str) -> str | None:
    """Return the value; None for the words by which Slurm says that there is none."""
    nothing = ("", "N/A", "None", "(null)", "NOT_SET", "Unknown", "None assigned")
    return None if value in nothing else value


def duration_s(duration: str) -> float:
    """Seconds of [D-][HH:]MM:SS; 0 for words such as INVALID."""
    if not re.fullmatch(r"[\d:-]+", duration):
        return 0.0
    days, _, clock = duration.rpartition("-")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = 60 * seconds + int(part or 0)
    return seconds + 86400.0 * int(days or 0)


def _seconds(local_time: str) -> float | None:
    """Seconds since the epoch of Slurm's YYYY-MM-DDTHH:MM:SS, which is in the time zone of the command that asked."""
    try:
        return datetime.fromisoformat(local_time).timestamp()
    except ValueError:
        return None


def _exit_status(status: str) -> tuple[int | None, int | None]:
    match = re.fullmatch(r"(\d+):(\d+)", status)
    return (int(match[1]), int(match[2])) if match else (None, None)
