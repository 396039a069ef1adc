"""Slurm's commands as words and their answers as values: nothing is run here.

`*_argv()` build command lines, `parse_*()` read what the commands printed. Running them, and deciding when, is
`scheduler.py`'s; what a state or a reason means to a person is `sentences.py`'s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath

from hpc_serve.errors import SchedulerError

UNKNOWN = "UNKNOWN"  # the controller did not answer: the job may well be running
GONE = "GONE"  # the controller answered, and knows no such job (any more)

_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_ON_NODES = frozenset(
    {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
)

_SQUEUE_FIELDS = "%i|%T|%r|%N|%S|%e|%L|%M|%V|%u|%j"  # the name last: it may hold any character
_SINFO_FIELDS = "%P|%a|%l|%D|%G"
_SACCT_FIELDS = "JobID,State,ExitCode,NodeList,User,JobName"

_UNREACHABLE = re.compile(
    r"Unable to contact slurm controller|Connection refused|Connection timed out|Socket timed out|"
    r"Zero Bytes were transmitted|Unable to establish (?:configuration source|control machine address)|"
    r"Could not establish a configuration source|Transport endpoint is not connected|"
    r"Slurm backup controller in standby|Protocol authentication error|Munge encode failed",
    re.IGNORECASE,
)
_NO_SUCH_JOB = re.compile(r"Invalid job id specified|Invalid job array specification", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class JobState:
    """What the scheduler says of one job. `state` and `reason` are Slurm's own words, or UNKNOWN, or GONE.

    `exit_code` and `signal` are those of the batch script, None until it has ended; `restart` counts how often it was
    requeued (scontrol alone tells). `batch_log` is where Slurm writes the script's output. `start_time` (Slurm's local
    time) is expected while the job waits, `time_left` is D-HH:MM:SS; `run_time_s` counts while it runs; `submitted_at`
    and `ended_at` (a forecast until it is over) are seconds since the epoch. `detail` says why the state is UNKNOWN.
    """

    job_id: str
    state: str
    reason: str = ""
    name: str = ""
    user: str = ""
    node_list: str = ""
    start_time: str | None = None
    run_time_s: float = 0.0
    time_left: str | None = None
    submitted_at: float | None = None
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
        """True while it may hold nodes, the clearing up at its end included."""
        return self.state in _ON_NODES

    @property
    def has_begun(self) -> bool:
        """Whether it was given nodes."""
        return bool(self.node_list)

    @property
    def is_over(self) -> bool:
        """True once it holds nothing and will not start again by itself; UNKNOWN is not over."""
        return not (self.is_pending or self.is_running or self.state == UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One line of sinfo: `num_nodes` nodes of a partition that have the GPUs `gres` ("gpu:h100:8", "" for none)."""

    name: str
    is_default: bool
    is_up: bool
    time_limit: str
    num_nodes: int
    gres: str


# The command lines.


def sbatch_argv(script: PurePath | str) -> list[str]:
    """Submit a script; everything else stands in its #SBATCH lines."""
    return ["sbatch", str(script)]


def squeue_argv() -> list[str]:
    """This user's jobs: those that wait or run, and those that ended while the controller remembers them."""
    return ["squeue", "--me", "--states=all", "--array", "--noheader", f"--format={_SQUEUE_FIELDS}"]


def scontrol_show_job_argv(job_id: str) -> list[str]:
    """Everything the controller knows of one job, on one line."""
    return ["scontrol", "--oneliner", "show", "job", job_id]


def scancel_argv(job_id: str) -> list[str]:
    """End a job: SIGTERM (and SIGCONT) to its steps, SIGKILL after the site's KillWait."""
    return ["scancel", job_id]


def sacct_argv(job_id: str, *, user: str, since: str) -> list[str]:
    """What accounting recorded of one job. Ids are recycled: `user` and `since` (YYYY-MM-DDTHH:MM:SS) bound it."""
    bounds = [f"--jobs={job_id}", f"--user={user}", f"--starttime={since}"]
    return ["sacct", *bounds, "--allocations", "--noheader", "--parsable2", f"--format={_SACCT_FIELDS}"]


def sinfo_argv() -> list[str]:
    """Every partition, one line for each kind of node in it."""
    return ["sinfo", "--noheader", f"--format={_SINFO_FIELDS}"]


# Their answers.


def parse_sbatch(stdout: str) -> str:
    """The job's id, from sbatch's sentence ("Submitted batch job 12 on cluster x") or from `--parsable` ("12;x").

    Raises SchedulerError if there is none.
    """
    match = re.search(r"Submitted batch job (\d+)", stdout) or re.search(r"^(\d+)(?:;\S+)?$", stdout, re.MULTILINE)
    if match is None:
        raise SchedulerError(
            f"sbatch said {stdout.strip()!r}, in which there is no job id. "
            "Look with `squeue --me` whether the job was submitted."
        )
    return match[1]


def parse_squeue(stdout: str) -> list[JobState]:
    """One state for each line of squeue."""
    return [_squeue_line(line) for line in _lines(stdout)]


def _squeue_line(line: str) -> JobState:
    job_id, state, reason, node_list, start, end, left, used, submitted, user, name = _fields("squeue", line, 11)
    return JobState(
        job_id=job_id,
        state=state,
        reason=_said(reason) or "",
        name=name,
        user=user,
        node_list=_said(node_list) or "",
        start_time=_said(start),
        run_time_s=_duration_s(used),
        time_left=_said(left),
        submitted_at=_seconds(submitted),
        ended_at=_seconds(end),
        source="squeue",
    )


def parse_scontrol_job(stdout: str, job_id: str) -> JobState | None:
    """The job's state from `scontrol show job` (one line for each task of an array); None if it is not there."""
    for line in stdout.splitlines():
        values = _scontrol_values(line)
        ids = (values.get("JobId"), values.get("ArrayJobId"), f"{values.get('ArrayJobId')}_{values.get('ArrayTaskId')}")
        if job_id in ids and "JobState" in values:
            exit_code, signal = _exit_status(values.get("ExitCode", ""))
            return JobState(
                job_id=job_id,
                state=values["JobState"],
                reason=(_said(values.get("Reason", "")) or "").replace("_", " "),
                name=values.get("JobName", ""),
                user=values.get("UserId", "").partition("(")[0],
                node_list=_said(values.get("NodeList", "")) or "",
                start_time=_said(values.get("StartTime", "")),
                submitted_at=_seconds(values.get("SubmitTime", "")),
                ended_at=_seconds(values.get("EndTime", "")),
                exit_code=exit_code,
                signal=signal,
                restart=int(values.get("Restarts", 0)),
                batch_log=_said(values.get("StdOut", "")),
                source="scontrol",
            )
    return None


def _scontrol_values(line: str) -> dict[str, str]:
    """The `Name=value` words of one job. The job's name may hold anything: it ends where the field after it begins."""
    values: dict[str, str] = {}
    if job_name := re.search(r" JobName=(.*?)(?= UserId=)", line):
        values["JobName"] = job_name[1]
        line = line.replace(job_name[0], "", 1)
    for name, value in re.findall(r"(?<!\S)([A-Za-z:/]+)=(\S*)", line):
        values.setdefault(name, value)  # free text (a comment) comes after Slurm's own fields
    return values


def parse_sacct(stdout: str, job_id: str) -> JobState | None:
    """The job's state as accounting has it; None if it has no such job. The last line is the job's latest start."""
    found = None
    for line in _lines(stdout):
        seen_id, state, exit_status, node_list, user, name = _fields("sacct", line, 6)
        if seen_id != job_id:
            continue
        word, _, by = state.partition(" by ")
        exit_code, signal = _exit_status(exit_status)
        found = JobState(
            job_id=job_id,
            state=word.strip(),
            name=name,
            user=user,
            node_list=_said(node_list) or "",
            exit_code=exit_code,
            signal=signal,
            cancelled_by=by.strip() or None,
            source="sacct",
        )
    return found


def parse_sinfo(stdout: str) -> list[Partition]:
    """The partitions, the default one first."""
    partitions = []
    for line in _lines(stdout):
        name, available, time_limit, num_nodes, gres = _fields("sinfo", line, 5)
        partitions.append(
            Partition(
                name=name.rstrip("*"),
                is_default=name.endswith("*"),
                is_up=available == "up",
                time_limit=time_limit,
                num_nodes=int(num_nodes),
                gres=_said(gres) or "",
            )
        )
    return sorted(partitions, key=lambda partition: not partition.is_default)


def says_unreachable(stderr: str) -> bool:
    """True if a Slurm command failed because the controller did not answer: nothing is known then."""
    return _UNREACHABLE.search(stderr) is not None


def says_no_such_job(stderr: str) -> bool:
    """True if the controller answered that it knows no such job."""
    return _NO_SUCH_JOB.search(stderr) is not None


def _lines(stdout: str) -> list[str]:
    # With SLURM_CLUSTERS set, a line of its own names each cluster.
    return [line for line in stdout.splitlines() if line.strip() and not line.startswith("CLUSTER: ")]


def _fields(command: str, line: str, count: int) -> list[str]:
    fields = line.strip().split("|", count - 1)
    if len(fields) != count:
        raise SchedulerError(f"{command} printed a line that is not understood: {line!r}.")
    return fields


def _said(value: str) -> str | None:
    """None for Slurm's ways of saying nothing."""
    nothing = ("", "N/A", "None", "(null)", "NOT_SET", "Unknown", "None assigned")
    return None if value in nothing else value


def _duration_s(duration: str) -> float:
    """Seconds of [D-][HH:]MM:SS; 0 for words such as INVALID."""
    if not re.fullmatch(r"[\d:-]+", duration):
        return 0.0
    days, _, clock = duration.rpartition("-")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = 60 * seconds + int(part or 0)
    return seconds + 86400.0 * int(days or 0)


def _seconds(local_time: str) -> float | None:
    """Seconds since the epoch of Slurm's YYYY-MM-DDTHH:MM:SS, which is in the time zone of whoever asked."""
    try:
        return datetime.fromisoformat(local_time).timestamp()
    except ValueError:
        return None


def _exit_status(status: str) -> tuple[int | None, int | None]:
    match = re.fullmatch(r"(\d+):(\d+)", status)
    return (int(match[1]), int(match[2])) if match else (None, None)
