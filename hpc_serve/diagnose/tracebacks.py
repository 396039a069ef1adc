"""Which exceptions a process raised, as its lines come: the type, the message, the innermost frame, and its root.

Python prints a chain of exceptions oldest first. The root of a chain is the first one, unless it is of a kind that code
catches in the course of its work. Which exception ended a run is decided in `causes`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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
class TracebackReader:
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
        if begins_traceback(text):
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


def begins_traceback(text: str) -> bool:
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
    own = (frame for frame in reversed(frames) if not _is_foreign(frame[0]))
    return next(own, frames[-1])


def _is_foreign(words: str) -> bool:
    return bool(_FOREIGN.search(words.rpartition(", ")[2]))
