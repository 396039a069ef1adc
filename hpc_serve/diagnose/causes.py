"""Chooses the first cause out of the evidence in a job's logs: the root, not its consequences.

A cause that a rule knows comes first. Then comes an exception that ended a process, then a part that was killed.
Symptoms come next: another part may have caused them (a timeout of ranks that waited for a dead one). Mere reports of a
failure come last. Among equals the first in time counts, on whichever node. The lines of each rule are data in `rules`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hpc_serve.diagnose.evidence import LogEvidence, Match, Raised
from hpc_serve.diagnose.rules import RULES, filled
from hpc_serve.redact import redact

_RANKS = {"cause": 0, "death": 2, "symptom": 3, "consequence": 5}
_EXCEPTION, _SYMPTOM, _LAUNCHER, _CONSEQUENCE = 1, 3, 4, 5
# vLLM, Ray and torch end with these whatever the cause was.
_CONSEQUENCES = re.compile(
    r"Engine core initialization failed|EngineCore (?:encountered|failed)|EngineDeadError|"
    r"WorkerProc initialization failed|[Ss]ee (?:the )?(?:root cause|stack trace)|"
    r"Ray workers have not started successfully|Worker \d+ failed to initialize|Executor failed|"
    r"Engine process failed to start|Engine loop has died|AsyncEngineDeadError|failed to be inspected|"
    r"validation errors? for \w+$|"
    r"^(?:[\w.]*\.)?(?:CancelledError|SystemExit|KeyboardInterrupt|ChildFailedError|ProcessExitedException)\b"
)
_SYMPTOMS = re.compile(
    r"^(?:[\w.]*\.)?(?:TimeoutError|ZMQError|RayTaskError|RaySystemError|DistBackendError|GetTimeoutError)\b"
)
# Exceptions of one process that follow each other so closely belong to one end of it.
_CLOSE_LINES, _CLOSE_S = 150, 30.0
# An exception that the log goes on after for so long was survived. A note that so much follows is over.
_SURVIVED_LINES, _SURVIVED_S = 200, 300.0
_LAST_NOTE_LINES = 50
_MOST_LINES_SHOWN = 4
_MOST_FINDINGS = 6
_LONGEST_QUOTE = 300
_LONGEST_IN_SENTENCE = 220
UNKNOWN = "unknown"
OWN_WORDS = "hpc-serve"
"""The name of a cause that hpc-serve itself ended the run for: its own sentence, which says what to do."""
OWN_CURE = "Change what the sentence above names, and submit again."
UNKNOWN_CURE = (
    "This is no cause that is known here: the lines around it say more. `hpc-serve doctor JOB --bundle FILE.tar.gz` "
    "collects what "
    "a bug report needs."
)


@dataclass(frozen=True, kw_only=True)
class SeenLine:
    """A line of a log; `source` is the log's name."""

    source: str
    number: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.source}:{self.number}" if self.number else self.source


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause: a sentence without its full stop, what to do about it, and the lines it was read from.

    `name` is that of the rule, or "unknown". `sentence` quotes the line as well.
    """

    name: str
    cause: str
    cure: str
    lines: tuple[SeenLine, ...]

    @property
    def is_known(self) -> bool:
        """Return whether a rule knows it."""
        return self.name != UNKNOWN

    @property
    def sentence(self) -> str:
        """Return the cause with the words of the log that tell it."""
        if not self.is_known:
            return self.cause
        quote = self.lines[0].text
        parts = quote.split(": ")
        if any(": ".join(parts[start:]) in self.cause for start in range(len(parts))):
            return self.cause
        return f"{self.cause} ({_shortened(quote, _LONGEST_IN_SENTENCE)})"


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    rank: int
    at: float
    key: str
    finding: Finding
    repeats: bool = False


def find_causes(logs: Sequence[LogEvidence]) -> tuple[Finding, ...]:
    """Return the possible causes of the job's end, the first cause first. Lines that say the same are one finding."""
    candidates = sorted(
        (one for log in logs for one in _candidates(log)), key=lambda candidate: (candidate.rank, candidate.at)
    )
    groups: dict[str, list[_Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.key, []).append(candidate)
    most_telling = candidates[0].rank if candidates else _CONSEQUENCE
    told = [group for group in groups.values() if group[0].rank < _LAUNCHER or group[0].rank == most_telling]
    return tuple(_one_finding(group) for group in told[:_MOST_FINDINGS])


def _one_finding(group: Sequence[_Candidate]) -> Finding:
    """Return the first finding of a group, with lines of the others; hpc-serve's own only if alone."""
    first, *others = [one for one in group if not one.repeats] or group[:1]
    further: dict[tuple[str, str], SeenLine] = {}
    for other in others:
        line = other.finding.lines[0]
        further.setdefault((line.source, line.text), line)
    for line in first.finding.lines:
        further.pop((line.source, line.text), None)
    lines = [replace(line, text=redact(line.text)) for line in (*first.finding.lines, *further.values())]
    return replace(first.finding, cause=redact(first.finding.cause), lines=tuple(lines[:_MOST_LINES_SHOWN]))


def tells_the_root(findings: Sequence[Finding]) -> bool:
    """Return whether the first of the findings is a cause that a rule knows, and no symptom of another."""
    kinds = {rule.name: rule.kind for rule in RULES}
    return bool(findings) and kinds.get(findings[0].name) in ("cause", "error")


def first_cause(logs: Sequence[LogEvidence]) -> Finding | None:
    """Return the first cause; None if the logs tell of none."""
    return next(iter(find_causes(logs)), None)


def _candidates(log: LogEvidence) -> Iterator[_Candidate]:
    known_lines = {match.line for match in log.matches}
    for match in log.matches:
        may_be_over = match.rule.in_notes and not match.rule.is_final
        is_over = may_be_over and log.num_lines - match.line > _LAST_NOTE_LINES
        if match.rule.kind != "error" and not is_over:
            yield _of_match(log, match, _RANKS[match.rule.kind])
    is_root = {id(one.root) for one in log.raised}
    ends = [one for one in log.raised if not one.is_survived and id(one) not in is_root]
    unknown = [one for one in ends if _is_own(one, known_lines)]
    errors: list[Match | Raised] = [
        *(match for match in log.matches if match.rule.kind == "error"),
        *(one for one in unknown if _rank(one.first) == _EXCEPTION),
    ]
    for one in _first_of_the_end(errors):
        # Start-up files of a shell say such things too, and go on.
        is_only_said = isinstance(one, Match) and not one.is_exception and not one.repeats
        rank = _LAUNCHER if is_only_said or _is_survived(log, one) else _EXCEPTION
        yield _of_match(log, one, rank) if isinstance(one, Match) else _of_exception(log, one, rank)
    for end in unknown:
        if (rank := _rank(end.first)) != _EXCEPTION:
            yield _of_exception(log, end, rank)
    for number, reason, is_own in log.launcher_failures:
        if number not in known_lines:
            yield _of_launcher(log, number, reason, is_own=is_own)


def _is_own(raised: Raised, known_lines: set[int]) -> bool:
    """Return whether no rule knows the exception, nor one that it follows from."""
    chain = raised
    while chain.line not in known_lines:
        if chain.root is None:
            return True
        chain = chain.root
    return False


def _rank(raised: Raised) -> int:
    if _CONSEQUENCES.search(raised.words):
        return _CONSEQUENCE
    return _SYMPTOM if _SYMPTOMS.search(raised.words) else _EXCEPTION


def _first_of_the_end(errors: Sequence[Match | Raised]) -> Iterator[Match | Raised]:
    """Yield for each process the first of the errors that stand close together at its end."""
    by_process: dict[str, list[Match | Raised]] = {}
    for one in sorted(errors, key=lambda error: error.line):
        by_process.setdefault(one.process, []).append(one)
    for group in by_process.values():
        first = group[-1]
        for one in reversed(group[:-1]):
            if first.line - one.line > _CLOSE_LINES or (first.at or 0) - (one.at or 0) > _CLOSE_S:
                break
            first = one
        yield first


def _is_survived(log: LogEvidence, error: Match | Raised) -> bool:
    """Return whether the log goes on for long after an error, as after one of a single request."""
    if error.at is None or log.last_at is None or log.last_at - error.at < _SURVIVED_S:
        return False
    return log.num_lines - error.line > _SURVIVED_LINES


def _of_match(log: LogEvidence, match: Match, rank: int) -> _Candidate:
    rule, found = match.rule, match.found
    line = SeenLine(source=log.source, number=match.line, text=_quote(found.string))
    finding = Finding(name=rule.name, cause=filled(rule.cause, found), cure=filled(rule.cure, found), lines=(line,))
    return _Candidate(rank=rank, at=_time(match.at), key=rule.name, finding=finding, repeats=match.repeats)


def _of_exception(log: LogEvidence, raised: Raised, rank: int) -> _Candidate:
    first = raised.first
    lines = [SeenLine(source=log.source, number=first.line, text=_quote(first.words))]
    if first.frame:
        lines.append(SeenLine(source=log.source, number=first.frame_line, text=f"in {first.frame}"))
    where = f", in {first.frame}" if first.frame else ""
    finding = Finding(name=UNKNOWN, cause=f"{_quote(first.words)}{where}", cure=UNKNOWN_CURE, lines=tuple(lines))
    return _Candidate(rank=rank, at=_time(first.at), key=re.sub(r"0x\w+|\d+", "#", first.words), finding=finding)


def _of_launcher(log: LogEvidence, number: int, reason: str, *, is_own: bool) -> _Candidate:
    """Why hpc-serve ended the run by itself; or a part that ended without a word that is known: what it said last."""
    last = [] if is_own else [line for line in log.before_failure if line[0] < number][-_MOST_LINES_SHOWN:]
    lines = (SeenLine(source=log.source, number=at, text=_quote(text)) for at, text in [(number, reason), *last])
    name, cure = (OWN_WORDS, OWN_CURE) if is_own else (UNKNOWN, UNKNOWN_CURE)
    cause = reason if is_own else _quote(reason)
    finding = Finding(name=name, cause=cause, cure=cure, lines=tuple(lines))
    return _Candidate(rank=_LAUNCHER, at=math.inf, key=reason, finding=finding)


def _time(at: float | None) -> float:
    return math.inf if at is None else at


def _quote(text: str) -> str:
    return _shortened(text.strip(), _LONGEST_QUOTE)


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]} …"


def note_lines(log: LogEvidence, lines: Iterable[str]) -> LogEvidence:
    """Note these lines in the log, and return it."""
    for line in lines:
        log.note(line)
    return log
