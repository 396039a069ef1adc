"""What persons have used today: the count of one answer, and one small file for each gateway and day.

A day is that of the host's clock. All gateways of a home write into one folder, so that their sum is known.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_serve.errors import RecordError
from hpc_serve.rendezvous.files import list_folder, read_json, remove_file, write_json

_TOKENS = re.compile(rb'"(?:(prompt|input)|completion|output)_tokens"\s*:\s*(\d{1,9})')
_TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content|thinking|arguments|partial_json|delta)"\s*:\s*"[^"]')
_LONGEST_MATCH = 64


@dataclass(frozen=True, kw_only=True)
class Use:
    """Requests that were answered, and their tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
        )

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, kw_only=True)
class _File:
    people: Mapping[str, Use]


class AnswerCount:
    """Counts the tokens of one answer as it passes, by its bytes.

    The largest figures of its `usage` count. A text in JSON cannot hold them, since its quotes are escaped. A stream
    without `usage` counts the events that carry text as completion tokens, and no prompt tokens.

    >>> count = AnswerCount()
    >>> count.begin(is_stream=True)
    >>> count.feed(b'data: {"choices": [{"text": "Hi"}]}\\n\\ndata: {"choices": [{"te')
    >>> count.feed(b'xt": " you"}]}\\n\\n')
    >>> count.use
    Use(requests=1, prompt_tokens=0, completion_tokens=2)
    >>> count.feed(b'data: {"usage": {"prompt_tokens": 5, "completion_tokens": 3}}\\n\\n')
    >>> count.use
    Use(requests=1, prompt_tokens=5, completion_tokens=3)
    """

    def __init__(self) -> None:
        self._requests = self._prompt_tokens = self._completion_tokens = self._texts = 0
        self._is_stream = False
        self._end = b""

    def begin(self, *, is_stream: bool) -> None:
        """Count an answer that an engine gives."""
        self._requests = 1
        self._is_stream = is_stream

    def feed(self, data: bytes) -> None:
        """Count the next bytes of the answer."""
        seen = len(self._end)
        data = self._end + data
        if b'_tokens"' in data:
            for is_prompt, number in _TOKENS.findall(data):
                if is_prompt:
                    self._prompt_tokens = max(self._prompt_tokens, int(number))
                else:
                    self._completion_tokens = max(self._completion_tokens, int(number))
        if self._is_stream:
            self._texts += sum(found.end() > seen for found in _TEXT.finditer(data))
        self._end = data[-_LONGEST_MATCH:]

    @property
    def use(self) -> Use:
        return Use(
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens or self._texts,
        )


def today() -> str:
    return time.strftime("%Y-%m-%d")


def file_name(day: str, gateway: str) -> str:
    return f"use-{day}-{gateway}.json"


def write_use(path: Path, people: Mapping[str, Use]) -> None:
    """Write the use of one gateway and day. Raises StoreError."""
    write_json(path, _File(people=people))


def read_use(folder: Path, day: str, *, but: str = "") -> dict[str, Use]:
    """Return the use of a day by name, as the files of all gateways `but` one say. Raises StoreError."""
    total: dict[str, Use] = {}
    for name in list_folder(folder):
        if name.startswith(file_name(day, "")[:-5]) and name != but:
            with suppress(FileNotFoundError, RecordError):
                for person, use in read_json(_File, folder / name).people.items():
                    total[person] = total.get(person, Use()) + use
    return total


def remove_earlier(folder: Path, day: str) -> None:
    """Remove the files of earlier days. Raises StoreError."""
    for name in list_folder(folder):
        if name.startswith("use-") and name < f"use-{day}":
            remove_file(folder / name)
