"""Stand-ins for Slurm's commands on PATH, for tests of what we make of their answers. They schedule nothing.

They answer in the words of a real Slurm (slurm_outputs/); the real one itself is in tests/e2e.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from hpc_serve.rendezvous.ownership import user_name

COMMANDS = {
    "sbatch": """
while [[ -e held ]]; do sleep 0.05; done
if [[ -e refusal ]]; then cat refusal >&2; exit 1; fi
id=$(($(cat last_id) + 1)); echo $id > last_id
for script; do :; done; cp "$script" script-$id
array=$(printf '%s\\n' "$@" | sed -n 's/^--array=0-//p'); array=${array:-$(sed -n 's/^#SBATCH --array=0-//p' "$script")}
for job in $([[ -z $array ]] && echo $id || seq -f "${id}_%g" 0 "$array"); do
    echo "$job|PENDING|Resources||N/A|N/A|12:00:00|0:00|2026-11-21T05:04:02|me|gpu|hpc-serve-x" >> queue
done
echo "$*" >> sbatch-words
echo "Submitted batch job $id"
""",
    "squeue": "cat queue ended-lines/* 2>/dev/null; exit 0",
    "scontrol": """
for id; do :; done
if [[ -e job-$id ]]; then cat job-$id; exit; fi
echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1
""",
    "scancel": """
echo "$1" >> cancelled
grep -v "^$1|" queue > rest; mv rest queue
if [[ -e ended-$1 ]]; then mv ended-$1 job-$1; mv later-line-$1 ended-lines/$1; fi
""",
    "sacct": """
if [[ -e accounts ]]; then cat accounts; exit; fi
echo "Slurm accounting storage is disabled" >&2; exit 1
""",
    "sinfo": "echo 'gpu*|up|1-00:00:00|3|gpu:h100:8'",
}
SILENT = """
if [[ -e silent ]]; then
    echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1
fi
"""


def _line(
    job_id: str,
    state: str,
    reason: str,
    *,
    name: str = "hpc-serve-x",
    nodes: str = "n1",
    run_time: str = "0:10",
    partition: str = "gpu",
    time_left: str = "1:00:00",
) -> str:
    begin_and_end = "N/A|N/A" if state == "PENDING" else "2026-11-21T05:04:02|2026-11-21T05:09:02"
    times = f"{begin_and_end}|{time_left}|{run_time}|2026-11-21T05:04:00"
    return f"{job_id}|{state}|{reason}|{nodes}|{times}|me|{partition}|{name}\n"


class FakeSlurm:
    """A folder of stand-ins, and what they answer."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        for name, text in COMMANDS.items():
            path = self.bin / name
            path.write_text(f"#!/bin/bash\ncd {folder}\necho {name} >> asked\n{SILENT}{text}\n")
            path.chmod(0o755)
        self._folder = folder
        (folder / "last_id").write_text("100\n")
        (folder / "ended-lines").mkdir()
        self.queue()

    def queue(
        self, *jobs: tuple[str, str, str], time_left: Mapping[str, str] = MappingProxyType({}), **fields: str
    ) -> None:
        """What squeue lists of jobs that wait or run: (job id, state, reason); with another time left than an hour."""
        lines = (_line(*job, time_left=time_left.get(job[0], "1:00:00"), **fields) for job in jobs)
        (self._folder / "queue").write_text("".join(lines))

    def name_in_queue(self, job_id: str, name: str) -> None:
        """One more job that waits, under another name."""
        with (self._folder / "queue").open("a") as queue:
            queue.write(_line(job_id, "PENDING", "Priority", name=name, nodes=""))

    def job(
        self,
        job_id: str,
        state: str,
        *,
        exit_code: str = "0:0",
        restart: int = 0,
        after_cancel: bool = False,
        name: str = "hpc-serve-x",
        nodes: str = "n1",
        log: str = "",
        reason: str = "None",
        partition: str = "gpu",
    ) -> None:
        """What scontrol shows of a job, now or once it was cancelled; squeue lists it too if it is over."""
        array, _, task = job_id.partition("_")
        ids = f"JobId=9{array} ArrayJobId={array} ArrayTaskId={task}" if task else f"JobId={job_id}"
        line = f"{ids} JobName={name} UserId={user_name()}(1) JobState={state} Reason={reason}"
        line += f" Restarts={restart} ExitCode={exit_code} TimeLimit=12:00:00 Partition={partition} NumNodes=1-1"
        shown = self._folder / f"{'ended' if after_cancel else 'job'}-{job_id}"
        shown.write_text(f"{line} NodeList={nodes} StdOut={log}\n")
        if state not in ("PENDING", "RUNNING"):
            listed = self._folder / (f"later-line-{job_id}" if after_cancel else f"ended-lines/{job_id}")
            listed.write_text(_line(job_id, state, "None", name=name, nodes=nodes))
            queue = self._folder / "queue"
            lines = queue.read_text().splitlines(keepends=True)
            queue.write_text("".join(one for one in lines if after_cancel or not one.startswith(f"{job_id}|")))

    def account(self, *lines: str) -> None:
        """What sacct has recorded; without it there is no accounting."""
        (self._folder / "accounts").write_text("".join(f"{line}\n" for line in lines))

    def forget(self, job_id: str) -> None:
        for name in (f"job-{job_id}", f"ended-lines/{job_id}"):
            (self._folder / name).unlink(missing_ok=True)

    def refuse(self, words: str) -> None:
        (self._folder / "refusal").write_text(words + "\n")

    def hold(self, held: bool = True) -> None:
        """Have sbatch wait, or go on."""
        (self._folder / "held").touch() if held else (self._folder / "held").unlink()

    def be_silent(self, silent: bool = True) -> None:
        (self._folder / "silent").touch() if silent else (self._folder / "silent").unlink()

    @property
    def asked(self) -> dict[str, int]:
        """How often each command was run."""
        path = self._folder / "asked"
        return dict(Counter(path.read_text().split())) if path.exists() else {}

    @property
    def cancelled(self) -> list[str]:
        path = self._folder / "cancelled"
        return path.read_text().split() if path.exists() else []

    @property
    def scripts(self) -> list[str]:
        """The texts that sbatch took."""
        return [path.read_text() for path in sorted(self._folder.glob("script-*"))]

    @property
    def sbatch_words(self) -> list[str]:
        """The words of each sbatch."""
        return (self._folder / "sbatch-words").read_text().splitlines()
