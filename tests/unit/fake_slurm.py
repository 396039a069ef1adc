"""Stand-ins for Slurm's commands on PATH, for tests of what we make of their answers. They schedule nothing.

They answer in the words of a real Slurm (slurm_outputs/); the real one itself is in tests/e2e.
"""

from __future__ import annotations

from pathlib import Path

from hpc_serve.submit.scheduler import user_name

COMMANDS = {
    "sbatch": """
if [[ -e refusal ]]; then cat refusal >&2; exit 1; fi
id=$(($(cat last_id) + 1)); echo $id > last_id; cp "$1" script-$id
echo "$id|PENDING|Resources|||12:00:00|me|hpc-serve-x" >> queue
echo "Submitted batch job $id"
""",
    "squeue": "cat queue",
    "scontrol": """
for id; do :; done
if [[ -e job-$id ]]; then cat job-$id; exit; fi
echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1
""",
    "scancel": """
echo "$1" >> cancelled
grep -v "^$1|" queue > rest; mv rest queue
if [[ -e ended-$1 ]]; then mv ended-$1 job-$1; fi
""",
    "sacct": 'echo "Slurm accounting storage is disabled" >&2; exit 1',
    "sinfo": "echo 'gpu*|up|1-00:00:00|3|gpu:h100:8'",
}
SILENT = """
if [[ -e silent ]]; then
    echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1
fi
"""


class FakeSlurm:
    """A folder of stand-ins, and what they answer."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        for name, text in COMMANDS.items():
            path = self.bin / name
            path.write_text(f"#!/bin/bash\ncd {folder}\n{SILENT}{text}\n")
            path.chmod(0o755)
        self._folder = folder
        (folder / "last_id").write_text("100\n")
        self.queue()

    def queue(self, *jobs: tuple[str, str, str]) -> None:
        """What squeue lists: (job id, state, reason)."""
        lines = (f"{job_id}|{state}|{reason}|n1||1:00:00|me|hpc-serve-x\n" for job_id, state, reason in jobs)
        (self._folder / "queue").write_text("".join(lines))

    def name_in_queue(self, job_id: str, name: str) -> None:
        """One more job that waits, under another name."""
        with (self._folder / "queue").open("a") as queue:
            queue.write(f"{job_id}|PENDING|Priority|||1:00:00|me|{name}\n")

    def job(
        self, job_id: str, state: str, *, exit_code: str = "0:0", restart: int = 0, after_cancel: bool = False
    ) -> None:
        """What scontrol shows of a job, now or once it was cancelled."""
        line = f"JobId={job_id} JobName=x UserId={user_name()}(1) JobState={state} Reason=None"
        line += f" Restarts={restart} ExitCode={exit_code}"
        (self._folder / f"{'ended' if after_cancel else 'job'}-{job_id}").write_text(f"{line} NodeList=n1 StdOut=\n")

    def forget(self, job_id: str) -> None:
        (self._folder / f"job-{job_id}").unlink(missing_ok=True)

    def refuse(self, words: str) -> None:
        (self._folder / "refusal").write_text(words + "\n")

    def be_silent(self, silent: bool = True) -> None:
        if silent:
            (self._folder / "silent").touch()
        else:
            (self._folder / "silent").unlink()

    @property
    def cancelled(self) -> list[str]:
        path = self._folder / "cancelled"
        return path.read_text().split() if path.exists() else []

    @property
    def scripts(self) -> list[str]:
        """The texts that sbatch took."""
        return [path.read_text() for path in sorted(self._folder.glob("script-*"))]
