"""Reads the requests of a batch: OpenAI's Batch format, one JSON object a line.

The file is read twice: once to check each line and to index its ids, once to send the lines. So neither pass holds the
file in memory.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import json
import os
import stat
from array import array
from collections.abc import Iterable, Iterator, Mapping
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
_SORTED_AT_ONCE = 1 << 18  # a number in a list takes 40 bytes


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """One line of the input: its number from 1 on, and what it asks."""

    line: int
    custom_id: str
    url: str
    body: Mapping[str, Any]


class IdIndex:
    """A set of ids as sorted 64-bit hashes in an array: 8 bytes an id, whatever its length.

    `slot` is the place of an id in arrays that others keep, as long as the index. The hashes differ by process.
    """

    def __init__(self, ids: Iterable[str]) -> None:
        hashes, parts = map(hash, ids), []
        while part := sorted(itertools.islice(hashes, _SORTED_AT_ONCE)):
            parts.append(array("q", part))
        self._hashes = array("q", heapq.merge(*parts))

    def __len__(self) -> int:
        return len(self._hashes)

    def slot(self, custom_id: str) -> int | None:
        """Return the slot of an id; None if it is not in the index."""
        slot = bisect.bisect_left(self._hashes, hash(custom_id))
        return slot if slot < len(self) and self._hashes[slot] == hash(custom_id) else None

    def find_twins(self) -> int | None:
        """Return a hash that stands twice in the index."""
        return next((one for one, other in itertools.pairwise(self._hashes) if one == other), None)


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
    index = IdIndex(request.custom_id for request in read_requests(path))
    if (twins := index.find_twins()) is not None:
        raise InvalidRequestError(_duplicate(path, twins))
    if not len(index):
        raise InvalidRequestError(f"{path} has no requests. A line is like {_EXAMPLE}")
    return index


def _duplicate(path: Path, hashed: int) -> str:
    first, second, *_ = (request for request in read_requests(path) if hash(request.custom_id) == hashed)
    if first.custom_id != second.custom_id:
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
