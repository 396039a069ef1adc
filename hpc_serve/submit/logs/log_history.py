"""The engine's own reports over time, read from the log of a run's head. vLLM writes them while it has work.

Times are by the clock of the node that wrote the log.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from hpc_serve.diagnose.lines import read_head
from hpc_serve.submit.logs.log_files import both_ends
from hpc_serve.vllm.report_line import EngineReport, read_report

# Bytes that are read at both ends of a long log.
_HEAD_BYTES, _TAIL_BYTES = 4 << 20, 16 << 20
_LONGEST_LINE = 4096
_SECONDS_A_MONTH, _SECONDS_A_DAY = 31 * 86_400, 86_400
_BEGINS = "hpc-serve: launcher of "

Reports = tuple[tuple[float, EngineReport], ...]
"""Each with its time in seconds since the epoch, in the order of time."""


def read_reports(path: Path, *, near: float, head_bytes: int = _HEAD_BYTES, tail_bytes: int = _TAIL_BYTES) -> Reports:
    """Return the reports of the last run in a log; none if it cannot be read.

    Lines have no year, and those times are taken that are next to `near`, in seconds since the epoch.
    """
    reports: dict[float, EngineReport] = {}
    with contextlib.suppress(OSError):  # gone, or of a filesystem that does not answer
        for _, raw in both_ends(path, head_bytes=head_bytes, tail_bytes=tail_bytes):
            line = raw[:_LONGEST_LINE].decode(errors="replace").rstrip("\n")
            if _BEGINS in line:  # the log of a job that Slurm runs again has several runs
                reports.clear()
            elif (report := read_report(line)) is not None and (at := read_head(line).at) is not None:
                since = _since_epoch(at, near)
                reports[since] = report.plus(reports.get(since))
    return tuple(sorted(reports.items(), key=lambda one: one[0]))


def _since_epoch(at: float, near: float) -> float:
    """Return the time of `read_head`, which has no year, as seconds since the epoch."""
    month, rest = divmod(int(at) - _SECONDS_A_DAY, _SECONDS_A_MONTH)
    day, second = divmod(rest, _SECONDS_A_DAY)
    year = time.localtime(near).tm_year
    times = [time.mktime((one, month + 1, day + 1, 0, 0, second, 0, 0, -1)) for one in (year - 1, year, year + 1)]
    return min(times, key=lambda one: abs(one - near))
