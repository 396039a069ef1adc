"""Reads the beginning of a log line: its level, its time, and the process that wrote it.

The forms are those of vLLM, Ray, torch, NCCL, uvicorn, Python's logging, Slurm and hpc-serve itself. `rules` and
`tracebacks` decide what the rest of a line means.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PROCESS = re.compile(r"\(([A-Za-z][^()\s]*(?: [^()]*?)?\bpid=\d+[^()]*|raylet[^()]*|autoscaler[^()]*)\)\s?")
_RANK = re.compile(r"\[(rank\d+)\]:? ?")
_TIME = r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)"
_LEVELS = r"DEBUG|INFO|WARNING|WARN|ERROR|ERR|CRITICAL|FATAL|SUCC|PANIC"
_DAY = r"\d{4}-(?P<month>\d\d)-(?P<day>\d\d)"

# The first form that fits counts. A form may have the groups month, day, h, m, s, level.
_VLLM = re.compile(rf"(?P<level>{_LEVELS}) (?P<month>\d\d)-(?P<day>\d\d) {_TIME} \[?[\w./<>-]+(?::\d+)?\] ?")
_LOGGING = re.compile(  # 2026-11-21 02:36:08 n1 ERROR hpc-serve: …, and what Ray and Python's logging write
    rf"{_DAY}[ T]{_TIME}\S*\s+(?:\S+\s+){{0,2}}?(?P<level>{_LEVELS})\b:?(?: hpc-serve:)?(?: \S+\.py:\d+ --)? ?"
)
_BASIC_LOGGING = re.compile(rf"(?P<level>{_LEVELS}):[\w.]+:")
_FORMS = (
    _VLLM,
    re.compile(rf"(?P<level>{_LEVELS}) (?:\d\d-\d\d )?\[[\w./<>-]+:\d+\] ?"),
    # [2026-11-21 02:30:20,123 E 9 9] (raylet) core_worker.cc:841: …
    re.compile(rf"\[{_DAY} {_TIME}[,.]\d+ (?P<level>[DIWEFC]) \d+ \d+\](?: \(\w+\))? (?P<cpp>\w+\.(?:cc|h)):\d+: ?"),
    _LOGGING,
    # [E1121 02:36:08.123456789 ProcessGroupNCCL.cpp:632], without a time in older versions
    re.compile(rf"\[(?P<level>[IWEF])(?P<date>\d{{3,4}}) {_TIME}\S* \S+:\d+\] ?"),
    re.compile(r"\[(?P<level>[IWEF]) \S+\.(?:cpp|cc|h):\d+\] ?"),
    re.compile(rf"(?P<level>[IWEF])(?P<date>\d{{4}}) {_TIME}\S* +\d+ \S+\] ?"),
    # vm:812:940 [3] NCCL INFO …; since 2.27 after the time, and a warning after its place in the source
    re.compile(
        rf"(?:\[{_DAY} {_TIME}\] )?\S+:\d+:\d+ \[\d+\] (?:\S+:\d+ (?:\(\w+\) )?)?(?P<cpp>NCCL) "
        r"(?P<level>INFO|TRACE|WARN) ?"
    ),
    _BASIC_LOGGING,
    re.compile(rf"(?P<level>{_LEVELS}):\s+"),
    re.compile(r"\S+\.py:\d+: \w*(?P<level>Warning): "),
)
_SLURM = re.compile(r"(?:slurmstepd|srun|slurmd|sbatch)(?:-\S+)?: (?:error|fatal): ?")
_SLURM_TIME = re.compile(rf"\bAT {_DAY}T{_TIME}")
_NEVER_WITH_TRACEBACK = ("DEBUG", "INFO")
_HARMLESS = frozenset({"DEBUG", "INFO", "WARNING", "WARN", "SUCC", "TRACE", "Warning", "D", "I", "W"})
_SECONDS_A_MONTH, _SECONDS_A_DAY = 31 * 86_400, 86_400


@dataclass(frozen=True, kw_only=True)
class LineHead:
    """The beginning of a line, and the `text` after it.

    `process` names who wrote the line; "" if the line does not say. `is_error` is True for a level that reports an
    error, False for one that does not, None for a line without a level. `at` counts seconds from the beginning of
    the year, with 31 days a month, by the writer's clock. `may_go_on`: the message may have further lines, which have
    no head.
    """

    text: str
    process: str = ""
    is_error: bool | None = None
    at: float | None = None
    may_go_on: bool = False


def read_head(line: str) -> LineHead:
    """Take the head off a line.

    >>> read_head("(EngineCore pid=7) ERROR 11-20 10:00:01 [core.py:9] ValueError: no")
    LineHead(text='ValueError: no', process='EngineCore pid=7', is_error=True, at=28548001.0, may_go_on=False)
    """
    rest = _ANSI.sub("", line).rstrip()
    process = ""
    while found := _PROCESS.match(rest) or _RANK.match(rest):
        process, rest = found[1], rest[found.end() :]
    if found := _SLURM.match(rest):
        return LineHead(text=rest, process="slurm", is_error=True, at=_at(_SLURM_TIME.search(rest)))
    for form in _FORMS:
        if found := form.match(rest):
            return LineHead(
                text=rest[found.end() :],
                process=process,
                is_error=_is_error(found),
                at=_at(found),
                may_go_on=form in (_LOGGING, _BASIC_LOGGING) and found["level"] not in _NEVER_WITH_TRACEBACK,
            )
    return LineHead(text=rest, process=process)


def _is_error(found: re.Match[str]) -> bool | None:
    level = found["level"]
    cpp = found.groupdict().get("cpp")
    if cpp == "NCCL":  # it warns of what ends it, and of nothing else
        return None if level == "WARN" else False
    if cpp is not None:  # Ray's C++ side logs what it retries or merely notes as an error
        return level in ("F", "C")
    return level not in _HARMLESS


def _at(found: re.Match[str] | None) -> float | None:
    if found is None or not (groups := found.groupdict()).get("h"):
        return None
    date = groups.get("date")
    month, day = (int(date[:-2]), int(date[-2:])) if date else (int(groups["month"]), int(groups["day"]))
    clock = int(groups["h"]) * 3600 + int(groups["m"]) * 60 + int(groups["s"])
    return float((month - 1) * _SECONDS_A_MONTH + day * _SECONDS_A_DAY + clock)
