"""Collects from one log, line by line, what may explain a failure: matches of rules, exceptions, last lines.

A log is read while it is written, so only a bounded number is kept of each. Lines from before the engine was ready, or
before the run began anew, did not end the run and are dropped. `causes` decides which evidence is the cause.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass

from hpc_serve.diagnose.lines import LineHead, read_head
from hpc_serve.diagnose.rules import RULES, Rule
from hpc_serve.diagnose.tracebacks import Raised, TracebackReader, begins_traceback

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
        self._readers: dict[str, TracebackReader] = {}
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
        reader = self._readers.setdefault(head.process, TracebackReader(head.process))
        # Python's logging writes the traceback of a warning below it, on lines without a level.
        follows_note = self._last_note == (head.process, self.num_lines - 1)
        is_survived = head.is_error is False or (head.is_error is None and follows_note and begins_traceback(head.text))
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
