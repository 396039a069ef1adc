"""Collects from one log, line by line, what may explain a failure: matches of rules, exceptions, last lines.

The beginning of a line has its level, its time, and the process that wrote it, in the forms of vLLM, Ray, torch, NCCL,
uvicorn, Python's logging, Slurm and hpc-serve itself. Of exceptions the type, the message, the innermost frame and the
root are kept. Python prints a chain of exceptions oldest first: the root of a chain is the first one, unless it is of a
kind that code catches in the course of its work.

A log is read while it is written, so only a bounded number is kept of each. Lines from before the engine was ready, or
before the run began anew, did not end the run and are dropped. `causes` decides which evidence is the cause.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass, field

from hpc_serve.diagnose.rules import RULES, Rule

# -- the beginning of a line

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
    if "[serving" in found[0] and "VLLMValidationError" in found.string:  # vLLM refuses one request
        return False
    return level not in _HARMLESS


def _at(found: re.Match[str] | None) -> float | None:
    if found is None or not (groups := found.groupdict()).get("h"):
        return None
    date = groups.get("date")
    month, day = (int(date[:-2]), int(date[-2:])) if date else (int(groups["month"]), int(groups["day"]))
    clock = int(groups["h"]) * 3600 + int(groups["m"]) * 60 + int(groups["s"])
    return float((month - 1) * _SECONDS_A_MONTH + day * _SECONDS_A_DAY + clock)


# -- exceptions

_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
_EXCEPTION = re.compile(
    r"(?P<type>(?:[A-Za-z_][\w]*\.)*[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt|Timeout|"
    r"Died))(?:\(\w+\))?: (?P<message>.+)"
)
_ANY_EXCEPTION = re.compile(r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:\(\w+\))?(?:: (?P<message>.*))?$")
_CHAIN = ("The above exception was the direct cause of", "During handling of the above exception")
_IGNORED = re.compile(r"Exception ignored (?:in|while|on)|Task exception was never retrieved|--- Logging error ---")
# Exceptions that code often catches on purpose. An exception raised during their handling says more.
_CAUGHT_AS_A_RULE = frozenset(
    {"KeyError", "AttributeError", "StopIteration", "IndexError", "LookupError", "ImportError", "ModuleNotFoundError"}
)
# Standard library and wrappers: many errors have their last frame there.
_FOREIGN = re.compile(r"^(?:<|(?:torch|uvloop|asyncio|click)/)|/lib/python3[.\d]*/")
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")


@dataclass(frozen=True, kw_only=True)
class Raised:
    """An exception in a log. `line` and `frame_line` are numbers of lines; `frame` is "" if none was printed.

    `is_survived`: the line that reports it has a level below an error, or says that it was ignored.
    """

    type: str
    message: str
    line: int
    at: float | None
    process: str
    frame: str = ""
    frame_line: int = 0
    is_survived: bool = False
    root: Raised | None = None

    @property
    def words(self) -> str:
        """Type and message as Python prints them."""
        return f"{self.type}: {self.message}" if self.message else self.type

    @property
    def first(self) -> Raised:
        """Return the exception at the root of its chain; itself where there is none, or that was caught as a rule."""
        if self.root is None:
            return self
        first = self.root.first
        return self if first.type.rpartition(".")[2] in _CAUGHT_AS_A_RULE else first


@dataclass
class _TracebackReader:
    """Reads the lines of one process. `note` takes one after the other, without their heads."""

    process: str
    is_in_traceback: bool = False
    """Whether the next line belongs to a traceback."""
    _is_survived: bool = False
    _ignores: bool = False
    _chained: bool = False
    _last: Raised | None = None
    _frames: list[tuple[str, int]] = field(default_factory=list)
    _code: str = ""

    def note(self, text: str, number: int, *, at: float | None, is_survived: bool) -> Raised | None:
        """Read a line; return the exception that ends with it, or None."""
        stripped = text.strip()
        if _opens_traceback(text):
            self.is_in_traceback, self._is_survived, self._frames = True, is_survived, []
            return None
        if self.is_in_traceback:
            if frame := _FRAME.match(text):
                self._frames.append((_frame_words(frame), number))
                return None
            if not stripped or text[:1].isspace() or stripped.startswith("[repeated"):
                self._code = self._code if not stripped.strip("^~ ") else stripped
                return None
            self.is_in_traceback = False
            found = _EXCEPTION.match(stripped) or _ANY_EXCEPTION.match(stripped)
            return self._raise(found, number, at, is_survived=self._is_survived or is_survived) if found else None
        if stripped.startswith(_CHAIN):
            self._chained = True
            return None
        if _IGNORED.match(stripped):
            self._ignores = True
            return None
        self._frames = []
        if found := _EXCEPTION.match(stripped):
            return self._raise(found, number, at, is_survived=is_survived)
        if stripped:
            self._chained = False
        return None

    def _raise(self, found: re.Match[str], number: int, at: float | None, *, is_survived: bool) -> Raised:
        frame, frame_line = _own_frame(self._frames)
        # An assertion without a message: the line that failed says which.
        message = (found["message"] or "").strip() or (self._code if self._frames else "")
        raised = Raised(
            type=found["type"],
            message=message,
            line=number,
            at=at,
            process=self.process,
            frame=frame,
            frame_line=frame_line,
            is_survived=is_survived or self._ignores,
            root=self._last if self._chained else None,
        )
        self._last, self._chained, self._ignores, self._frames = raised, False, False, []
        return raised


def _opens_traceback(text: str) -> bool:
    """Return whether a line is the first of a traceback."""
    return text.rstrip().endswith(_TRACEBACK)


def _frame_words(frame: re.Match[str]) -> str:
    file = _PACKAGES.sub("", frame["file"])
    where = f"{file}:{frame['line']}"
    return f"{frame['function']}, {where}" if frame["function"] else where


def _own_frame(frames: list[tuple[str, int]]) -> tuple[str, int]:
    """Return the innermost frame outside of the standard library and of torch, else the innermost."""
    if not frames:
        return "", 0
    own = (frame for frame in reversed(frames) if not _FOREIGN.search(frame[0].rpartition(", ")[2]))
    return next(own, frames[-1])


# -- the evidence of a log

_MOST_LINES = 300
_MOST_OF_A_RULE = 20
_MOST_PROCESSES = 2_000
_NUM_LAST_LINES = 12
_LONGEST = 4_000
# The engine is ready, or Ray; a launcher, an engine or an attempt begins.
_BEGINS_ANEW = re.compile(
    r"Application startup complete|Ray runtime started|"
    r"hpc-serve: (?:launcher of |engine command: )|logs of this run are |srun: Step created"
)
_LAUNCHER_FAILED = re.compile(r"(?:(?P<part>.+?) failed \(exit code \d+\): )?(?P<reason>.+)")
_SCRIPT_FAILED = re.compile(r"hpc-serve: (?!attempt |logs of )(?P<reason>.+)")
_NOTES = tuple(rule for rule in RULES if rule.in_notes)


@dataclass(frozen=True, kw_only=True)
class Match:
    """A line that a rule knows. `repeats`: hpc-serve wrote it, about what it had read itself."""

    rule: Rule
    found: re.Match[str]
    line: int
    at: float | None
    process: str
    is_exception: bool
    repeats: bool = False


class LogEvidence:
    """The evidence of the log `source`. `note` takes its lines in order.

    `is_record`: the text is no log, but the words of hpc-serve or Slurm about the job.
    """

    def __init__(self, source: str, *, is_record: bool = False) -> None:
        self.source, self.is_record = source, is_record
        self.last_lines: deque[tuple[int, str]] = deque(maxlen=_NUM_LAST_LINES)
        self.num_lines = 0
        """The number of the last line."""
        self._forget()

    def _forget(self) -> None:
        self.matches: list[Match] = []
        self.raised: list[Raised] = []
        self.launcher_failures: list[tuple[int, str, bool]] = []
        """What the script or the launcher said of an end: the line, the reason, and whether it ended by itself."""
        self.before_failure: tuple[tuple[int, str], ...] = ()
        """The last lines before the first of them."""
        self._counts: Counter[str] = Counter()
        self._readers: dict[str, _TracebackReader] = {}
        self._last_note: tuple[str, int] | None = None
        self.last_at: float | None = None
        """The last time that a line names."""

    def note(self, line: str, number: int | None = None) -> None:
        """Take the next line; `number` is its own, where lines before it were left out."""
        self.num_lines = self.num_lines + 1 if number is None else number
        line = line[:_LONGEST].rstrip()
        if not line:
            return
        if _BEGINS_ANEW.search(line):
            self._forget()
        head = read_head(line)
        self.last_at = head.at if head.at is not None else self.last_at
        is_of_launcher = head.is_error is True and " ERROR hpc-serve: " in line
        raised = self._note_traceback(head)
        if raised is not None or not self._readers[head.process].is_in_traceback:
            self._note_rules(head, raised, repeats=self.is_record or is_of_launcher)
        if failed := _LAUNCHER_FAILED.fullmatch(head.text) if is_of_launcher else _SCRIPT_FAILED.match(line):
            self.before_failure = self.before_failure or tuple(self.last_lines)
            is_own = (failed.groupdict().get("part") or "launcher") == "launcher"
            _keep(self.launcher_failures, (self.num_lines, failed["reason"], is_own))
        self.last_lines.append((self.num_lines, line))

    def _note_traceback(self, head: LineHead) -> Raised | None:
        if len(self._readers) > _MOST_PROCESSES:
            self._readers.clear()
        reader = self._readers.setdefault(head.process, _TracebackReader(head.process))
        # Python's logging writes the traceback of a warning below it, on lines without a level.
        follows_note = self._last_note == (head.process, self.num_lines - 1)
        is_survived = head.is_error is False or (head.is_error is None and follows_note and _opens_traceback(head.text))
        raised = reader.note(head.text, self.num_lines, at=self.last_at, is_survived=is_survived)
        if head.is_error is False and head.may_go_on:
            self._last_note = (head.process, self.num_lines)
        if raised is not None:
            _keep(self.raised, raised)
        return raised

    def _note_rules(self, head: LineHead, raised: Raised | None, *, repeats: bool) -> None:
        is_note = head.is_error is False or (raised is not None and raised.is_survived)
        text = raised.words if raised is not None else head.text
        for rule in _NOTES if is_note else RULES:
            if found := rule.pattern.search(text):
                self._counts[rule.name] += 1
                if self._counts[rule.name] <= _MOST_OF_A_RULE:
                    match = Match(
                        rule=rule,
                        found=found,
                        line=self.num_lines,
                        at=self.last_at,
                        process=head.process,
                        is_exception=raised is not None,
                        repeats=repeats,
                    )
                    self.matches.append(match)
                return


def _keep(kept: list, value: object) -> None:  # type: ignore[type-arg]
    """Add a value. If there are too many, the middle is left out: a cause stands at the beginning, or at the end."""
    if len(kept) >= _MOST_LINES:
        del kept[_MOST_LINES // 2]
    kept.append(value)
