"""Which replica has the beginning of a request in its cache: the one that was sent such a request last. Pure.

Engines keep the keys and values of prompts. A conversation's next request, or another question on the same document,
costs little where the first one was.
"""

from __future__ import annotations

import zlib

_SHORTEST_BYTES = 1024
_LONGER = 1.25
_MOST_KNOWN = 20_000


def beginnings(content: bytes) -> list[int]:
    """Return a number for each of some beginnings of a body, the longest last, each half of the body or more.

    Bodies that begin alike have a number in common. A body of less than 1 KiB has none: to read it again costs little.

    >>> one, other = b"a" * 9000 + b"?", b"a" * 9000 + b"b" * 3000
    >>> bool(set(beginnings(one)) & set(beginnings(other))), beginnings(b"short")
    (True, [])
    """
    if len(content) < _SHORTEST_BYTES:
        return []
    found, view, sum_, begin, end = [], memoryview(content), 0, 0, _SHORTEST_BYTES
    while end <= len(view):
        sum_ = zlib.crc32(view[begin:end], sum_)
        if 2 * end >= len(view):
            found.append(end << 32 | sum_)
        begin, end = end, int(end * _LONGER)
    return found


class Beginnings:
    """The replica that was last sent each beginning. Not safe to share between threads."""

    def __init__(self) -> None:
        self._replicas: dict[int, str] = {}  # the latest last

    def replica_of(self, found: list[int]) -> str | None:
        """Return the name of the replica that was sent the longest of these beginnings."""
        return next((self._replicas[one] for one in reversed(found) if one in self._replicas), None)

    def note(self, found: list[int], name: str) -> None:
        """A replica is sent a request with these beginnings."""
        for one in found:
            self._replicas.pop(one, None)
            self._replicas[one] = name
        while len(self._replicas) > _MOST_KNOWN:
            del self._replicas[next(iter(self._replicas))]
