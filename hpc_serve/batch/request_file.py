"""Reads the requests of a batch: OpenAI's Batch format, one JSON object a line.

The file is read twice: once to check each line and to index its ids, once to send the lines. So neither pass holds the
file in memory.
"""

from __future__ import annotations

import json
import os
import stat
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_serve.errors import InvalidRequestError, StoreError

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    *("/v1/embeddings", "/v1/score", "/v1/rerank"),
)
_EXAMPLE = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", '
    '"body": {"messages": [{"role": "user", "content": "Hello"}]}}'
)
_FIRST_SLOTS = 1 << 10


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """One line of the input: its number from 1 on, and what it asks."""

    line: int
    custom_id: str
    url: str
    body: Mapping[str, Any]


class IdIndex:
    """A set of ids as 64-bit hashes in an array: 12 to 24 bytes an id, whatever its length.

    `slot` is the place of an id in arrays of `num_slots` entries that others keep. The hashes differ by process.
    """

    def __init__(self) -> None:
        self._hashes = array("Q", bytes(8 * _FIRST_SLOTS))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def num_slots(self) -> int:
        return len(self._hashes)

    def add(self, custom_id: str) -> bool:
        """Add an id; False if it is there already. Slots of earlier ids may change."""
        hashed = _hash(custom_id)
        slot = self._find(hashed)
        if self._hashes[slot]:
            return False
        self._hashes[slot] = hashed
        self._count += 1
        if 3 * self._count > 2 * len(self._hashes):
            before, self._hashes = self._hashes, array("Q", bytes(16 * len(self._hashes)))
            for known in before:
                if known:
                    self._hashes[self._find(known)] = known
        return True

    def slot(self, custom_id: str) -> int | None:
        """Return the slot of an id; None if it was not added."""
        slot = self._find(_hash(custom_id))
        return slot if self._hashes[slot] else None

    def _find(self, hashed: int) -> int:
        mask = len(self._hashes) - 1
        slot = hashed & mask
        while (found := self._hashes[slot]) and found != hashed:
            slot = (slot + 1) & mask
        return slot


def _hash(custom_id: str) -> int:
    return hash(custom_id) & 0xFFFF_FFFF_FFFF_FFFF or 1  # 0 is an empty slot


def parse_line(text: bytes, number: int, path: Path) -> BatchRequest:
    """Return the request of a line. Raises InvalidRequestError, which says what the line needs."""

    def refused(why: str) -> InvalidRequestError:
        return InvalidRequestError(f"{path}, line {number}: {why}\nNothing was sent. A line is like {_EXAMPLE}")

    try:
        asked = json.loads(text)
    except UnicodeDecodeError:
        raise refused("it is not in UTF-8. Write the file in UTF-8, and do not compress it.") from None
    except (ValueError, RecursionError) as error:
        raise refused(f"it is no JSON ({error}). Correct the line or remove it.") from None
    if not isinstance(asked, dict):
        raise refused("it is no JSON object.")
    custom_id, body, url = asked.get("custom_id"), asked.get("body"), asked.get("url")
    if not isinstance(custom_id, str) or not custom_id:
        raise refused(f"its custom_id is {json.dumps(custom_id)}; it must be a text, and no other line may have it.")
    if asked.get("method", "POST") != "POST":
        raise refused(f"its method is {asked['method']!r}; it must be POST.")
    if url not in URLS:
        raise refused(f"its url is {json.dumps(url)}; it must be one of {', '.join(URLS)}.")
    if not isinstance(body, dict):
        raise refused("its body is no JSON object.")
    if body.get("stream"):
        raise refused("it asks for a stream; a batch writes whole answers. Leave `stream` out of its body.")
    return BatchRequest(line=number, custom_id=custom_id, url=url, body=body)


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """Yield the requests of a file. Empty lines do not count. Raises InvalidRequestError, StoreError."""
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if number == 1:
                    text = text.removeprefix(b"\xef\xbb\xbf")  # a byte order mark, as Windows writes it
                if text.strip():
                    yield parse_line(text, number, path)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error


def index_requests(path: Path) -> IdIndex:
    """Check each line of a file, and return the index of its ids. Raises InvalidRequestError, StoreError."""
    index = IdIndex()
    for request in read_requests(path):
        if not index.add(request.custom_id):
            raise InvalidRequestError(_duplicate(path, request))
    if not len(index):
        raise InvalidRequestError(f"{path} has no requests. A line is like {_EXAMPLE}")
    return index


def _duplicate(path: Path, second: BatchRequest) -> str:
    for first in read_requests(path):
        if first.custom_id == second.custom_id:
            break
    if first.line == second.line:
        return f"{path}: two ids have the same hash by chance. Run the command again: hashes differ each time."
    return (
        f"{path}: lines {first.line} and {second.line} have the same custom_id, {second.custom_id!r}. Each line needs "
        "its own, since answers are told apart by it. Nothing was sent."
    )


def file_version(path: Path) -> tuple[int, int, int]:
    """Return values that change if the file does. Raises StoreError, and InvalidRequestError for a pipe."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(found.st_mode):
        raise InvalidRequestError(f"{path} is no file: it is read twice, so write the requests to a file first.")
    return found.st_ino, found.st_size, found.st_mtime_ns
